//! Feeds the parser of VM commands of other hosts.

use hypervisor::qemu::command_line::understood::{Allowed, Understood};

/// Feeds a command, with an argument in each line.
pub(crate) fn feed(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let words: Vec<String> = text.split('\n').map(str::to_owned).collect();
    let Ok(understood) = Understood::read(&words, Allowed::default()) else { return };
    let written = understood.write();
    let again = Understood::read(&written, Allowed::default());
    assert_eq!(again.map(|again| again.write()).as_ref(), Ok(&written), "it is understood in another way");
    for pair in written.windows(2) {
        let [option, word] = pair else { continue };
        // Values for the guest may contain anything.
        if FOR_THE_GUEST.contains(&option.as_str()) {
            continue;
        }
        for value in word.split(',').map(|part| part.split_once('=').map_or(part, |(_, value)| value)) {
            let may_be_named =
                ["/usr/", "/dev/urandom", "/dev/random"].iter().any(|path| value.starts_with(path));
            let is_sign = |byte: u8| byte.is_ascii_hexdigit() || b"./:".contains(&byte);
            let is_subnet = !value.starts_with('/') && value.bytes().all(is_sign);
            assert!(!value.contains('/') || may_be_named || is_subnet, "{option} {word}");
        }
    }
}

/// Options whose values are for the guest.
const FOR_THE_GUEST: [&str; 4] = ["-append", "-name", "-smbios", "-fw_cfg"];
