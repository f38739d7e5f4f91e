//! Calls to libvirt, by the numbers of its protocol (`remote_protocol.x`, `qemu_protocol.x`), which stay the
//! same in all versions.

use std::path::{Path, PathBuf};

use super::connection::{Connection, QEMU, REMOTE};
use super::error::LibvirtError;
use super::presence::{DomainState, Presence, SavedMemory};
use super::xdr::{Decoder, Encoder};

mod procedure {
    pub(super) const CONNECT_OPEN: i32 = 1;
    pub(super) const DOMAIN_DEFINE_XML: i32 = 11;
    pub(super) const DOMAIN_GET_XML_DESC: i32 = 14;
    pub(super) const DOMAIN_LOOKUP_BY_NAME: i32 = 23;
    pub(super) const DOMAIN_LOOKUP_BY_UUID: i32 = 24;
    pub(super) const DOMAIN_RESUME: i32 = 28;
    pub(super) const AUTH_LIST: i32 = 66;
    pub(super) const AUTH_POLKIT: i32 = 70;
    pub(super) const DOMAIN_IS_ACTIVE: i32 = 150;
    pub(super) const DOMAIN_IS_PERSISTENT: i32 = 151;
    pub(super) const CONNECT_GET_LIB_VERSION: i32 = 157;
    pub(super) const DOMAIN_GET_JOB_INFO: i32 = 163;
    pub(super) const DOMAIN_HAS_MANAGED_SAVE_IMAGE: i32 = 183;
    pub(super) const DOMAIN_SNAPSHOT_NUM: i32 = 187;
    pub(super) const DOMAIN_GET_BLOCK_INFO: i32 = 194;
    pub(super) const DOMAIN_GET_STATE: i32 = 212;
    pub(super) const DOMAIN_BLOCK_JOB_ABORT: i32 = 237;
    pub(super) const DOMAIN_GET_BLOCK_JOB_INFO: i32 = 238;
    pub(super) const DOMAIN_BLOCK_COPY: i32 = 345;
    pub(super) const DOMAIN_LIST_ALL_CHECKPOINTS: i32 = 413;
    /// The number in the program for QEMU.
    pub(super) const QEMU_MONITOR_COMMAND: i32 = 1;
}

const URI: &str = "qemu:///system";
/// libvirt's sockets: of the daemon for QEMU only, then of the one for everything.
const SOCKETS: [&str; 2] = ["/run/libvirt/virtqemud-sock", "/run/libvirt/libvirt-sock"];
/// `REMOTE_AUTH_NONE`, `REMOTE_AUTH_SASL` and `REMOTE_AUTH_POLKIT`.
const AUTH_NONE: u32 = 0;
const AUTH_POLKIT: u32 = 2;
/// The limit of authentication methods in an answer; libvirt has three.
const AUTH_TYPES_MAX: u32 = 20;
/// `VIR_DOMAIN_XML_SECURE`: with passwords, which a definition must not lose.
const XML_SECURE: u32 = 1;
const XML_INACTIVE: u32 = 2;
/// `VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB`: a later start of the domain does not continue the job.
const COPY_TRANSIENT_JOB: u32 = 4;
const ABORT_PIVOT: u32 = 2;

/// The libvirt of a host, with its QEMU driver (`qemu:///system`).
#[derive(Debug)]
pub struct Libvirt {
    connection: Connection,
    version: (u64, u64, u64),
}

/// A domain, as libvirt names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// Its name, which may be changed while it is shut off.
    pub name: String,
    /// Its identity, which never changes.
    pub uuid: [u8; 16],
    id: i32,
}

/// A job of libvirt on one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockJob {
    /// The kind of job, by libvirt's name.
    pub kind: &'static str,
    /// The progress so far, in libvirt's unit.
    pub done: u64,
    /// The progress at its end.
    pub end: u64,
}

/// The size of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSize {
    /// Bytes that its uppermost image takes.
    pub allocated_bytes: u64,
    /// Bytes that the guest sees.
    pub guest_bytes: u64,
}

/// The kind of a domain's definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Definition {
    /// As it runs, or as it would be started if it does not run.
    Current,
    /// As it would be started, with its passwords: for [`Libvirt::define`].
    Persistent,
}

