//! Parses a VM's command from another host into typed values, and writes the command anew from these.
//!
//! ```text
//!   words ─► lexer: split unambiguously ─► options, devices, drives, processor: closed sets of options, keys and types
//!         ─► used names are defined here, once ─► Understood ─► write(): the command for QEMU
//! ```
//! No received text is passed on. Anything unknown is refused, with the option, the key and the value. `[machines]` of the
//! configuration may allow more: such an option is split as strictly, and its paths are checked.

mod devices;
mod drives;
mod left_out;
mod lexer;
mod memory;
mod names;
mod open;
mod options;
mod processor;
#[cfg(test)]
mod properties;
mod reading;
#[cfg(test)]
mod tests;
mod value;

use std::path::{Path, PathBuf};

use self::names::Names;
use self::options::{MERGED, REPEATED};
use self::reading::{CHARACTER_DEVICE, read_argument};
use self::value::Kind;
pub use self::value::Value;

/// The prefix of programs that can be found on another host.
const PROGRAM: &str = "qemu-system-";
/// Keeps QEMU from making devices that the command does not name.
const NO_DEFAULTS: &str = "-nodefaults";
/// Keeps QEMU from reading options of this host.
const NO_USER_CONFIG: &str = "-no-user-config";
const USER_NETWORK: &str = "user";
const NETWORKS: [&str; 3] = ["-net", "-netdev", "-nic"];
/// Keeps the guest from reaching this host, and others through it.
const RESTRICT: &str = "restrict";

/// The reason why a command from another host is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAllowed {
    /// An option, a key or a word outside of the closed set.
    #[error(
        "a VM from another host may not use {what} here; to allow it: allow = [\"{entry}\"] below [machines] in that host's \
         configuration; then restart its daemon"
    )]
    Option {
        /// The words in question.
        what: String,
        /// The entry of the configuration that would allow it.
        entry: String,
    },
    /// A path of this host.
    #[error(
        "{option}: a VM from another host may not use the file {path} here; to allow it: folders = [\"{folder}\"] below \
         [machines] in that host's configuration; then restart its daemon"
    )]
    Path {
        /// The option with the path.
        option: String,
        /// The path in question.
        path: String,
        /// The folder that would have to be allowed.
        folder: String,
    },
    /// An ambiguous or meaningless part.
    #[error("{what} {reason}; the command of a VM from another host must have only one possible meaning")]
    Malformed {
        /// The words in question.
        what: String,
        /// The reason of the refusal.
        reason: String,
    },
}

/// Additional permissions of a host's administrator.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allowed<'a> {
    /// Options, alone or with the beginning of their value: `-vnc`, `-netdev bridge`.
    pub options: &'a [String],
    /// Folders whose files may be named.
    pub folders: &'a [PathBuf],
}

/// A command as typed values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Understood {
    program: String,
    arguments: Vec<Argument>,
    warnings: Vec<String>,
}

