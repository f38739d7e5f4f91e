//! Names that a command defines and uses: each used name must be defined by the same command, once.
//!
//! So a command cannot refer to QEMU's own objects, such as the character device of its monitor.

use super::NotAllowed;
use super::value::Class;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    made: Vec<(Class, String)>,
    used: Vec<(Class, String)>,
}

/// QEMU's name for the character devices of monitors, which a command must not use.
const MONITOR: &str = "compat_monitor";
const PORTS: [&str; 3] = ["serial", "parallel", "debugcon"];

impl Names {
    pub(super) fn makes(&mut self, class: Class, name: &str) {
        self.made.push((class, name.to_owned()));
    }

    pub(super) fn uses(&mut self, class: Class, name: &str) {
        self.used.push((class, name.to_owned()));
    }

    pub(super) fn add(&mut self, option: &str, other: &Self) -> Result<(), NotAllowed> {
        for (class, name) in &other.made {
            if self.made.contains(&(*class, name.clone())) {
                return Err(NotAllowed::malformed(option, name, "is a name that is already in use"));
            }
            let is_of = |begin: &str| name.strip_prefix(begin).is_some_and(is_number);
            let is_port = *class == Class::Character && PORTS.iter().any(|begin| is_of(begin));
            if is_of(MONITOR) || is_port {
                return Err(NotAllowed::malformed(option, name, "is a name that QEMU assigns itself"));
            }
            self.made.push((*class, name.clone()));
        }
        self.used.extend(other.used.iter().cloned());
        Ok(())
    }

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
