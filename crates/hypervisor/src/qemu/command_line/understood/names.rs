//! Names that a command makes and uses: what is used must be made by the same command, once.
//!
//! So nothing can be named that QEMU has by itself, such as the character device of its monitor.

use super::NotAllowed;
use super::value::Class;

/// Names, by what they are of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    made: Vec<(Class, String)>,
    used: Vec<(Class, String)>,
}

/// What QEMU calls the character devices of monitors. Nothing of a command may be called so.
const MONITOR: &str = "compat_monitor";
/// What it calls those of ports.
const PORTS: [&str; 3] = ["serial", "parallel", "debugcon"];

impl Names {
    pub(super) fn makes(&mut self, class: Class, name: &str) {
        self.made.push((class, name.to_owned()));
    }

    pub(super) fn uses(&mut self, class: Class, name: &str) {
        self.used.push((class, name.to_owned()));
    }

    /// Adds those of an option.
    pub(super) fn add(&mut self, option: &str, other: &Self) -> Result<(), NotAllowed> {
        for (class, name) in &other.made {
            if self.made.contains(&(*class, name.clone())) {
                return Err(NotAllowed::malformed(option, name, "is a name that something else has"));
            }
            let is_of = |begin: &str| name.strip_prefix(begin).is_some_and(is_number);
            let is_port = *class == Class::Character && PORTS.iter().any(|begin| is_of(begin));
            if is_of(MONITOR) || is_port {
                return Err(NotAllowed::malformed(option, name, "is a name that QEMU gives itself"));
            }
            self.made.push((*class, name.clone()));
        }
        self.used.extend(other.used.iter().cloned());
        Ok(())
    }

    /// Looks whether everything that is used is made.
    pub(super) fn check(&self) -> Result<(), NotAllowed> {
        match self.used.iter().find(|used| !self.made.contains(used)) {
            Some((class, name)) => {
                Err(NotAllowed::malformed(name, "", &format!("is no {} of this command", class.noun())))
            }
            None => Ok(()),
        }
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

impl Class {
    fn noun(self) -> &'static str {
        match self {
            Self::Node => "drive or node",
            Self::Character => "character device",
            Self::Network => "network",
            Self::Object => "object",
            Self::Tpm => "TPM",
            Self::Audio => "audio device",
            Self::Device => "device",
        }
    }
}
