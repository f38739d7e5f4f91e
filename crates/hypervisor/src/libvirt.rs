//! libvirt, by its own protocol over its daemon's unix socket: the calls for serving the disks of its domains, and
//! for giving them back.
//!
//! ```text
//!   Libvirt      calls about domains: definitions, jobs, copies of disks
//!      │           DiskSource, Disk   the disks in a definition, and their replacements
//!   Connection   one call after the other, answers by number
//!      │
//!     XDR        numbers and strings: decoded without trust, encoded
//!      │
//!   unix socket of virtqemud or libvirtd
//! ```
//!
//! libvirt owns a domain, and the monitor of its QEMU. So libvirt's own jobs move the disks, and its definition, locks and labels
//! stay correct. A domain is no [`crate::Hypervisor`], because libvirt does not give up control of the moment at which the memory
//! changes hands. No code of libvirt is linked; see `docs/decisions/0069-libvirt-copies-its-disks-to-us.md`.

mod connection;
mod definition;
mod domain;
mod error;
mod presence;
mod waiting;
mod xdr;

pub use connection::Connection;
pub use definition::{
    Disk, DiskSource, Mirror, NbdSource, disk_for_export, disk_for_file, disks, mentions_beside, qemu_user,
    with_export, with_file,
};
pub use domain::{BlockJob, Definition, DiskSize, Domain, Libvirt, parse_uuid, show_uuid};
pub use error::LibvirtError;
pub use presence::{DomainState, Presence};
