//! Stores: the bottom of every stack, where the bytes are.

pub mod file;
pub mod image;
mod lock;
pub mod memory;
pub mod opened;

pub use file::FileStore;
pub use image::{Access, DeviceUser, Image, ImageError, Kind};
pub use lock::Holder;
pub use memory::MemoryStore;
pub use opened::Opened;
