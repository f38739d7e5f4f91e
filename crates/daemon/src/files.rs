//! Files, folders, sockets and descriptors. Nothing here depends on volumes.
//!
//! ```text
//!   whole_file       a file that is read and replaced as a whole
//!   listing          a list of named entries in such a file
//!   folder_entries   renaming without replacing; names made durable
//!   lock             one daemon for each folder
//!   sockets          Unix sockets at stable paths, ports
//!   descriptors      the limit of open descriptors
//! ```

pub(crate) mod descriptors;
pub(crate) mod folder_entries;
pub(crate) mod listing;
pub(crate) mod lock;
pub(crate) mod sockets;
pub(crate) mod whole_file;