/// An option with its parsed value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    option: String,
    body: Body,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Body {
    Nothing,
    Alone(Value),
    /// Keys; QEMU takes a first value without a key as this one.
    Keys {
        implied: &'static str,
        said: Said,
    },
    /// A monitor or a port at a socket that QEMU serves.
    Served(Value),
    /// An option that the administrator of this host allows.
    Open(open::Open),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Said {
    pairs: Vec<(String, Value)>,
    names: Names,
}

impl Understood {
    /// Parses a command, with its variables as written.
    ///
    /// # Errors
    /// [`NotAllowed`]: the part that is unknown, or may not be named.
    pub fn read(command: &[String], allowed: Allowed<'_>) -> Result<Self, NotAllowed> {
        let (program, words) =
            command.split_first().map_or(("", command), |(first, rest)| (first.as_str(), rest));
        check_program(program)?;
        let mut understood =
            Self { program: program.to_owned(), arguments: Vec::new(), warnings: Vec::new() };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let argument = read_argument(word, &mut words, allowed)?;
            understood.push(argument)?;
        }
        understood.check_monitor()?;
        understood.names()?.check()?;
        left_out::check_command(&understood.arguments)?;
        understood.close(allowed)?;
        Ok(understood)
    }

    /// Returns everything that [`Self::read`] refuses, as far as each option can be judged alone; empty if it refuses nothing.
    pub fn refusals(command: &[String], allowed: Allowed<'_>) -> Vec<NotAllowed> {
        let mut found = Vec::new();
        let mut words = command.get(1..).unwrap_or_default().iter().peekable();
        while let Some(word) = words.next() {
            let mut rest = words.clone();
            match read_argument(word, &mut rest, allowed) {
                Ok(_) => words = rest,
                Err(refusal) => {
                    found.push(refusal);
                    // The value of a refused option is no option.
                    words.next_if(|value| !value.starts_with('-'));
                }
            }
        }
        if found.is_empty() {
            found.extend(Self::read(command, allowed).err());
        }
        found
    }

    /// Returns the command, written anew from the parsed values.
    pub fn write(&self) -> Vec<String> {
        let mut words = vec![self.program.clone()];
        for argument in &self.arguments {
            words.push(argument.option.clone());
            words.extend(argument.value());
        }
        words
    }

    /// Returns the differences from the other host, for the administrator.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Returns the parsed options.
    pub fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    fn push(&mut self, argument: Argument) -> Result<(), NotAllowed> {
        let option = argument.option.clone();
        let known = self.arguments.iter_mut().find(|known| known.option == option);
        match (known, argument.body) {
            (Some(Argument { body: Body::Keys { said, .. }, .. }), Body::Keys { said: more, .. })
                if MERGED.contains(&option.as_str()) =>
            {
                said.append(&option, more)
            }
            (Some(_), body) if !REPEATED.contains(&option.as_str()) && !matches!(body, Body::Open(_)) => {
                Err(NotAllowed::malformed(&option, "", "is said twice"))
            }
            (_, body) => {
                self.arguments.push(Argument { option, body });
                Ok(())
            }
        }
    }

    fn has(&self, option: &str) -> bool {
        self.arguments.iter().any(|argument| argument.option == option)
    }

    fn check_monitor(&self) -> Result<(), NotAllowed> {
        if self.has("-qmp") { Ok(()) } else { Err(NotAllowed::malformed("-qmp", "", "is missing")) }
    }

    fn names(&self) -> Result<Names, NotAllowed> {
        let mut names = Names::default();
        for argument in &self.arguments {
            match &argument.body {
                Body::Keys { said, .. } => names.add(&argument.option, &said.names)?,
                Body::Alone(Value::Word(word)) => {
                    if let Some(device) = word.strip_prefix(CHARACTER_DEVICE) {
                        names.uses(value::Class::Character, device);
                    }
                }
                Body::Open(open) => names.add(&argument.option, open.names())?,
                _ => {}
            }
        }
        Ok(names)
    }

    /// Adds the options that QEMU would default, so that it does nothing unparsed.
    fn close(&mut self, allowed: Allowed<'_>) -> Result<(), NotAllowed> {
        let mut warnings = Vec::new();
        for argument in &mut self.arguments {
            let Argument { option, body: Body::Keys { said, .. } } = argument else { continue };
            let is_user_network = NETWORKS.contains(&option.as_str())
                && matches!(said.get("type"), Some(Value::Word(kind)) if kind == USER_NETWORK);
            if is_user_network && !allowed.names(option, USER_NETWORK) {
                match said.get(RESTRICT) {
                    Some(Value::Switch(true)) => {}
                    _ => warnings.push(isolated(option)),
                }
                said.set(RESTRICT, Value::Switch(true));
            }
            if !allowed.names(option, "tap") {
                check_tap(option, said)?;
            }
        }
        let has_network = NETWORKS.iter().any(|option| self.has(option));
        if !self.has(NO_DEFAULTS) && !has_network && !allowed.names("-net", USER_NETWORK) {
            // N.B. QEMU would make these two by default, and let the guest reach this host and others.
            self.add("-net", "type", &[("type", Value::Word("nic".to_owned()))])?;
            let network = [("type", Value::Word(USER_NETWORK.to_owned())), (RESTRICT, Value::Switch(true))];
            self.add("-net", "type", &network)?;
            warnings.push(isolated("-net"));
        }
        if !self.has(NO_DEFAULTS) {
            // The guest has the same ports, without anything of this host behind them.
            for (option, nothing) in [("-monitor", "none"), ("-serial", "null"), ("-parallel", "null")] {
                if !self.has(option) {
                    let body = Body::Alone(Value::Word(nothing.to_owned()));
                    self.arguments.push(Argument { option: option.to_owned(), body });
                }
            }
        }
        // N.B. a QEMU without a display would let every user of this host connect to a VNC server.
        if !DISPLAYS.iter().any(|option| self.has(option)) {
            let body = Body::Alone(Value::Word("none".to_owned()));
            self.arguments.push(Argument { option: "-display".to_owned(), body });
        }
        if !self.has(NO_USER_CONFIG) {
            self.arguments.push(Argument { option: NO_USER_CONFIG.to_owned(), body: Body::Nothing });
        }
        self.warnings = warnings;
        Ok(())
    }

    fn add(
        &mut self,
        option: &str,
        implied: &'static str,
        pairs: &[(&str, Value)],
    ) -> Result<(), NotAllowed> {
        let mut said = Said::default();
        for (key, value) in pairs {
            said.add(option, key, value.clone())?;
        }
        self.arguments.push(Argument { option: option.to_owned(), body: Body::Keys { implied, said } });
        Ok(())
    }
}

/// Returns a warning about the isolation of a network that QEMU makes within itself.
fn isolated(option: &str) -> String {
    format!(
        "{option} {USER_NETWORK}: its guest reaches nothing outside of it there (restrict=on); to let it reach that host and \
         others: allow = [\"{option} {USER_NETWORK}\"] below [machines] in that host's configuration"
    )
}

