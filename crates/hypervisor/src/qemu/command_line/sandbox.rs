//! The sandbox of a started QEMU: it limits the rights of a guest that breaks out of its VM.

use super::parser::{Values, parse};

const OPTION: &str = "-sandbox";
/// Options by which QEMU changes its user or root folder, which only root may.
const BECOMES_OTHERS: [&str; 3] = ["-runas", "-run-with", "-chroot"];

/// Returns the words that are added to a command; none if the command has its own. They refer to the command's places as written.
///
/// QEMU may run no other program and become no other user, unless its command names something that needs this. It
/// may not change priorities.
pub fn words(command: &[String]) -> Vec<String> {
    let arguments = parse(command.get(1..).unwrap_or_default());
    let becomes_others = becomes_others(command);
    let (mut runs_programs, mut binds_threads) = (false, false);
    for argument in &arguments {
        let values = Values::read(argument.value.as_deref().unwrap_or_default());
        let (option, driver) = (argument.option.as_str(), values.driver());
        if option == OPTION {
            return Vec::new();
        }
        let is_network = ["-netdev", "-nic", "-net"].contains(&option);
        let says_no = |key: &str| values.get(key).as_deref() == Some("no");
        let has_script = driver == "tap" && !(says_no("script") && says_no("downscript"));
        let runs = values
            .pairs()
            .iter()
            .any(|(key, value)| key == "helper" || key == "smb" || value.contains("-cmd:"));
        runs_programs |= is_network && (driver == "bridge" || has_script || runs);
        binds_threads |= option == "-object" && driver == "thread-context";
    }
    let mut sandbox = "on,obsolete=deny".to_owned();
    for (needs, denied) in [
        (runs_programs || becomes_others, ",elevateprivileges=deny"),
        (runs_programs, ",spawn=deny"),
        (binds_threads, ",resourcecontrol=deny"),
    ] {
        if !needs {
            sandbox += denied;
        }
    }
    vec![OPTION.to_owned(), sandbox]
}

/// Returns whether a command changes QEMU's user itself.
pub fn becomes_others(command: &[String]) -> bool {
    let arguments = parse(command.get(1..).unwrap_or_default());
    arguments.iter().any(|argument| BECOMES_OTHERS.contains(&argument.option.as_str()))
}

#[cfg(test)]
mod tests {
    fn added(command: &str) -> String {
        super::words(&command.split(' ').map(str::to_owned).collect::<Vec<_>>()).join(" ")
    }

    #[test]
    fn everything_is_denied_that_the_command_does_not_need() {
        let all = "-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
        for command in ["qemu -m 1", "qemu -netdev tap,id=n,script=no,downscript=no", "qemu -nic user"] {
            assert_eq!(added(command), all, "{command}");
        }
        let programs = "-sandbox on,obsolete=deny,resourcecontrol=deny";
        for command in ["qemu -netdev bridge,id=n", "qemu -nic tap", "qemu -netdev tap,id=n,helper=/x"] {
            assert_eq!(added(command), programs, "{command}");
        }
        assert_eq!(added("qemu -runas me"), "-sandbox on,obsolete=deny,spawn=deny,resourcecontrol=deny");
        assert_eq!(added("qemu -sandbox off"), "");
    }
}
