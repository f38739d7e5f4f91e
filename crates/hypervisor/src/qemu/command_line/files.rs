//! The files that a command names by path, and its processor model: requirements of a host that runs a VM with this command.

use std::collections::BTreeSet;
use std::path::Path;

use super::parser::{Argument, Values, parse};

/// A file that a command names and that the VM reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    /// The option that names it.
    pub option: String,
    /// The path of the file.
    pub path: String,
    /// The VM's use of the file.
    pub used: Use,
}

/// The use of a file by a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Reads it while running: a guest would find another disk.
    WhileItRuns,
    /// Keeps it in memory, whose parts must have the same sizes at the target: firmware.
    InMemory,
    /// Reads it at its start: a kernel, tables.
    AtStart,
}

/// Returns the processor model in a command; `None`: the default of the machine type.
pub fn processor_model(command: &[String]) -> Option<String> {
    let mut arguments = parse(command.get(1..).unwrap_or_default()).into_iter().rev();
    let value = arguments.find(|argument| argument.option == "-cpu")?.value?;
    Some(Values::read(&value).driver())
}

/// Returns the machine type in a command; `None`: the default of QEMU.
pub fn machine_type(command: &[String]) -> Option<String> {
    let arguments = parse(command.get(1..).unwrap_or_default());
    let named = arguments.iter().rev().filter(|argument| is_machine(argument)).filter_map(|argument| {
        let values = Values::read(argument.value.as_deref()?);
        values.get("type").or_else(|| Some(values.driver()).filter(|name| !name.is_empty()))
    });
    named.into_iter().next()
}

/// Returns whether the VM of a command runs with KVM only.
pub fn needs_kvm(command: &[String]) -> bool {
    let mut accelerators = Vec::new();
    for argument in parse(command.get(1..).unwrap_or_default()) {
        let values = Values::read(argument.value.as_deref().unwrap_or_default());
        match argument.option.as_str() {
            "-enable-kvm" => accelerators.push("kvm".to_owned()),
            "-accel" => accelerators.push(values.get("accel").unwrap_or_else(|| values.driver())),
            _ if is_machine(&argument) => {
                let named = values.get("accel").unwrap_or_default();
                accelerators.extend(named.split(':').filter(|name| !name.is_empty()).map(str::to_owned));
            }
            _ => {}
        }
    }
    !accelerators.is_empty() && accelerators.iter().all(|name| name == "kvm")
}

fn is_machine(argument: &Argument) -> bool {
    matches!(argument.option.as_str(), "-machine" | "-M")
}

/// Returns the files that a command names, with the options that name them.
pub fn named(command: &[String]) -> Vec<NamedFile> {
    let arguments = parse(command.get(1..).unwrap_or_default());
    let firmware = firmware_nodes(&arguments);
    let mut named = Vec::new();
    for argument in &arguments {
        let value = argument.value.clone().unwrap_or_default();
        let values = Values::read(&value);
        let said = |keys: &[&str]| keys.iter().filter_map(|key| values.get(key)).collect::<Vec<_>>();
        let is_firmware = values.get("if").as_deref() == Some("pflash")
            || values.get("node-name").is_some_and(|node| firmware.contains(&node));
        let disk = if is_firmware { Use::InMemory } else { Use::WhileItRuns };
        let (paths, used) = match argument.option.as_str() {
            "-kernel" | "-initrd" | "-dtb" => (vec![value], Use::AtStart),
            "-fw_cfg" | "-smbios" | "-acpitable" => (said(&["file"]), Use::AtStart),
            "-bios" | "-pflash" => (vec![value], Use::InMemory),
            "-device" => (said(&["romfile"]), Use::InMemory),
            "-cdrom" => (vec![value], Use::WhileItRuns),
            "-drive" | "-blockdev" => (said(&["file", "filename", "file.filename"]), disk),
            _ => continue,
        };
        let paths = paths.into_iter().filter(|path| path.starts_with('/'));
        named.extend(paths.map(|path| NamedFile { option: argument.option.clone(), path, used }));
    }
    named
}