/// Checks that a tap device runs no programs, and already exists.
fn check_tap(option: &str, said: &Said) -> Result<(), NotAllowed> {
    let is_tap =
        NETWORKS.contains(&option) && matches!(said.get("type"), Some(Value::Word(kind)) if kind == "tap");
    if !is_tap || ["ifname", "script", "downscript"].iter().all(|key| said.get(key).is_some()) {
        return Ok(());
    }
    let what = format!("{option} tap without ifname=NAME,script=no,downscript=no");
    Err(NotAllowed::Option { what, entry: format!("{option} tap") })
}

const DISPLAYS: [&str; 4] = ["-display", "-nographic", "-vnc", "-spice"];

impl Argument {
    /// Returns its name, with one hyphen.
    pub fn option(&self) -> &str {
        &self.option
    }

    /// Returns its keys and values; a single value has no key.
    pub fn values(&self) -> Vec<(&str, &Value)> {
        match &self.body {
            Body::Nothing | Body::Open(_) => Vec::new(),
            Body::Alone(value) | Body::Served(value) => vec![("", value)],
            Body::Keys { said, .. } => said.pairs.iter().map(|(key, value)| (key.as_str(), value)).collect(),
        }
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values().into_iter().find_map(|(known, value)| (known == key).then_some(value))
    }

    fn value(&self) -> Option<String> {
        match &self.body {
            Body::Nothing => None,
            Body::Alone(value) => Some(value.to_string()),
            Body::Served(place) => Some(format!("unix:{place},server=on,wait=off")),
            Body::Open(open) => open.write(),
            Body::Keys { implied, said } => {
                // N.B. a value with an equals sign would be read as another key.
                let may_be_bare =
                    |key: &str, value: &str| key == *implied && !value.is_empty() && !value.contains('=');
                let words = said.pairs.iter().map(|(key, value)| (key, value.to_string()));
                let (first, rest): (Vec<_>, Vec<_>) = words.partition(|(key, value)| may_be_bare(key, value));
                let first = first.into_iter().map(|(_, value)| value);
                let rest = rest.into_iter().map(|(key, value)| format!("{key}={value}"));
                Some(first.chain(rest).collect::<Vec<_>>().join(","))
            }
        }
    }
}

fn check_program(program: &str) -> Result<(), NotAllowed> {
    let machine = program.strip_prefix(PROGRAM).unwrap_or_default();
    let is_sign = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    if !machine.is_empty() && machine.bytes().all(is_sign) {
        return Ok(());
    }
    Err(NotAllowed::malformed(program, "", "is not qemu-system-… without a folder"))
}

impl Said {
    fn get(&self, key: &str) -> Option<&Value> {
        self.pairs.iter().find_map(|(known, value)| (known == key).then_some(value))
    }

    fn set(&mut self, key: &str, value: Value) {
        self.pairs.retain(|(known, _)| known != key);
        self.pairs.push((key.to_owned(), value));
    }

    fn read(
        &mut self,
        option: &str,
        key: &str,
        kind: Kind,
        text: &str,
        allowed: Allowed<'_>,
    ) -> Result<(), NotAllowed> {
        let value = kind.read(text, allowed).map_err(|fault| fault.of(option, key, text))?;
        match kind {
            Kind::New(class) => self.names.makes(class, text),
            Kind::Of(class) => self.names.uses(class, text),
            _ => {}
        }
        self.add(option, key, value)
    }

    fn add(&mut self, option: &str, key: &str, value: Value) -> Result<(), NotAllowed> {
        if self.get(key).is_some() {
            return Err(NotAllowed::malformed(option, key, "is said twice"));
        }
        self.pairs.push((key.to_owned(), value));
        Ok(())
    }

    fn append(&mut self, option: &str, other: Self) -> Result<(), NotAllowed> {
        for (key, value) in other.pairs {
            self.add(option, &key, value)?;
        }
        self.names.add(option, &other.names)
    }
}

impl Allowed<'_> {
    /// Returns whether an option is allowed, alone or with the beginning of its value.
    fn names(&self, option: &str, word: &str) -> bool {
        let entry = format!("{option} {word}");
        self.options.iter().any(|known| *known == option || *known == entry)
    }
}

impl NotAllowed {
    fn option(option: &str, word: &str, pair: Option<(&str, &str)>) -> Self {
        let entry = format!("{option} {word}").trim_end().to_owned();
        let what = match pair {
            Some(("", value)) => format!("{option} {value}"),
            Some((key, value)) => format!("{entry} {key}={value}"),
            None => entry.clone(),
        };
        Self::Option { what, entry }
    }

    fn path(option: &str, path: &str) -> Self {
        let folder = Path::new(path).parent().unwrap_or(Path::new(path)).display().to_string();
        Self::Path { option: option.to_owned(), path: path.to_owned(), folder }
    }

    fn malformed(option: &str, text: &str, reason: &str) -> Self {
        Self::Malformed { what: format!("{option} {text}").trim_end().to_owned(), reason: reason.to_owned() }
    }
}
