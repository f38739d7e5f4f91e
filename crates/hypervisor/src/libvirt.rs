//! libvirt, by its own protocol over its daemon's unix socket: what is needed to have the disks of its domains served, and
//! to give them back.
//!
//! ```text
//!   Libvirt      calls about domains: definitions, jobs, copies of disks
//!      │           DiskSource, Disk   what a definition says of its disks, and what is written there instead
//!   Connection   one call after the other, answers by number
//!      │
//!     XDR        numbers and strings: decoded without trust, encoded
//!      │
//!   unix socket of virtqemud or libvirtd
//! ```
//!
//! A domain is libvirt's, and its QEMU's monitor with it: disks are led elsewhere by libvirt's own jobs, so that its definition,
//! its locks and its labels stay true. It is no [`crate::Hypervisor`]: libvirt does not let go of the moment at which the memory
//! changes hands. Nothing of libvirt is linked; see `docs/decisions/0069-libvirt-copies-its-disks-to-us.md`.

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