impl Libvirt {
    /// Connects to libvirt; without a `socket`, to an existing one of the usual ones.
    pub async fn connect(socket: Option<&Path>) -> Result<Self, LibvirtError> {
        let usual = || SOCKETS.iter().map(PathBuf::from).find(|socket| socket.exists());
        let fallback = || PathBuf::from(SOCKETS[1]);
        let socket = socket.map(Path::to_owned).or_else(usual).unwrap_or_else(fallback);
        let connection = Connection::connect(&socket).await?;
        authenticate(&connection).await?;
        let open = Encoder::default().present_string(URI).unsigned(0);
        connection.call(REMOTE, procedure::CONNECT_OPEN, open).await?;
        let answer = connection.call(REMOTE, procedure::CONNECT_GET_LIB_VERSION, Encoder::default()).await?;
        let version = Decoder::new(&answer).hyper()?;
        let version = (version / 1_000_000, version / 1000 % 1000, version % 1000);
        Ok(Self { connection, version })
    }

    /// Returns the path of its socket.
    pub fn socket(&self) -> &Path {
        self.connection.socket()
    }

    /// Returns its version, such as `9.0.0`.
    pub fn version(&self) -> String {
        let (major, minor, patch) = self.version;
        format!("{major}.{minor}.{patch}")
    }

    /// Returns the domain of that name or UUID.
    ///
    /// # Errors
    /// [`LibvirtError`]; [`LibvirtError::is_no_domain`]: there is none.
    pub async fn domain(&self, name: &str) -> Result<Domain, LibvirtError> {
        let by_name = self.look_up(procedure::DOMAIN_LOOKUP_BY_NAME, Encoder::default().string(name)).await;
        match (by_name, parse_uuid(name)) {
            (Err(error), Some(uuid)) if error.is_no_domain() => self.domain_of(&uuid).await,
            (found, _) => found,
        }
    }

    /// Returns the domain of that identity.
    pub async fn domain_of(&self, uuid: &[u8; 16]) -> Result<Domain, LibvirtError> {
        self.look_up(procedure::DOMAIN_LOOKUP_BY_UUID, Encoder::default().fixed(uuid)).await
    }

    async fn look_up(&self, procedure: i32, arguments: Encoder) -> Result<Domain, LibvirtError> {
        let answer = self.connection.call(REMOTE, procedure, arguments).await?;
        let mut decoder = Decoder::new(&answer);
        Ok(Domain { name: decoder.string()?, uuid: decoder.fixed()?, id: decoder.int()? })
    }

    /// Returns whether a domain has a QEMU, and its state.
    pub async fn presence(&self, domain: &Domain) -> Result<Presence, LibvirtError> {
        let answer = self.call(procedure::DOMAIN_GET_STATE, about(domain).unsigned(0)).await?;
        let mut decoder = Decoder::new(&answer);
        let (state, reason) = (DomainState::of(decoder.int()?), decoder.int()?);
        // N.B. Asked after the state: if QEMU ends in between, the answers contradict each other, and are queried again.
        let is_active = self.is_true(procedure::DOMAIN_IS_ACTIVE, about(domain)).await?;
        let saved = if is_active {
            SavedMemory::None
        } else if self.is_true(procedure::DOMAIN_HAS_MANAGED_SAVE_IMAGE, about(domain).unsigned(0)).await? {
            SavedMemory::Managed
        } else {
            SavedMemory::of_reason(state, reason)
        };
        Ok(Presence::of(state, is_active, saved))
    }

    /// Returns a domain's definition, as XML.
    pub async fn definition(&self, domain: &Domain, which: Definition) -> Result<String, LibvirtError> {
        let flags = match which {
            Definition::Current => 0,
            Definition::Persistent => XML_INACTIVE | XML_SECURE,
        };
        let answer = self.call(procedure::DOMAIN_GET_XML_DESC, about(domain).unsigned(flags)).await?;
        Decoder::new(&answer).string()
    }

    /// Returns whether a domain outlives its QEMU.
    pub async fn is_persistent(&self, domain: &Domain) -> Result<bool, LibvirtError> {
        self.is_true(procedure::DOMAIN_IS_PERSISTENT, about(domain)).await
    }

