//! Volumes in qcow2 images, with the images that they stand on.
//!
//! ```text
//!   control thread      Qcow2Image      header and chain: checked, opened, locked       header, image, probe, create
//!        │ Send
//!   lane's thread       Qcow2Store      requests of guests                              store, allocate, extents
//!        │              Tables          imago: where each cluster is                    mapping, storage
//!        ▼              LaneFile        one file: I/O by the engine, order of writes    file
//!      engine
//! ```
//!
//! The format is imago's business: it keeps first- and second-level tables, refcounts, and unpacks compressed clusters.
//! Its own file I/O is not used; everything goes through the lane's engine.
//!
//! Not here: snapshots inside of images are kept as they are, but not made; images are not repaired, and never become smaller.

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
pub use header::HeaderError;
pub use image::{CHAIN_MAX, Qcow2Error, Qcow2Image};
pub use probe::{Format, disk_size, names_backing_file, probe_format, probe_held};
pub use store::Qcow2Store;
pub use top::{TopLayer, Within};
