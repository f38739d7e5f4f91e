//! The backends of a VM's devices on its host: consoles, sockets, windows, networks, firmware.

use std::collections::BTreeSet;

use super::{Argument, Maker, Unmovable, Values, refuse};
use crate::qemu::command_line::movable::SYSTEM_FOLDER;

/// Options that the guest does not see, with their meaning for the administrator.
const LEFT: [(&str, &str); 12] = [
    ("-D", "QEMU's own log"),
    ("-d", "QEMU's own log"),
    ("-trace", "QEMU's own log"),
    ("-gdb", "the port of the debugger"),
    ("-s", "the port of the debugger"),
    ("-runas", "the user that QEMU changes to: it runs as that of the daemon"),
    ("-full-screen", "the window"),
    ("-alt-grab", "the window"),
    ("-ctrl-grab", "the window"),
    ("-no-quit", "the window"),
    ("-sdl", "the window"),
    ("-curses", "the window"),
];
/// Options that cannot go along, with the reason.
const REFUSED: [(&str, &str); 3] = [
    ("-readconfig", "reads options from a file of this host: start the VM with these options instead"),
    ("-chroot", "confines QEMU to a folder of this host: start the VM without it"),
    ("-add-fd", INHERITED),
];
const WINDOWS: [&str; 6] = ["gtk", "sdl", "curses", "cocoa", "dbus", "spice-app"];
const INHERITED: &str = "is an open descriptor that came from the program that started the VM (such as libvirt): another host \
    has none like it";
const HOST_DEVICE: &str = "is a device of this host: use a socket";

pub(super) fn of_monitors(arguments: &[Argument]) -> BTreeSet<String> {
    let mut monitors = BTreeSet::new();
    let mut others = BTreeSet::new();
    for argument in arguments {
        let value = argument.value.as_deref().unwrap_or_default();
        if argument.option == "-mon" {
            let values = Values::read(value);
            monitors.extend(values.get("chardev").or_else(|| Some(values.driver())));
        } else {
            others.extend(value.strip_prefix("chardev:").map(str::to_owned));
            others.extend(Values::read(value).get("chardev"));
        }
    }
    monitors.difference(&others).cloned().collect()
}

