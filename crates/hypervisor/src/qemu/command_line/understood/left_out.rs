//! What QEMU takes of the host by itself where a command leaves something out, or turns round: refused by name.

use super::value::Value;
use super::{Argument, Body, NotAllowed};

/// Devices that make or record sound. **N.B.** Without a backend each of them opens the sound of the host that it runs on.
const SOUND: [&str; 16] = [
    "AC97",
    "ac97",
    "ES1370",
    "es1370",
    "adlib",
    "cs4231a",
    "gus",
    "hda-duplex",
    "hda-micro",
    "hda-output",
    "sb16",
    "usb-audio",
    "virtio-sound",
    "virtio-sound-device",
    "virtio-sound-pci",
    "virtio-snd",
];
/// The place of the socket of the VM's TPM.
const TPM: &str = "tpm";

/// Looks at the whole command: the socket of the TPM is for the TPM only.
pub(super) fn check_command(arguments: &[Argument]) -> Result<(), NotAllowed> {
    let of_tpms: Vec<String> = arguments
        .iter()
        .filter(|argument| argument.option() == "-tpmdev")
        .filter_map(|argument| argument.get("chardev").map(Value::to_string))
        .collect();
    for argument in arguments {
        check(argument)?;
        let id = argument.get("id").map(Value::to_string).unwrap_or_default();
        let is_chardev = argument.option() == "-chardev";
        if is_chardev && is_tpm(argument.get("path")) && !of_tpms.contains(&id) {
            let reason = "leads to {tpm}, and no -tpmdev uses it: only a TPM may";
            return Err(NotAllowed::malformed("-chardev", &format!("id={id}"), reason));
        }
    }
    Ok(())
}

fn check(argument: &Argument) -> Result<(), NotAllowed> {
    let (driver, has_audio) = match &argument.body {
        Body::Keys { said, .. } => {
            let driver = said.get("driver").map(Value::to_string).unwrap_or_default();
            (driver, said.get("audiodev").is_some())
        }
        Body::Open(open) => (open.first().to_owned(), open.pairs().any(|(key, _)| key == "audiodev")),
        _ => return Ok(()),
    };
    let id = argument.get("id").map(Value::to_string).unwrap_or_default();
    match argument.option() {
        "-device" if SOUND.contains(&driver.as_str()) && !has_audio => {
            let reason = "has no audiodev, and would use the sound of the host that it runs on: add -audiodev none,id=NAME, \
                 and audiodev=NAME here";
            Err(NotAllowed::malformed("-device", &driver, reason))
        }
        "-chardev"
            if argument.get("server") == Some(&Value::Switch(true)) && is_tpm(argument.get("path")) =>
        {
            let reason = "has server=on: at {tpm} swtpm is the server, so leave server and wait out";
            Err(NotAllowed::malformed("-chardev", &format!("id={id}"), reason))
        }
        _ => Ok(()),
    }
}

fn is_tpm(path: Option<&Value>) -> bool {
    matches!(path, Some(Value::Place(place)) if place.kind == TPM)
}
