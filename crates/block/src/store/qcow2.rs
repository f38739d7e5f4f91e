//! Volumes in qcow2 images, with their chain of backing files.
//!
//! ```text
//!   control thread      Qcow2Image      header and chain: checked, opened, locked       header, image, probe, create
//!        │ Send
//!   lane's thread       Qcow2Store      requests of guests                              store, allocate, extents
//!        │              Tables          imago: locates each cluster                    mapping, storage
//!        ▼              LaneFile        one file: I/O by the engine, order of writes    file
//!      engine
//! ```
//!
//! imago handles the format: first- and second-level tables, refcounts, compressed clusters. Its own file I/O is not used; all
//! I/O goes through the lane's engine.
//!
//! Not supported: making internal snapshots (existing ones are kept), repairing images, shrinking them.

mod allocate;
mod create;
mod extents;
mod file;
mod finish;
mod growth;
mod header;
mod image;
mod mapping;
mod probe;
mod storage;
mod store;
mod top;

pub use create::{BackingFile, CLUSTER_SIZE, Qcow2Options};
pub use header::{FilesBelow, HEADER_MAX, HeaderError};
pub use image::{CHAIN_MAX, Qcow2Error, Qcow2Image};
pub use probe::{Format, disk_size, names_backing_file, probe_format, probe_held};
pub use store::Qcow2Store;
pub use top::{TopLayer, Within};
