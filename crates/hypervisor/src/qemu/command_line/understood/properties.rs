//! Tests with random, corrupted commands: an accepted one names nothing forbidden, by a simple check of the written words.

use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::{Allowed, Understood};

const SOUND: [&str; 24] = [
    "-m 64,slots=2,maxmem=128M",
    "-M q35,usb=off",
    "-smp 2,maxcpus=4",
    "-name {name},debug-threads=on",
    "-cpu host,+x2apic,pmu=off",
    "-serial unix:{path:a},server,nowait",
    "-chardev socket,id=c1,path={path:c},server=on,wait=off",
    "-chardev null,id=c2",
    "-device isa-serial,chardev=c2",
    "-blockdev driver=nbd,node-name=n1,server.type=unix,server.path={disk:a},export={export:a}",
    r#"-blockdev {"driver":"raw","node-name":"n2","file":{"driver":"null-co"},"read-only":true}"#,
    "-blockdev file,node-name=n3,filename={file:a}",
    "-device virtio-blk-pci,drive=n1,id=d1,bootindex=1",
    r#"-device {"driver":"virtio-net-pci","id":"d2","romfile":""}"#,
    "-drive if=virtio,format=raw,file.driver=nbd,file.server.type=unix,file.server.path={disk:b},file.export={export:b}",
    "-drive if=pflash,readonly=on,file=/usr/share/OVMF/CODE.fd",
    "-netdev user,id=u1",
    "-netdev tap,id=u2,ifname=t0,script=no,downscript=no",
    "-object rng-random,id=o1,filename=/dev/urandom",
    "-object iothread,id=o2",
    "-smbios type=1,serial=x",
    "-fw_cfg name=opt/a,file={file:a}",
    "-global PIIX4_PM.disable_s3=1",
    "-kernel /usr/lib/vmlinuz",
];
const POISON: [&str; 30] = [
    ",,",
    ",",
    "=",
    ".",
    ":",
    "/",
    "..",
    " ",
    "\"",
    "{",
    "}",
    "\\",
    "\u{0}",
    "\n",
    "@/etc/passwd",
    "/etc/passwd",
    ",file=/etc/passwd",
    ",path=/run/x",
    ",filename=/etc/passwd",
    ",romfile=/etc/passwd",
    ",logfile=/etc/passwd",
    ",backend=file",
    ",driver=file",
    ",type=tap",
    ",id=compat_monitor0",
    ",chardev=compat_monitor0",
    ",x-config=/etc/passwd",
    "nbd+unix:///x?socket=/run/x",
    "#socket={disk:a}",
    "json:{}",
];
const FOR_THE_GUEST: [&str; 4] = ["-name", "-smbios", "-append", "-fw_cfg"];

#[derive(Clone, Debug)]
enum Spoil {
    Insert(Index, Index, &'static str),
    Append(Index, &'static str),
    Double(Index, Index),
    Remove(Index, Index),
    Case(Index),
    Hyphen(Index),
}

fn spoil() -> impl Strategy<Value = Spoil> {
    let (word, at) = (any::<Index>(), any::<Index>());
    prop_oneof![
        (word, at, select(&POISON[..])).prop_map(|(word, at, poison)| Spoil::Insert(word, at, poison)),
        (any::<Index>(), select(&POISON[..])).prop_map(|(word, poison)| Spoil::Append(word, poison)),
        (any::<Index>(), any::<Index>()).prop_map(|(word, part)| Spoil::Double(word, part)),
        (any::<Index>(), any::<Index>()).prop_map(|(word, at)| Spoil::Remove(word, at)),
        any::<Index>().prop_map(Spoil::Case),
        any::<Index>().prop_map(Spoil::Hyphen),
    ]
}

impl Spoil {
    fn apply(&self, words: &mut [String]) {
        let (Self::Insert(word, ..)
        | Self::Append(word, _)
        | Self::Double(word, _)
        | Self::Remove(word, _)
        | Self::Case(word)
        | Self::Hyphen(word)) = self;
        let word = &mut words[word.index(words.len())];
        let place = |at: &Index, word: &str| at.index(word.len() + 1);
        match self {
            Self::Insert(_, at, poison) => word.insert_str(place(at, word), poison),
            Self::Append(_, poison) => word.push_str(poison),
            Self::Double(_, part) => {
                let parts: Vec<String> = word.split(',').map(str::to_owned).collect();
                let again = &parts[part.index(parts.len())];
                *word = format!("{word},{again}");
            }
            Self::Remove(_, at) if !word.is_empty() => drop(word.remove(at.index(word.len()))),
            Self::Remove(..) => {}
            Self::Case(_) => *word = word.to_uppercase(),
            Self::Hyphen(_) => word.insert(0, '-'),
        }
    }
}

/// Checks the written command word by word, without knowledge of options.
fn check_written(written: &[String]) {
    for pair in written.windows(2) {
        let (option, value) = (&pair[0], &pair[1]);
        if value.starts_with('-') || !option.starts_with('-') || FOR_THE_GUEST.contains(&option.as_str()) {
            continue;
        }
        let mut keys = Vec::new();
        for part in value.split(',') {
            assert!(!part.is_empty(), "{option} {value}");
            let (key, said) = part.split_once('=').unwrap_or(("", part));
            assert!(key.is_empty() || !keys.contains(&key), "{option} {value}");
            keys.push(key);
            let is_path = said.contains('/') || said.contains("..");
            assert!(
                !is_path || said.starts_with("/usr/") || ["/dev/urandom", "/dev/random"].contains(&said),
                "{option} {value}"
            );
            assert!(
                !said.contains(':')
                    || said.starts_with('{')
                    || said.starts_with("unix:{path:")
                    || said == "unix:{qmp}",
                "{option} {value}"
            );
            assert!(said != "compat_monitor0", "{option} {value}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn what_is_taken_of_spoilt_commands_names_nothing_that_it_may_not(
        chosen in prop::collection::vec(select(&SOUND[..]), 1..6),
        spoils in prop::collection::vec(spoil(), 0..4),
    ) {
        let begin = "qemu-system-x86_64 -qmp unix:{qmp},server=on,wait=off";
        let mut words: Vec<String> =
            begin.split(' ').chain(chosen.iter().flat_map(|words| words.split(' '))).map(str::to_owned).collect();
        spoils.iter().for_each(|spoil| spoil.apply(&mut words));
        if let Ok(understood) = Understood::read(&words, Allowed::default()) {
            let written = understood.write();
            check_written(&written);
            let again = Understood::read(&written, Allowed::default());
            prop_assert_eq!(again.map(|again| again.write()), Ok(written));
        }
    }
}
