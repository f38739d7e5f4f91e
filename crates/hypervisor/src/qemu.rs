//! QEMU, over its machine protocol (QMP): versions from 7.2 on.
//!
//! ```text
//!   VM    operations on a running QEMU: state, memory out, memory in, block nodes
//!      │           Lifeline    the few operations that work while its main thread hangs
//!     Qmp             │
//!      └── Exchange ──┘   commands with deadlines, answers by identity, events as they come
//!             │
//!           wire          lines of JSON: decoded without trust, encoded
//!      ┌──────┴──────┐
//!   unix socket    two pipes
//! ```
//!
//! [`crate::Hypervisor`] shows the transfer of a VM's memory, with QEMU's statuses. A target is started with `-incoming defer
//! -S`; a source that has sent everything is in state *postmigrate*.

mod block;
pub mod command_line;
mod disk;
mod error;
mod export_use;
#[cfg(test)]
mod fake_monitor;
#[cfg(test)]
mod hostile_monitor;
mod hypervisor;
mod launched;
mod lifeline;
mod look;
mod memory;
mod process;
mod qmp;
mod shape;
mod version;

pub use block::{BlockDevice, BlockNode};
pub use disk::{
    DiskOptions, ExportAddress, ImageFile, LocalDisk, RECONNECT_SECONDS, StayReason, StayingDisk,
};
pub use error::{ErrorClass, QmpError};
pub use export_use::{ExportUse, UsingDisk};
pub use hypervisor::memory_socket;
pub use launched::{Descriptor, Launched, Use};
pub use lifeline::Lifeline;
pub use look::{Leaf, Look, SeenDevice, SeenDrive};
pub use process::Qemu;
pub use qmp::{Event, Events, Heard, Qmp};
pub use shape::{MachineType, ProcessorModel};
pub use version::Version;
