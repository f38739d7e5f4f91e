//! QEMU, over its machine protocol (QMP): versions from 7.2 on.
//!
//! ```text
//!   Machine    what is done with a running QEMU: state, memory out, memory in, block nodes
//!      │           Lifeline    the little that it does while its main thread hangs
//!     Qmp             │
//!      └── Exchange ──┘   commands with deadlines, answers by identity, events as they come
//!             │
//!           wire          lines of JSON: decoded without trust, encoded
//!      ┌──────┴──────┐
//!   unix socket    two pipes
//! ```
//!
//! The move of a machine's memory, as the two processes see it. Nothing here decides when a step is taken.
//!
//! ```text
//!   source                                               target, started with `-incoming defer -S`
//!   offer_memory ─► setup ─► active (rounds)   ═══════►  expect_memory: inmigrate
//!                              │ the rest is small enough
//!                       pre-switchover: paused
//!   switch_over   ─► device ─► completed       ═══════►  await_loaded: paused, its disks not activated
//!                       │          └ postmigrate            │
//!                       │      resume: goes on here,     resume: runs there
//!                       │      if it does not there
//!                       └ failed: runs on by itself
//! ```

mod block;
mod disk;
mod error;
#[cfg(test)]
mod fake;
mod lifeline;
mod machine;
mod memory;
mod qmp;
mod shape;
mod state;

pub use block::{BlockDevice, BlockNode};
pub use disk::{
    DiskOptions, ExportAddress, ImageFile, LocalDisk, RECONNECT_SECONDS, StayReason, StayingDisk,
};
pub use error::{ErrorClass, MachineError, QmpError};
pub use lifeline::Lifeline;
pub use machine::Machine;
pub use memory::{MemoryMode, MemoryOptions, MemoryProgress, MemoryTransfer, PostCopyStart};
pub use qmp::{Event, Events, Heard, Qmp};
pub use shape::{MachineType, ProcessorModel};
pub use state::{MigrationStatus, RunState, Version};
