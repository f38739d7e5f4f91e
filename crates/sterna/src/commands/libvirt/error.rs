//! What keeps a domain from moving.

use std::io;

/// What a user has to decide, or to repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Obstacle {
    #[error("neither libvirt has this domain: virsh list --all")]
    NoDomain,
    #[error(
        "it runs at both hosts: its disks are in danger. Find out which one is right, and end the other at once: virsh destroy"
    )]
    RunsTwice,
    #[error(
        "libvirt is migrating it: wait for that (virsh domjobinfo), or end it (virsh domjobabort); then give this order again"
    )]
    UnderWay,
    #[error(
        "it runs at the other host, and a paused rest of it is here: virsh destroy, here, ends the rest; then give this order again"
    )]
    LeftPaused,
    #[error(
        "it is paused at both hosts, as after a migration that was interrupted. Nothing has run at the other host yet if it says \
         \"paused (migrating)\" (virsh domstate --reason): virsh destroy there, virsh resume here; then give this order again"
    )]
    PausedTwice,
    #[error("it is paused here: virsh resume; then give this order again")]
    Paused,
    #[error(
        "it is shut off here and paused at the other host, as after a migration that was interrupted: virsh destroy there, if nothing \
         of it is needed; then give this order again"
    )]
    PausedThere,
    #[error(
        "it is defined and shut off at both hosts: virsh undefine where it is not wanted; then give this order again"
    )]
    DefinedTwice,
}

/// Why a domain does not move.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LibvirtError {
    #[error("domain {domain}: {obstacle}")]
    Obstacle { domain: String, obstacle: Obstacle },
    #[error(
        "disk {disk} of domain {domain} is no volume of this host. Make it one, while the guest works: sterna vm adopt --libvirt {domain}"
    )]
    NoVolume { domain: String, disk: String },
    #[error(
        "disk {disk} of domain {domain} is volume {volume}, which is only read and does not move with it: attach it at {host} first: \
         sterna volume attach {volume} --at {host} --read-only"
    )]
    ReadOnly { domain: String, disk: String, volume: String, host: String },
    #[error(
        "libvirt works on disk {disk} of domain {domain} (virsh blockjob {domain} {disk}): wait for that, or abort it"
    )]
    Job { domain: String, disk: String },
    #[error(
        "{here} and {there} are the same libvirt: name that of the other host, for example --to-uri qemu+ssh://ADDRESS/system"
    )]
    SameLibvirt { here: String, there: String },
    #[error("{option} is decided by this command, and not an option for virsh")]
    Option { option: String },
    #[error("the disks of domain {domain} could not follow its memory: {refusal}. Nothing was begun")]
    DisksStay { domain: String, refusal: String },
    #[error(
        "volume {volume} is not served here at present: sterna volume show {volume}; then give this order again"
    )]
    NotServed { volume: String },
    #[error("domain {domain} has no disk that is a volume: move it by virsh migrate alone")]
    NoVolumes { domain: String },
    #[error("volume {volume}, a disk of domain {domain}, is at {host}, and not at {to}: bring it back first")]
    Elsewhere { domain: String, volume: String, host: String, to: String },
    #[error(
        "domain {domain} is in the state \"{state}\" at {uri}: wait, or end it (virsh destroy); then give this order again"
    )]
    State { domain: String, state: String, uri: String },
    #[error(
        "the address of host {host} is unknown: name its libvirt, for example --to-uri qemu+ssh://ADDRESS/system"
    )]
    NoAddress { host: String },
    #[error("virsh does not start: install it (Debian: libvirt-clients)")]
    NoVirsh(#[source] io::Error),
    #[error("virsh -c {uri} {command}: {words}{}", advice(uri, words))]
    Virsh { uri: String, command: String, words: String },
    #[error("the definition of domain {domain} cannot be read: {words}")]
    Definition { domain: String, words: String },
    /// libvirt has not moved the domain.
    #[error("domain {domain} has not moved: {words}. {stands}")]
    NotMoved { domain: String, words: String, stands: String },
    /// libvirt has begun to move the domain, and what became of that cannot be seen.
    #[error(
        "it is unknown whether domain {domain} has moved: {reason}. virsh said: {said}. Once both libvirts answer, give the same order \
         again: it looks where everything is"
    )]
    Unseen { domain: String, reason: String, said: String },
    #[error(
        "domain {domain} is as before after the step \"{step}\", although no error was reported. {stands}; what is where: virsh list --all \
         at both hosts, and sterna volume list"
    )]
    NoProgress { domain: String, step: String, stands: String },
}

/// Returns what helps if ssh was refused: virsh has no terminal to ask for a password.
fn advice(uri: &str, words: &str) -> String {
    let is_refused = words.contains("Permission denied") || words.contains("Host key verification failed");
    if uri.contains("+ssh") && is_refused {
        "; nobody is asked for a password here: make a key for ssh (ssh-copy-id), or use an agent, and log in once by hand".to_owned()
    } else {
        String::new()
    }
}
