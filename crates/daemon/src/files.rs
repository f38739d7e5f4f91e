//! Files, folders, sockets and descriptors. Nothing here knows what a volume is.
//!
//! ```text
//!   whole_file       a file that is read and replaced as a whole
//!   listing          a list of things that have names, in such a file
//!   folder_entries   renaming without replacing; names made durable
//!   lock             one daemon a folder
//!   sockets          Unix sockets at stable paths, ports
//!   descriptors      how many may be open
//! ```

pub(crate) mod descriptors;
pub(crate) mod folder_entries;
pub(crate) mod listing;
pub(crate) mod lock;
pub(crate) mod sockets;
pub(crate) mod whole_file;
