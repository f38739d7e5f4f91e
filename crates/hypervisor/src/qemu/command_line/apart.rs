//! Prepares a VM's command so that a second instance of it can run beside the first: it reaches nothing outside of itself.
//!
//! ```text
//!   networks          each card is alone on a hub of its own within QEMU
//!   ports, sockets    none but its monitor, its TPM and those in its own folder
//!   serial consoles   into logs in its own folder
//!   displays          none
//! ```
//! The guest finds the same devices.

use super::parser::{Values, parse};

/// The name of the log of a serial console in the VM's own folder, before its number.
pub const CONSOLE: &str = "test-console-";

/// Whether the networks of a VM are left as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Networks {
    /// They lead nowhere.
    Apart,
    /// They are those of the command.
    AsTheyAre,
}

/// A command whose VM is apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Apart {
    /// The words of the command.
    pub command: Vec<String>,
    /// The names of the logs of its serial consoles.
    pub consoles: Vec<String>,
}

/// A disk that the second instance would share with the first.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is a disk that both instances of the VM would write to")]
pub struct Shared(String);

/// Places that are the VM's own.
const OWN: [&str; 3] = ["{qmp}", "{tpm}", "{path:"];
/// Options with ports, displays and debuggers of this host.
const OUTSIDE: [&str; 6] = ["-vnc", "-spice", "-gdb", "-display", "-curses", "-sdl"];
/// Beginnings of drivers that are serial consoles of the guest.
const CONSOLES: [&str; 7] =
    ["isa-serial", "pci-serial", "usb-serial", "virtconsole", "sclpconsole", "spapr-vty", "sclplmconsole"];
/// Keys of a card in `-nic`.
const CARD_KEYS: [&str; 7] = ["model", "mac", "macaddr", "id", "addr", "vectors", "hubid"];
const CARD_KIND: &str = "hubport";

/// Returns the command of a second instance.
///
/// # Errors
/// [`Shared`].
pub fn apart(command: &[String], networks: Networks) -> Result<Apart, Shared> {
    let (program, words) = command.split_first().map_or((String::new(), command), |(p, w)| (p.clone(), w));
    let arguments = parse(words);
    let consoles_of = |values: &Values| {
        let is_console = CONSOLES.iter().any(|console| values.driver().starts_with(console));
        values.get("chardev").filter(|_| is_console)
    };
    let mut console_devices: Vec<String> = Vec::new();
    for argument in &arguments {
        let value = argument.value.as_deref().unwrap_or_default();
        match argument.option.as_str() {
            "-serial" => console_devices.extend(value.strip_prefix("chardev:").map(str::to_owned)),
            "-device" => console_devices.extend(consoles_of(&Values::read(value))),
            _ => {}
        }
    }
    let mut made = Apart { command: vec![program], consoles: Vec::new() };
    let mut hubs = 0;
    for argument in arguments {
        let Some(value) = argument.value else {
            if !OUTSIDE.contains(&argument.option.as_str()) && argument.option != "-s" {
                made.command.push(argument.option);
            }
            continue;
        };
        let option = argument.option.as_str();
        let values = Values::read(&value);
        let is_own = OWN.iter().any(|own| value.contains(own));
        let value = match option {
            "-netdev" | "-nic" if networks == Networks::Apart && value != "none" => {
                hubs += 1;
                Some(alone(&values, option, hubs))
            }
            "-net" if networks == Networks::Apart => Some(value).filter(|_| kind_of(&values) == "nic"),
            "-chardev" if values.get("id").is_some_and(|id| console_devices.contains(&id)) => {
                let id = values.get("id").unwrap_or_default();
                Some(format!("file,id={id},path={}", made.console()))
            }
            "-chardev" if !is_own && is_outside(&values.driver()) => {
                let id = values.get("id").unwrap_or_default();
                Some(Values::of(&[("", "null"), ("id", &id)]).write())
            }
            "-serial" if value != "none" && !value.starts_with("chardev:") => {
                Some(format!("file:{}", made.console()))
            }
            "-monitor" | "-parallel" if !is_own && !value.starts_with("chardev:") && value != "none" => {
                Some("null".to_owned())
            }
            "-qmp" | "-qmp-pretty" if !is_own => None,
            _ if OUTSIDE.contains(&option) => None,
            "-drive" | "-blockdev" if !is_read_only(&values) => match shared_disk(option, &values, &value) {
                Some(disk) => return Err(Shared(disk)),
                None => Some(value),
            },
            _ => Some(value),
        };
        if let Some(value) = value {
            made.command.extend([argument.option, value].into_iter().filter(|word| !word.is_empty()));
        }
    }
    made.command.extend(["-display", "none"].map(str::to_owned));
    Ok(made)
}

impl Apart {
    /// Returns the place of the log of another console.
    fn console(&mut self) -> String {
        let name = format!("{CONSOLE}{}", self.consoles.len());
        let place = format!("{{path:{name}}}");
        self.consoles.push(name);
        place
    }
}