/// Returns the nodes of firmware (`-machine pflash0=NODE`), and those below them.
fn firmware_nodes(arguments: &[Argument]) -> BTreeSet<String> {
    let all = |option: &str| {
        let found = arguments.iter().filter(move |argument| argument.option == option);
        found.map(|argument| Values::read(argument.value.as_deref().unwrap_or_default())).collect::<Vec<_>>()
    };
    let units = all("-machine").into_iter().chain(all("-M"));
    let mut nodes: BTreeSet<String> =
        units.flat_map(|options| [options.get("pflash0"), options.get("pflash1")]).flatten().collect();
    for node in all("-blockdev") {
        if node.get("node-name").is_some_and(|name| nodes.contains(&name)) {
            nodes.extend(node.get("file"));
        }
    }
    nodes
}

/// Returns the files of this host that a command needs but does not bring along, and that do not exist by `is_there`.
pub fn missing(command: &[String], is_there: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut missing = Vec::new();
    for argument in parse(command.get(1..).unwrap_or_default()) {
        let value = argument.value.unwrap_or_default();
        let paths = match argument.option.as_str() {
            "-kernel" | "-initrd" | "-dtb" | "-bios" | "-mem-path" | "-L" | "-cdrom" | "-pflash" => {
                vec![value]
            }
            "-drive" | "-blockdev" => said(&value, &["file", "filename", "file.filename"]),
            "-netdev" | "-nic" | "-net" => said(&value, &["script", "downscript", "helper"]),
            "-object" => said(&value, &["mem-path", "filename", "file", "dir"]),
            "-device" => said(&value, &["romfile"]),
            "-fw_cfg" | "-smbios" | "-acpitable" => said(&value, &["file"]),
            // A socket that it connects to; it makes the sockets that it serves.
            "-chardev" => match Values::read(&value) {
                values if values.driver() == "socket" && !values.is_on("server") => said(&value, &["path"]),
                _ => Vec::new(),
            },
            _ => Vec::new(),
        };
        let absent = paths.into_iter().filter(|path| path.starts_with('/') && !is_there(Path::new(path)));
        missing.extend(absent.map(|path| format!("{} {path}", argument.option)));
    }
    missing
}

fn said(value: &str, keys: &[&str]) -> Vec<String> {
    let values = Values::read(value);
    keys.iter().filter_map(|key| values.get(key)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn files_are_named_with_what_the_vm_does_with_them() {
        let command = "qemu -kernel /k -initrd relative -drive if=pflash,file=/code -cdrom /cd -drive file=/d,readonly=on \
             -machine q35,pflash0=top -blockdev raw,node-name=top,file=low -blockdev file,node-name=low,filename=/fw \
             -blockdev file,node-name=other,filename=/iso -device e1000,romfile=/rom -netdev tap,script=/up,id=n";
        let named: Vec<String> = named(&words(command))
            .into_iter()
            .map(|NamedFile { option, path, used }| format!("{option} {path} {used:?}"))
            .collect();
        let expected = [
            "-kernel /k AtStart",
            "-drive /code InMemory",
            "-cdrom /cd WhileItRuns",
            "-drive /d WhileItRuns",
            "-blockdev /fw InMemory",
            "-blockdev /iso WhileItRuns",
            "-device /rom InMemory",
        ];
        assert_eq!(named, expected);
    }

    #[test]
    fn the_model_of_a_command_is_the_one_that_is_said_last() {
        assert_eq!(
            processor_model(&words("qemu -cpu qemu64 -m 32 -cpu host,+x2apic")),
            Some("host".to_owned())
        );
        assert_eq!(processor_model(&words("qemu -m 32")), None);
    }

    #[test]
    fn files_that_are_not_there_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().join("kernel");
        std::fs::write(&there, "").unwrap();
        let command = format!(
            "qemu -kernel {} -initrd /no/initrd -netdev tap,id=n,script=/no/up,downscript=no -chardev \
             socket,id=a,path=/no/socket -chardev socket,id=b,path=/no/served,server=on -drive if=pflash,file=/no/code",
            there.display()
        );
        let expected = ["-initrd /no/initrd", "-netdev /no/up", "-chardev /no/socket", "-drive /no/code"];
        assert_eq!(missing(&words(&command), Path::exists), expected);
    }
}