impl Maker<'_> {
    pub(super) fn backend(&mut self, argument: &Argument) -> Result<(), Unmovable> {
        let option = argument.option.as_str();
        let value = argument.value.as_deref().unwrap_or_default();
        if let Some((_, reason)) = REFUSED.iter().find(|(name, _)| *name == option) {
            return Err(refuse(format!("{option} {value}"), reason));
        }
        if let Some((_, what)) = LEFT.iter().find(|(name, _)| *name == option) {
            self.leave(format!("{what} ({option})"));
            return Ok(());
        }
        match option {
            "-chardev" => self.character_device(value)?,
            "-serial" | "-parallel" | "-debugcon" => self.port(option, value)?,
            "-display" => {
                self.has_display = true;
                let is_window = WINDOWS.contains(&Values::read(value).driver().as_str());
                if is_window {
                    self.leave(format!("the window ({option} {value})"));
                }
                self.say(option, if is_window { "none" } else { value });
            }
            "-nographic" | "-spice" => {
                self.has_display = true;
                self.keep(argument);
            }
            "-vnc" => {
                self.has_display = true;
                match value.strip_prefix("unix:") {
                    Some(path) => {
                        let socket = self.own_place("vnc");
                        let more =
                            path.split_once(',').map(|(_, more)| format!(",{more}")).unwrap_or_default();
                        self.say(option, &format!("unix:{socket}{more}"));
                    }
                    None => self.keep(argument),
                }
            }
            "-netdev" | "-nic" | "-net" => {
                check_network(option, value)?;
                self.keep(argument);
            }
            "-object" | "-fw_cfg" | "-acpitable" | "-smbios" => self.with_file(option, value)?,
            "-bios" | "-kernel" | "-initrd" | "-dtb" => self.boot_file(option, value)?,
            _ => self.keep(argument),
        }
        Ok(())
    }

    fn character_device(&mut self, value: &str) -> Result<(), Unmovable> {
        let mut values = Values::read(value);
        let id = values.get("id").unwrap_or_default();
        if self.of_monitors.contains(&id) {
            return Ok(());
        }
        check_inherited("-chardev", &values)?;
        match values.driver().as_str() {
            "socket" if values.get("path").is_some() && values.is_on("server") => {
                let place = self.own_place(&id);
                values.set("path", &place);
                // There may be no client yet to connect to it.
                values.retain(|key, value| {
                    key != "wait" && !(key.is_empty() && matches!(value, "wait" | "nowait"))
                });
                values.set("wait", "off");
            }
            "file" => {
                let place = self.own_place(&id);
                values.set("path", &place);
            }
            "stdio" | "pipe" => {
                let what = values.driver();
                self.leave(format!("what is connected to {id} by {what}; nothing is there instead"));
                values.retain(|key, _| key == "id" || key == "mux");
                let rest = values.write();
                self.say("-chardev", &format!("null,{rest}"));
                return Ok(());
            }
            "serial" | "tty" | "parallel" | "parport" => {
                return Err(refuse(format!("-chardev {value}"), HOST_DEVICE));
            }
            _ => {}
        }
        self.say("-chardev", &values.write());
        Ok(())
    }

    /// Takes a port of the VM, which is connected to something.
    fn port(&mut self, option: &str, value: &str) -> Result<(), Unmovable> {
        let told = value.strip_prefix("mon:").unwrap_or(value);
        let (kind, rest) = told.split_once(':').unwrap_or((told, ""));
        let place = option.trim_start_matches('-');
        match kind {
            "stdio" | "pipe" => {
                self.leave(format!("what is connected to {option} {value}; nothing is there instead"));
                self.say(option, "null");
            }
            "file" => {
                let path = self.own_place(place);
                self.say(option, &format!("file:{path}"));
            }
            "unix" if Values::read(rest).is_on("server") => {
                let path = self.own_place(place);
                self.say(option, &format!("unix:{path},server=on,wait=off"));
            }
            _ if told.starts_with('/') => return Err(refuse(format!("{option} {value}"), HOST_DEVICE)),
            _ => self.say(option, told),
        }
        Ok(())
    }

    fn with_file(&mut self, option: &str, value: &str) -> Result<(), Unmovable> {
        let mut values = Values::read(value);
        check_inherited(option, &values)?;
        let is_content = option != "-object"
            || values.driver() == "secret"
            || values.get("qom-type").as_deref() == Some("secret");
        let path = values.get("file").filter(|path| is_content && !path.starts_with(SYSTEM_FOLDER));
        let Some(path) = path else {
            self.say(option, value);
            return Ok(());
        };
        let place = self.file(option, &path)?;
        values.set("file", &place);
        self.say(option, &values.write());
        Ok(())
    }

    /// Takes a boot file. Kernels are too large to go along, and must be there already.
    fn boot_file(&mut self, option: &str, value: &str) -> Result<(), Unmovable> {
        let found = self.process.resolve(value.as_ref());
        let found = found.filter(|path| (self.limits.length)(path, self.process).is_some());
        // QEMU also looks for firmware among its own files.
        let path = found.as_ref().and_then(|path| path.to_str()).unwrap_or(value);
        if option == "-bios" && path.starts_with('/') && !path.starts_with(SYSTEM_FOLDER) {
            let place = self.file(option, path)?;
            self.say(option, &place);
        } else {
            self.say(option, path);
        }
        Ok(())
    }
}

fn check_network(option: &str, value: &str) -> Result<(), Unmovable> {
    let values = Values::read(value);
    check_inherited(option, &values)?;
    let kind = values.get("type").unwrap_or_else(|| values.driver());
    if kind == "vhost-user" || kind == "vhost-vdpa" {
        return Err(refuse(
            format!("{option} {kind}"),
            "keeps state in a process or a device of this host: use a tap device, a bridge, or user networking",
        ));
    }
    Ok(())
}

fn check_inherited(option: &str, values: &Values) -> Result<(), Unmovable> {
    let is_inherited = |(key, value): &(String, String)| {
        matches!(key.as_str(), "fd" | "fds" | "vhostfd" | "vhostfds") || value.starts_with("/dev/fdset/")
    };
    match values.pairs().into_iter().find(is_inherited) {
        Some((key, value)) => Err(refuse(format!("{option} {key}={value}"), INHERITED)),
        None => Ok(()),
    }
}
