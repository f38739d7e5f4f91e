//! Block devices: stores, filters and the I/O engines below them.
//!
//! ```text
//!   filter::{align, fault, delay}    layers that any stack may have; `check` asserts the contract between two
//!        │   every layer is a `BlockDevice`
//!   store::{file, qcow2, remote, …}  hold the bytes: files and devices, images, NBD servers, memory
//!        │
//!   engine::{ring, threads}          move them: io_uring, or threads where io_uring is refused
//!        │
//!   executor                         one thread's tasks and timers, over an engine's driver
//! ```
//!
//! [`device`] is the contract, [`growth`] an addition for stores that can grow, [`conformance`] the suite that tests both.
//! [`range_lock`] separates requests that must not overlap. [`held`] finds files in folders that other users may change. All
//! `unsafe` code is in [`clone`], in `engine::ring`, in `store::{lock, loops}`, in `store::qcow2::storage` and in [`inherited`].
//!
//! This crate knows nothing of migrations. The filters that take part in one (gate, tracker, mirror) are in the `lane` crate. The
//! simulator brings devices and a driver of its own and runs everything above them unchanged.

pub mod buffer;
pub mod change;
pub mod clone;
pub mod conformance;
pub mod device;
pub mod engine;
pub mod error;
pub mod executor;
pub mod filter;
pub mod growth;
pub mod held;
pub mod inherited;
pub mod latency;
mod random;
pub mod range_lock;
pub mod signal;
pub mod store;

pub use buffer::{Buffer, BufferPool};
pub use change::Change;
pub use device::{BlockDevice, ByteRange, Durability, Extent, ExtentKind, Geometry, IoFuture, ZeroMode};
pub use error::IoError;
pub use executor::{Driver, Executor, Handle};
pub use growth::{GrowingGeometry, Growth};
pub use store::{
    Access, FileStore, Image, ImageError, MemoryStore, Opened, RemoteError, RemoteImage, RemoteStore,
};
