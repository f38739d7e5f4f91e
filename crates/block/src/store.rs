//! Stores: the bottom of every stack, which holds the bytes.

pub mod file;
pub mod image;
mod lock;
mod loops;
pub mod memory;
pub mod opened;
pub mod qcow2;
pub mod remote;
mod users;

pub use file::FileStore;
pub use image::{Access, DeviceUser, Image, ImageError, Kind};
pub use lock::Holder;
pub use loops::{Below, LoopDevice, device_number, loop_devices};
pub use memory::MemoryStore;
pub use opened::Opened;
pub use qcow2::{Qcow2Error, Qcow2Image, Qcow2Options, Qcow2Store};
pub use remote::{RemoteError, RemoteImage, RemoteOptions, RemoteStore};
pub use users::{is_ours, open_beside, try_hold, users_of};
