//! QEMU's command line: reads a VM's command, and prepares it for another host.
//!
//! ```text
//!   parser ──► movable      options that tie the VM to one host
//!          ──► understood   a command of another host: typed, of a closed set, and written anew
//!          ──► listening    ports and sockets that it listens on
//!          ──► files        files that it refers to
//!          ──► apart        a second instance that reaches nothing outside
//!          ──► made         the devices and drives that it makes
//!          ──► sandbox      rights that QEMU gives up
//!          ──► derived      the command of a running QEMU, for another host
//!          ──► script       the command as a shell script, over plain images
//!   template                a word with variables for what differs from host to host
//! ```
//! It knows no configuration and no volumes; the caller passes the needed values.

pub mod apart;
pub mod derived;
pub mod files;
pub mod listening;
pub mod made;
pub mod movable;
mod parser;
pub mod sandbox;
pub mod script;
mod template;
pub mod understood;

pub use parser::{Argument, Values, parse};
pub use template::{Template, Variable};