    async fn is_true(&self, procedure: i32, arguments: Encoder) -> Result<bool, LibvirtError> {
        let answer = self.call(procedure, arguments).await?;
        Ok(Decoder::new(&answer).int()? == 1)
    }

    /// Redefines a domain, for its next start.
    ///
    /// # Errors
    /// [`LibvirtError`]; the definition is then as before.
    pub async fn define(&self, xml: &str) -> Result<(), LibvirtError> {
        self.call(procedure::DOMAIN_DEFINE_XML, Encoder::default().string(xml)).await.map(drop)
    }

    /// Lets a domain's processors run.
    pub async fn resume(&self, domain: &Domain) -> Result<(), LibvirtError> {
        self.call(procedure::DOMAIN_RESUME, about(domain)).await.map(drop)
    }

    /// Returns whether a job works on the domain as a whole: a migration, a save, a dump, a snapshot, a backup.
    pub async fn has_job(&self, domain: &Domain) -> Result<bool, LibvirtError> {
        let answer = self.call(procedure::DOMAIN_GET_JOB_INFO, about(domain)).await?;
        Ok(Decoder::new(&answer).int()? != 0)
    }

    /// Returns how many snapshots libvirt knows of a domain.
    pub async fn snapshots(&self, domain: &Domain) -> Result<u32, LibvirtError> {
        let answer = self.call(procedure::DOMAIN_SNAPSHOT_NUM, about(domain).unsigned(0)).await?;
        Decoder::new(&answer).unsigned()
    }

