//! What administrators want of a VM at whichever host it is: these settings move with the VM.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use api::{SetVm, VmStart};
use migration::vm::start::Candidate;
use serde::{Deserialize, Serialize};

/// The longest text to wait for on a console, in bytes.
const TEXT_BYTES_MAX: usize = 200;
/// The longest name of a host: that of the DNS.
const HOST_BYTES_MAX: usize = 253;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Preferences {
    /// Its priority in an evacuation.
    #[serde(default = "usual_priority", skip_serializing_if = "is_usual_priority")]
    pub(crate) priority: u8,
    #[serde(default, skip_serializing_if = "Start::is_usual")]
    pub(crate) start: Start,
}

/// Whether and when a VM starts when its host has booted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Start {
    pub(crate) at_boot: bool,
    /// VMs with a lower one start first.
    pub(crate) order: u16,
    /// What later VMs wait for; `None`: for its start alone.
    pub(crate) wait_for: Option<WaitFor>,
    /// The longest that later VMs wait for this one.
    pub(crate) wait_max_s: u32,
}

/// The sign that a VM is ready.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum WaitFor {
    /// Something accepts connections at `HOST:PORT`.
    Tcp(String),
    /// This text is in a log of the VM's own folder, such as that of a serial console.
    Console(String),
}

/// A text is no form of `--wait-for`.
#[derive(Debug, thiserror::Error)]
#[error("\"{0}\" is nothing to wait for: write tcp:HOST:PORT, or console:TEXT with at most 200 bytes")]
pub(crate) struct NothingToWaitFor(String);

impl Default for Preferences {
    fn default() -> Self {
        Self { priority: usual_priority(), start: Start::default() }
    }
}

impl Preferences {
    /// Returns them with what an order changes, or why it cannot be.
    pub(super) fn changed(mut self, change: &SetVm) -> Result<Self, String> {
        if *change == SetVm::default() {
            return Err("nothing is to be changed: give a priority, or when the VM is started".to_owned());
        }
        self.priority = change.priority.unwrap_or(self.priority);
        if self.priority > SetVm::PRIORITY_MAX {
            return Err(format!("a priority is a number from 0 to {}", SetVm::PRIORITY_MAX));
        }
        let start = &mut self.start;
        start.at_boot = change.start_at_boot.unwrap_or(start.at_boot);
        start.order = change.start_order.unwrap_or(start.order);
        start.wait_max_s = change.wait_max_s.unwrap_or(start.wait_max_s);
        if start.wait_max_s > SetVm::WAIT_MAX_S_MAX {
            return Err("wait_max_s is too long: at most an hour".to_owned());
        }
        match change.wait_for.as_deref() {
            None => {}
            Some(SetVm::NOTHING) => start.wait_for = None,
            Some(text) => {
                start.wait_for = Some(text.parse().map_err(|error: NothingToWaitFor| error.to_string())?);
            }
        }
        Ok(self)
    }

    /// Returns those of a description from another host, within the limits of an order.
    pub(super) fn limited(mut self) -> Self {
        self.priority = self.priority.min(SetVm::PRIORITY_MAX);
        self.start.wait_max_s = self.start.wait_max_s.min(SetVm::WAIT_MAX_S_MAX);
        self
    }
}

impl Default for Start {
    fn default() -> Self {
        let (order, wait_max_s) = (SetVm::START_ORDER_DEFAULT, SetVm::WAIT_MAX_S_DEFAULT);
        Self { at_boot: false, order, wait_for: None, wait_max_s }
    }
}

impl Start {
    fn is_usual(&self) -> bool {
        *self == Self::default()
    }

    /// Returns how a VM of this name is started among others.
    pub(crate) fn candidate(&self, name: &str) -> Candidate {
        Candidate {
            name: name.to_owned(),
            order: self.order,
            is_watched: self.wait_for.is_some(),
            wait_max: Duration::from_secs(self.wait_max_s.into()),
        }
    }

    pub(crate) fn described(&self) -> VmStart {
        VmStart {
            at_boot: self.at_boot,
            order: self.order,
            wait_for: self.wait_for.as_ref().map(WaitFor::to_string),
            wait_max_s: self.wait_max_s,
        }
    }
}

fn usual_priority() -> u8 {
    SetVm::PRIORITY_DEFAULT
}

fn is_usual_priority(priority: &u8) -> bool {
    *priority == usual_priority()
}

impl FromStr for WaitFor {
    type Err = NothingToWaitFor;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let nothing = || NothingToWaitFor(words::clean(text));
        match text.split_once(':') {
            Some(("tcp", address)) => {
                let (host, port) = address.rsplit_once(':').ok_or_else(nothing)?;
                let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
                let is_name = !bare.is_empty()
                    && bare.len() <= HOST_BYTES_MAX
                    && bare.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-:%_".contains(&byte));
                let is_bracketed = bare.len() != host.len();
                let is_port = port.bytes().all(|byte| byte.is_ascii_digit())
                    && port.parse::<u16>().is_ok_and(|port| port > 0);
                if !is_name || !is_port || is_bracketed != bare.contains(':') {
                    return Err(nothing());
                }
                Ok(Self::Tcp(address.to_owned()))
            }
            Some(("console", wanted)) => {
                let is_text = !wanted.is_empty()
                    && wanted.len() <= TEXT_BYTES_MAX
                    && !wanted.chars().any(char::is_control);
                if is_text { Ok(Self::Console(wanted.to_owned())) } else { Err(nothing()) }
            }
            _ => Err(nothing()),
        }
    }
}

impl TryFrom<String> for WaitFor {
    type Error = NothingToWaitFor;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<WaitFor> for String {
    fn from(wait: WaitFor) -> Self {
        wait.to_string()
    }
}

impl fmt::Display for WaitFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Console(text) => write!(f, "console:{text}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_and_texts_are_waited_for() {
        for text in
            ["tcp:10.0.0.5:5432", "tcp:db-1.example:22", "tcp:[fd00::5]:80", "console:login: ", "console:a:b"]
        {
            assert_eq!(text.parse::<WaitFor>().unwrap().to_string(), text);
        }
        let long = format!("console:{}", "x".repeat(201));
        for text in [
            "",
            "tcp",
            "tcp:",
            "tcp:host",
            "tcp:host:",
            "tcp::80",
            "tcp:host:0",
            "tcp:host:65536",
            "tcp:host:+80",
            "tcp:a b:80",
            "tcp:a/b:80",
            "tcp:fd00::5:80",
            "tcp:[host]:80",
            "console:",
            "console:a\nb",
            "udp:host:80",
            &long,
        ] {
            assert!(text.parse::<WaitFor>().is_err(), "{text}");
        }
    }

    #[test]
    fn usual_preferences_are_not_written_and_those_of_others_are_limited() {
        assert_eq!(serde_json::to_string(&Preferences::default()).unwrap(), "{}");
        let sent = r#"{"priority":200,"start":{"at_boot":true,"order":7,"wait_for":"tcp:a:1","wait_max_s":4000000000}}"#;
        let read: Preferences = serde_json::from_str::<Preferences>(sent).unwrap().limited();
        assert_eq!((read.priority, read.start.order, read.start.wait_max_s), (100, 7, 3600));
        assert!(serde_json::from_str::<Preferences>(r#"{"start":{"wait_for":"exec:rm"}}"#).is_err());
    }
}