/// Returns a card, or the network of one, that is alone on a hub.
fn alone(values: &Values, option: &str, hub: usize) -> String {
    let pairs = values.pairs();
    let hub = hub.to_string();
    let mut alone = vec![("", CARD_KIND), ("hubid", hub.as_str())];
    let is_kept = |key: &str| if option == "-nic" { CARD_KEYS.contains(&key) } else { key == "id" };
    let kept = pairs.iter().filter(|(key, _)| key != "hubid" && is_kept(key));
    alone.extend(kept.map(|(key, value)| (key.as_str(), value.as_str())));
    Values::of(&alone).write()
}

fn kind_of(values: &Values) -> String {
    values.get("type").unwrap_or_else(|| values.driver())
}

fn is_read_only(values: &Values) -> bool {
    values.is_on("readonly") || values.is_on("read-only")
}

/// Returns the address of a disk at a server that is no volume of this host.
fn shared_disk(option: &str, values: &Values, value: &str) -> Option<String> {
    let pairs = values.pairs();
    let is_address = |value: &str| ["nbd:", "nbd+", "nbds:"].iter().any(|begin| value.starts_with(begin));
    let is_client =
        |(key, kind): &(String, String)| (key == "driver" || key.ends_with(".driver")) && kind == "nbd";
    let is_volume = value.contains("{disk:");
    match pairs.iter().find(|(_, value)| is_address(value)) {
        Some((_, address)) => Some(address.clone()),
        None if option == "-blockdev" && !is_volume && pairs.iter().any(is_client) => Some(value.to_owned()),
        None => None,
    }
}

/// Returns whether a character device leads out of QEMU.
fn is_outside(kind: &str) -> bool {
    !["null", "ringbuf", "memory", "vc", "spicevmc", "mux", "hub"].contains(&kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn check(command: &str, networks: Networks, expected: &str) -> Vec<String> {
        let made = apart(&words(&format!("qemu-system-x86_64 {command}")), networks).unwrap();
        assert_eq!(made.command.join(" "), format!("qemu-system-x86_64 {expected} -display none"));
        made.consoles
    }

    #[test]
    fn networks_lead_nowhere_unless_that_is_ordered() {
        let command = "-netdev tap,id=lan,ifname=t0,script=no,downscript=no -device virtio-net-pci,netdev=lan,mac=52:54:00:00:00:01 \
             -nic bridge,br=br0,model=e1000,mac=52:54:00:00:00:02 -nic none -net nic -net user";
        check(
            command,
            Networks::Apart,
            "-netdev hubport,hubid=1,id=lan -device virtio-net-pci,netdev=lan,mac=52:54:00:00:00:01 \
             -nic hubport,hubid=2,model=e1000,mac=52:54:00:00:00:02 -nic none -net nic",
        );
        check(command, Networks::AsTheyAre, &words(command).join(" "));
        // As another host's command is written anew.
        check("-netdev type=user,id=a,restrict=on", Networks::Apart, "-netdev hubport,hubid=1,id=a");
    }

    #[test]
    fn consoles_are_logs_and_nothing_else_is_opened_outside() {
        let consoles = check(
            "-serial chardev:c -chardev socket,id=c,path=/srv/console,server=on -serial mon:stdio -serial none -vnc :7 \
             -device virtconsole,chardev=v -chardev pty,id=v -monitor unix:/run/m,server=on,wait=off -s --nographic",
            Networks::Apart,
            "-serial chardev:c -chardev file,id=c,path={path:test-console-0} -serial file:{path:test-console-1} -serial none \
             -device virtconsole,chardev=v -chardev file,id=v,path={path:test-console-2} -monitor null -nographic",
        );
        assert_eq!(consoles, ["test-console-0", "test-console-1", "test-console-2"]);
        let own = "-qmp unix:{qmp},server=on,wait=off -chardev socket,id=tpm,path={tpm} -tpmdev emulator,id=t,chardev=tpm \
             -chardev socket,id=a,path={path:agent},server=on,wait=off -chardev null,id=n";
        check(own, Networks::Apart, &words(own).join(" "));
        check(
            &format!("{own} -qmp tcp:127.0.0.1:4444,server -chardev socket,id=b,host=192.0.2.1,port=1"),
            Networks::Apart,
            &format!("{} -chardev null,id=b", words(own).join(" ")),
        );
    }

    #[test]
    fn a_disk_that_is_no_volume_is_refused() {
        let disk =
            |more: &str| apart(&words(&format!("qemu -drive file=nbd://rack7/root{more}")), Networks::Apart);
        assert!(disk("").unwrap_err().to_string().contains("nbd://rack7/root"));
        assert!(disk(",readonly=on").is_ok());
        let own = "qemu -blockdev driver=nbd,node-name=nbd,server.path={disk:root},export={export:root},reconnect-delay=60";
        assert!(apart(&words(own), Networks::Apart).is_ok());
        let other =
            "qemu -blockdev driver=nbd,node-name=a,server.type=inet,server.host=rack7,server.port=10809";
        assert!(apart(&words(other), Networks::Apart).is_err());
    }
}
