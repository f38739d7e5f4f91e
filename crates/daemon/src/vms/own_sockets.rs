//! The lengths of the paths at which a VM's QEMU listens on this host: a socket's path has at most 107 bytes.
//!
//! A path that is too long would be noticed only when QEMU starts, after all disks were copied.

use std::path::Path;

use hypervisor::qemu::command_line::Values;

use super::definition::Definition;

/// The longest path of a unix socket in bytes; one more ends it.
const BYTES_MAX: usize = 107;

/// Returns what keeps QEMU from listening at its own sockets, if these are in `files`, and at its monitor and its TPM.
pub(super) fn faults(definition: &Definition, files: &Path, (monitor, tpm): (&Path, &Path)) -> Vec<String> {
    let own = definition.own_sockets().into_iter();
    let own = own.map(|name| (format!("{{path:{name}}}"), super::manifest::own_path(files, &name)));
    let tpm = definition.has_tpm().then(|| ("{tpm}".to_owned(), tpm.to_owned()));
    let all = own.chain([("{qmp}".to_owned(), monitor.to_owned())]).chain(tpm);
    let long = all.filter_map(|(place, path)| {
        let bytes = path.as_os_str().len();
        (bytes > BYTES_MAX).then(|| {
            format!(
                "the socket {place} would have a path of {bytes} bytes there, and the system allows {BYTES_MAX}: give the VM \
                 or the socket a shorter name, or choose a data_dir with a shorter path there"
            )
        })
    });
    long.collect()
}

/// Returns whether a word of a command, with its placeholders left out, makes QEMU listen at a socket, or connect to one.
pub(super) fn is_socket(word: &str) -> bool {
    let pairs = Values::read(word).pairs();
    let says_socket = |value: &str| matches!(value, "unix" | "socket") || value.starts_with("unix:");
    word.starts_with("unix:")
        || word.starts_with("socket,")
        || pairs.iter().any(|(_, value)| says_socket(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(words: &str) -> Definition {
        Definition::parse(&format!(
            "command = [\"qemu\", \"-qmp\", \"unix:{{qmp}},server=on,wait=off\", {words}]\n[disks]\n"
        ))
        .unwrap()
    }

    #[test]
    fn a_socket_whose_path_would_be_too_long_is_named_and_a_log_is_not() {
        let words = "\"-chardev\", \"socket,id=agent,path={path:agent},server=on,wait=off\", \"-serial\", \
            \"unix:{path:serial},server=on,wait=off\", \"-chardev\", \"file,id=l,path={path:log}\", \"-D\", \"{path:trace}\"";
        let definition = definition(words);
        let short = (Path::new("/m"), Path::new("/t"));
        let fits = "x".repeat(BYTES_MAX - "/own/serial".len());
        assert_eq!(faults(&definition, Path::new(&fits), short), [""; 0]);
        let long = "x".repeat(BYTES_MAX - "/own/agent".len());
        let named = faults(&definition, Path::new(&long), short);
        assert!(
            matches!(&named[..], [one] if one.contains("{path:serial}") && one.contains("108 bytes")),
            "{named:?}"
        );
        let monitor = "/".repeat(BYTES_MAX + 1);
        let named = faults(&definition, Path::new(""), (Path::new(&monitor), Path::new(&monitor)));
        assert!(matches!(&named[..], [one] if one.contains("{qmp}")), "{named:?}");
    }
}
