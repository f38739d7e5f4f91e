//! Writes a shell script that starts a returned VM again, with its command, over its plain images.

use std::path::PathBuf;

use super::parser::{Values, parse};

/// A plain image that was given back to a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenBack {
    /// The volume that it was before.
    pub volume: String,
    /// The path of the image.
    pub path: PathBuf,
    /// Its format, by QEMU's name.
    pub format: String,
}

/// The prefix of a volume's socket path in the command of [`script`]; the volume's name follows.
pub const VOLUME: &str = "volume:";

/// The folder and user of a VM's programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surroundings {
    /// The folder where relative paths begin.
    pub folder: PathBuf,
    /// The words that change the user and run the words behind them; empty: the user of the script.
    pub becoming: Vec<String>,
}

/// Writes a script. `tpm` starts the VM's TPM, empty if it has none. `command` starts QEMU, with
/// [`VOLUME`]s for the sockets of its disks. `None`: it has a disk in an unknown form.
pub fn script(
    command: &[String],
    images: &[GivenBack],
    tpm: &[String],
    Surroundings { folder, becoming }: &Surroundings,
) -> Option<String> {
    let (program, rest) = command.split_first()?;
    let begin = |program: &[String]| {
        let words: Vec<String> = becoming.iter().chain(program).map(|word| quoted(word)).collect();
        words.join(" ")
    };
    let mut line = format!("exec {}", begin(std::slice::from_ref(program)));
    for argument in parse(rest) {
        let value = match argument.value {
            Some(value) if value.contains(VOLUME) => Some(over_image(&argument.option, &value, images)?),
            value => value,
        };
        for word in Some(argument.option).into_iter().filter(|word| !word.is_empty()).chain(value) {
            line.push_str(" \\\n  ");
            line.push_str(&quoted(&word));
        }
    }
    let tpm = if tpm.is_empty() { String::new() } else { format!("{} || exit\n", begin(tpm)) };
    let folder = quoted(folder.to_str()?);
    Some(format!(
        "#!/bin/sh\n# Starts the VM on its images, without Sterna.\ncd {folder} || exit\n{tpm}{line}\n"
    ))
}

fn over_image(option: &str, value: &str, images: &[GivenBack]) -> Option<String> {
    let mut values = Values::read(value);
    let image = values.pairs().into_iter().find_map(|(_, value)| {
        let volume = value.strip_prefix(VOLUME)?;
        images.iter().find(|image| image.volume == volume)
    })?;
    let path = image.path.to_str()?;
    match option {
        "-drive" => {
            values.retain(|key, _| key != "format" && key != "file" && !key.starts_with("file."));
            values.set("format", &image.format);
            values.set("file", path);
        }
        "-blockdev" => {
            let stays = ["node-name", "read-only", "discard", "detect-zeroes"];
            values.retain(|key, _| stays.contains(&key) || key == "cache" || key.starts_with("cache."));
            values.set("driver", &image.format);
            values.set("file.driver", "file");
            values.set("file.filename", path);
        }
        _ => return None,
    }
    Some(values.write())
}

fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:=,+@%".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMAND: [&str; 12] = [
        "qemu-system-x86_64",
        "-name",
        "it's",
        "-qmp",
        "unix:/run/m,server=on,wait=off",
        "-blockdev",
        "driver=nbd,node-name=n,server.type=unix,server.path=volume:web1-0,export=web1-0,reconnect-delay=60,cache.direct=on",
        "-blockdev",
        "driver=raw,node-name=d,file=n",
        "-blockdev",
        r#"{"driver":"nbd","node-name":"j","server":{"type":"unix","path":"volume:web1-0"},"reconnect-delay":60}"#,
        "-drive",
    ];
    const DRIVE: &str = "if=virtio,format=raw,file.driver=nbd,file.server.path=volume:web1-1,file.export=web1-1,file.reconnect-delay=60";

    #[test]
    fn a_vm_is_started_again_over_its_plain_images() {
        let command: Vec<String> = COMMAND.into_iter().chain([DRIVE]).map(str::to_owned).collect();
        let image = |volume: &str, path: &str, format: &str| GivenBack {
            volume: volume.to_owned(),
            path: path.into(),
            format: format.to_owned(),
        };
        let images = [image("web1-0", "/srv/a.qcow2", "qcow2"), image("web1-1", "/srv/b,1.raw", "raw")];
        let tpm = ["swtpm", "--tpmstate", "dir=/a b"].map(str::to_owned);
        let own = Surroundings { folder: "/var/a b".into(), becoming: Vec::new() };
        let with_tpm = script(&command, &images, &tpm, &own).unwrap();
        assert_eq!(with_tpm.lines().nth(3), Some("swtpm --tpmstate 'dir=/a b' || exit"));
        let becoming = ["setpriv", "--reuid=7", "--"].map(str::to_owned).to_vec();
        let as_another = Surroundings { becoming, ..own.clone() };
        let another = script(&command, &images, &tpm, &as_another).unwrap();
        let begins: Vec<&str> = another.lines().skip(2).take(3).collect();
        let expected = [
            "cd '/var/a b' || exit",
            "setpriv --reuid=7 -- swtpm --tpmstate 'dir=/a b' || exit",
            "exec setpriv --reuid=7 -- qemu-system-x86_64 \\",
        ];
        assert_eq!(begins, expected);
        let script = script(&command, &images, &[], &own).unwrap();
        let lines: Vec<&str> = script.lines().skip(3).map(|line| line.trim_end_matches(" \\")).collect();
        let expected = [
            "exec qemu-system-x86_64",
            "  -name",
            r"  'it'\''s'",
            "  -qmp",
            "  unix:/run/m,server=on,wait=off",
            "  -blockdev",
            "  node-name=n,cache.direct=on,driver=qcow2,file.driver=file,file.filename=/srv/a.qcow2",
            "  -blockdev",
            "  driver=raw,node-name=d,file=n",
            "  -blockdev",
            r#"  '{"driver":"qcow2","file":{"driver":"file","filename":"/srv/a.qcow2"},"node-name":"j"}'"#,
            "  -drive",
            "  if=virtio,format=raw,file=/srv/b,,1.raw",
        ];
        assert_eq!(lines, expected);
        assert_eq!(super::script(&command, &[], &[], &own), None);
    }
}