    /// Returns how many checkpoints, which are bitmaps for backups, libvirt knows of a domain; none before version 5.6.
    pub async fn checkpoints(&self, domain: &Domain) -> Result<u32, LibvirtError> {
        let arguments = about(domain).int(0).unsigned(0);
        match self.call(procedure::DOMAIN_LIST_ALL_CHECKPOINTS, arguments).await {
            Ok(answer) => {
                let mut decoder = Decoder::new(&answer);
                let _none_listed = decoder.unsigned()?;
                decoder.unsigned()
            }
            Err(error) if error.is_unsupported() => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Returns the size of a disk.
    pub async fn disk_size(&self, domain: &Domain, target: &str) -> Result<DiskSize, LibvirtError> {
        let arguments = about(domain).string(target).unsigned(0);
        let answer = self.call(procedure::DOMAIN_GET_BLOCK_INFO, arguments).await?;
        let mut decoder = Decoder::new(&answer);
        Ok(DiskSize { allocated_bytes: decoder.hyper()?, guest_bytes: decoder.hyper()? })
    }

    /// Returns the job that works on a disk.
    pub async fn block_job(&self, domain: &Domain, target: &str) -> Result<Option<BlockJob>, LibvirtError> {
        let arguments = about(domain).string(target).unsigned(0);
        let answer = self.call(procedure::DOMAIN_GET_BLOCK_JOB_INFO, arguments).await?;
        let mut decoder = Decoder::new(&answer);
        let (found, kind, _bandwidth) = (decoder.int()?, decoder.int()?, decoder.hyper()?);
        let kind = match kind {
            1 => "pull",
            2 => "copy",
            3 | 4 => "commit",
            5 => "backup",
            _ => "unknown",
        };
        let job = BlockJob { kind, done: decoder.hyper()?, end: decoder.hyper()? };
        Ok((found != 0).then_some(job))
    }

    /// Begins to copy a disk to `to`, a `<disk>` element: all of it, and then the guest's writes.
    ///
    /// # Errors
    /// [`LibvirtError`]; the copy has then not begun.
    pub async fn copy_disk(&self, domain: &Domain, target: &str, to: &str) -> Result<(), LibvirtError> {
        // No typed parameters between the two.
        let arguments = about(domain).string(target).string(to).unsigned(0).unsigned(COPY_TRANSIENT_JOB);
        self.call(procedure::DOMAIN_BLOCK_COPY, arguments).await.map(drop)
    }

    /// Copies a disk like [`Self::copy_disk`], onto an existing target of the right size.
    pub async fn copy_disk_onto(&self, domain: &Domain, target: &str, to: &str) -> Result<(), LibvirtError> {
        const REUSE_EXTERNAL: u32 = 2;
        let flags = COPY_TRANSIENT_JOB | REUSE_EXTERNAL;
        let arguments = about(domain).string(target).string(to).unsigned(0).unsigned(flags);
        self.call(procedure::DOMAIN_BLOCK_COPY, arguments).await.map(drop)
    }

    /// Moves the disk to the target of its copy, which has caught up; returns once that is done, and the source is closed.
    ///
    /// # Errors
    /// [`LibvirtError`]; the disk is as before, and the copy continues.
    pub async fn pivot(&self, domain: &Domain, target: &str) -> Result<(), LibvirtError> {
        let arguments = about(domain).string(target).unsigned(ABORT_PIVOT);
        self.call(procedure::DOMAIN_BLOCK_JOB_ABORT, arguments).await.map(drop)
    }

    /// Ends the job on a disk, which is then as before.
    pub async fn cancel_block_job(&self, domain: &Domain, target: &str) -> Result<(), LibvirtError> {
        let arguments = about(domain).string(target).unsigned(0);
        self.call(procedure::DOMAIN_BLOCK_JOB_ABORT, arguments).await.map(drop)
    }

    /// Sends a command to the domain's QEMU, as JSON, and returns its answer. libvirt then marks the domain as tainted.
    ///
    /// # Errors
    /// [`LibvirtError`]: libvirt did not pass it on. A refusal by QEMU is an answer.
    pub async fn monitor_command(&self, domain: &Domain, command: &str) -> Result<String, LibvirtError> {
        let arguments = about(domain).string(command).unsigned(0);
        let answer = self.connection.call(QEMU, procedure::QEMU_MONITOR_COMMAND, arguments).await?;
        Decoder::new(&answer).string()
    }

    async fn call(&self, procedure: i32, arguments: Encoder) -> Result<Vec<u8>, LibvirtError> {
        self.connection.call(REMOTE, procedure, arguments).await
    }
}

/// Authenticates, which libvirt requires first. It asks root for nothing.
async fn authenticate(connection: &Connection) -> Result<(), LibvirtError> {
    let answer = connection.call(REMOTE, procedure::AUTH_LIST, Encoder::default()).await?;
    let mut decoder = Decoder::new(&answer);
    let count = decoder.unsigned()?.min(AUTH_TYPES_MAX);
    let kinds = (0..count).map(|_| decoder.unsigned()).collect::<Result<Vec<_>, _>>()?;
    if kinds.is_empty() || kinds.contains(&AUTH_NONE) {
        return Ok(());
    }
    if !kinds.contains(&AUTH_POLKIT) {
        return Err(LibvirtError::Authentication { kind: "SASL", socket: connection.socket().to_owned() });
    }
    let asked = connection.call(REMOTE, procedure::AUTH_POLKIT, Encoder::default()).await;
    asked.map(drop)
}

fn about(domain: &Domain) -> Encoder {
    Encoder::default().string(&domain.name).fixed(&domain.uuid).int(domain.id)
}

/// Parses a UUID in its usual form.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<char> = text.chars().filter(|character| *character != '-').collect();
    let digits: Vec<u32> = digits.iter().map(|digit| digit.to_digit(16)).collect::<Option<_>>()?;
    let bytes = digits.chunks_exact(2).map(|pair| pair.iter().fold(0, |byte, digit| byte * 16 + digit));
    let bytes: Vec<u8> = bytes.map(|byte| u8::try_from(byte).unwrap_or_default()).collect();
    if digits.len() == 32 { bytes.try_into().ok() } else { None }
}

/// Formats a UUID in its usual form.
pub fn show_uuid(uuid: &[u8; 16]) -> String {
    let mut text = String::new();
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_written_and_read() {
        let text = "55675114-5e41-40de-a57a-cd0d71773d54";
        let uuid = parse_uuid(text).unwrap();
        assert_eq!((uuid[0], uuid[15], show_uuid(&uuid).as_str()), (0x55, 0x54, text));
        for other in
            ["web1", "", "55675114-5e41-40de-a57a-cd0d71773d5", "55675114-5e41-40de-a57a-cd0d71773d5x"]
        {
            assert_eq!(parse_uuid(other), None, "{other}");
        }
    }
}
