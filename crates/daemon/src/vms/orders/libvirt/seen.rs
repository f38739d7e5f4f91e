//! The state of a domain and its disks at one moment. What cannot be determined is *unknown*, never "no".
//!
//! ```text
//!   state, then definitions, then the state again        a change in between makes the observation void
//!   a disk:  its file, which is the one that was proved ─► File        our socket, and nothing above it ─► Export
//!            our socket somewhere below ─► Above       a chain that is known to its end ─► Elsewhere       else ─► Unknown
//! ```

use std::path::{Path, PathBuf};

use block::held::ToLookAt;
use block::store::qcow2::{Format, Qcow2Error, TopLayer};
use hypervisor::libvirt::{Definition, Disk, DiskSource, Domain, Libvirt, Presence, disks, mentions_beside};
use migration::vm::copied::{CopyMade, Domain as Seen, Job, Over, SeenDisk, Volume};

use super::found;
use crate::error::RequestError;
use crate::host::{VmOrders, blocking};
use crate::vms::{Adopted, AdoptedDisk, CopyNote, FileIdentity, VmError};

/// How many images of a chain are followed.
const CHAIN_MAX: usize = 64;
/// How many observations are made while the domain's state changes.
const LOOKS_MAX: usize = 3;

/// The observed state of a domain.
pub(crate) struct Look {
    pub(crate) libvirt: Libvirt,
    /// Absent: libvirt has no such domain.
    pub(crate) domain: Option<Domain>,
    /// The state in libvirt's terms; absent with the domain.
    pub(crate) presence: Option<Presence>,
    pub(crate) seen: Seen,
    pub(crate) disks: Vec<SeenDisk>,
    pub(crate) defined: Vec<Option<Disk>>,
}

impl Look {
    pub(crate) fn has_qemu(&self) -> bool {
        self.seen == Seen::Runs
    }
}

/// The definition in which disks are looked up.
struct Defined {
    text: String,
    disks: Vec<Disk>,
    which: Which,
}

/// Whether a definition includes the backing files of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    /// The definition of a running QEMU, in which libvirt lists the chains.
    Live,
    /// The definition of the next start, for which only the images' headers list the chains.
    Next,
}

impl VmOrders {
    /// Observes a domain and its adopted disks. After an error nothing is known.
    pub(crate) async fn look_at_domain(&self, adopted: &Adopted) -> Result<Look, RequestError> {
        let failed = |source| VmError::Libvirt { vm: adopted.name.clone(), source };
        let libvirt = Libvirt::connect(Some(&adopted.monitor)).await.map_err(failed)?;
        let domain = match &adopted.libvirt {
            Some(domain) => found(&libvirt, domain).await.map_err(failed)?,
            None => None,
        };
        let Some(domain) = domain else {
            let gone = |kept: &AdoptedDisk| self.seen_as(kept, (Over::Gone, Over::Gone), Job::None);
            let disks = adopted.disks.iter().map(gone).collect::<Result<_, _>>()?;
            let defined = vec![None; adopted.disks.len()];
            return Ok(Look { libvirt, domain: None, presence: None, seen: Seen::Gone, disks, defined });
        };
        for _ in 0..LOOKS_MAX {
            let before = libvirt.presence(&domain).await.map_err(failed)?;
            let (disks, defined) = self.look_at_disks_of(adopted, &libvirt, &domain, before).await?;
            if libvirt.presence(&domain).await.map_err(failed)? == before {
                let (domain, presence) = (Some(domain), Some(before));
                return Ok(Look { libvirt, domain, presence, seen: seen_of(before), disks, defined });
            }
        }
        let why = "its state keeps changing; nothing was changed".to_owned();
        Err(VmError::Disk { vm: adopted.name.clone(), why }.into())
    }

    async fn look_at_disks_of(
        &self,
        adopted: &Adopted,
        libvirt: &Libvirt,
        domain: &Domain,
        presence: Presence,
    ) -> Result<(Vec<SeenDisk>, Vec<Option<Disk>>), RequestError> {
        let failed = |source| RequestError::from(VmError::Libvirt { vm: adopted.name.clone(), source });
        let seen = seen_of(presence);
        if seen == Seen::Unknown {
            let unknown = |kept| self.seen_as(kept, (Over::Unknown, Over::Unknown), Job::None);
            let disks = adopted.disks.iter().map(unknown).collect::<Result<_, _>>()?;
            return Ok((disks, vec![None; adopted.disks.len()]));
        }
        let read = async |which, definition| {
            let text = libvirt.definition(domain, definition).await.map_err(failed)?;
            let disks = disks(&text).map_err(failed)?;
            Ok::<_, RequestError>(Defined { text, disks, which })
        };
        let (live, next) = if seen == Seen::Runs {
            let has_next = libvirt.is_persistent(domain).await.map_err(failed)?;
            let next = if has_next { Some(read(Which::Next, Definition::Persistent).await?) } else { None };
            (read(Which::Live, Definition::Current).await?, next)
        } else {
            (read(Which::Next, Definition::Persistent).await?, None)
        };
        let (mut disks, mut defined) = (Vec::new(), Vec::new());
        for kept in &adopted.disks {
            let over = self.over_in(kept, &live).await?;
            let after = match &next {
                Some(next) => self.over_in(kept, next).await?,
                None => over,
            };
            let disk = live.disks.iter().find(|disk| disk.target == kept.device).cloned();
            let job = match &disk {
                Some(disk) if seen == Seen::Runs => {
                    self.job_of(libvirt, domain, kept, disk).await.map_err(failed)?
                }
                _ => Job::None,
            };
            disks.push(self.seen_as(kept, (over, after), job)?);
            defined.push(disk);
        }
        Ok((disks, defined))
    }

    fn seen_as(
        &self,
        kept: &AdoptedDisk,
        (over, next): (Over, Over),
        job: Job,
    ) -> Result<SeenDisk, RequestError> {
        let is_still_there = || kept.found.is_some() && FileIdentity::at(&kept.file).ok() == kept.found;
        let copy = match kept.copy {
            CopyNote::Unused if is_still_there() => CopyMade::Unused,
            CopyNote::Pivoted if is_still_there() => CopyMade::Pivoted,
            CopyNote::None | CopyNote::Unused | CopyNote::Pivoted => CopyMade::No,
        };
        Ok(SeenDisk { over, next, job, volume: self.volume_of(kept)?, copy })
    }

    /// Returns the state of a disk's volume, or an error if it is not known.
    fn volume_of(&self, kept: &AdoptedDisk) -> Result<Volume, RequestError> {
        match self.claims.record_named(&kept.volume) {
            Ok(_) => Ok(Volume::Here),
            Err(RequestError::VolumeElsewhere { .. }) => Ok(Volume::Remote),
            Err(RequestError::VolumeNotFound(_)) if kept.given_back.is_some() => Ok(Volume::GivenBack),
            Err(RequestError::VolumeNotFound(_)) => Ok(Volume::Absent),
            Err(error) => Err(error),
        }
    }

    async fn over_in(&self, kept: &AdoptedDisk, defined: &Defined) -> Result<Over, RequestError> {
        let socket = self.sockets.volume_socket(&kept.volume);
        let beside = mentions_beside(&defined.text, &kept.device, &socket);
        let beside = beside.map_err(|source| VmError::Libvirt { vm: kept.volume.clone(), source })?;
        let Some(disk) = defined.disks.iter().find(|disk| disk.target == kept.device) else {
            // The disk may have another target name and still use the volume.
            return Ok(if beside { Over::Unknown } else { Over::Gone });
        };
        let over = self.over_of(kept, &disk.source);
        let (chain, which) = (disk.chain.clone(), defined.which);
        Ok(match over {
            _ if beside => Over::Unknown,
            // N.B. The served image does not count as the disk's file.
            _ if self.is_image_of(kept, &disk.source) => Over::Unknown,
            Over::File if !is_as_proved(kept, &disk.source) => Over::Unknown,
            Over::Elsewhere | Over::File => {
                let below = match (which, chain, &disk.source) {
                    (Which::Live, Some(chain), _) => of_chain(&chain, &socket),
                    (Which::Next, _, DiskSource::File(file)) if over == Over::Elsewhere => {
                        let (file, format) = (file.clone(), disk.format.clone());
                        let socket = socket.clone();
                        blocking(move || Ok(of_image(&file, &format, &socket))).await?
                    }
                    (_, _, DiskSource::None) => Over::Elsewhere,
                    (_, _, DiskSource::Nbd(other)) if other.socket != socket => Over::Elsewhere,
                    _ if over == Over::File => Over::Elsewhere,
                    _ => Over::Unknown,
                };
                if over == Over::File && below == Over::Elsewhere { Over::File } else { below }
            }
            over => over,
        })
    }

    /// Returns whether libvirt names the very image from which the volume is served.
    fn is_image_of(&self, kept: &AdoptedDisk, source: &DiskSource) -> bool {
        let Ok(record) = self.claims.record_named(&kept.volume) else { return false };
        let image = record.image.place.file().map(Path::new);
        let is_same = |file: &Path| image.is_some_and(|image| is_one_file(file, image));
        matches!(source, DiskSource::File(file) if is_same(file))
    }

    async fn job_of(
        &self,
        libvirt: &Libvirt,
        domain: &Domain,
        kept: &AdoptedDisk,
        disk: &Disk,
    ) -> Result<Job, hypervisor::libvirt::LibvirtError> {
        let Some(mirror) = &disk.mirror else {
            let job = libvirt.block_job(domain, &kept.device).await?;
            return Ok(if job.is_some() { Job::Foreign } else { Job::None });
        };
        let to = self.over_of(kept, &mirror.to);
        let is_ours = matches!(
            (self.over_of(kept, &disk.source), to),
            (Over::File, Over::Export) | (Over::Export, Over::File)
        );
        Ok(match (is_ours, mirror.is_ready) {
            (false, _) => Job::Foreign,
            (true, true) => Job::CaughtUp,
            (true, false) => Job::Copying,
        })
    }

    /// Returns what a place that libvirt names is to an adopted disk, without the chain.
    pub(crate) fn over_of(&self, kept: &AdoptedDisk, source: &DiskSource) -> Over {
        match source {
            DiskSource::File(file) if is_file_of(kept, file) => Over::File,
            DiskSource::Nbd(source) if source.socket == self.sockets.volume_socket(&kept.volume) => {
                Over::Export
            }
            _ => Over::Elsewhere,
        }
    }
}

pub(crate) fn seen_of(presence: Presence) -> Seen {
    match presence {
        Presence::There(_) => Seen::Runs,
        // A saved state in a file can be changed before it is restored; libvirt's own copy cannot.
        Presence::Absent | Presence::Saved => Seen::Off,
        Presence::ManagedSave => Seen::Saved,
        Presence::Unknown(_) => Seen::Unknown,
    }
}

/// Returns whether a file that libvirt names is the disk's, directly or by a link, or the image that was released as the disk.
fn is_file_of(kept: &AdoptedDisk, file: &Path) -> bool {
    is_one_file(file, &kept.file) || is_given_back(kept, file)
}

fn is_given_back(kept: &AdoptedDisk, file: &Path) -> bool {
    kept.given_back.as_ref().is_some_and(|given| is_one_file(file, &given.file))
}

fn is_one_file(one: &Path, other: &Path) -> bool {
    one == other || one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

/// Returns whether the file with the disk's name is the proved one, or was not proved at all.
fn is_as_proved(kept: &AdoptedDisk, source: &DiskSource) -> bool {
    match source {
        DiskSource::File(file) if is_given_back(kept, file) => true,
        _ => kept.found.is_none_or(|found| FileIdentity::at(&kept.file).is_ok_and(|at| at == found)),
    }
}

/// Returns what a chain listed by libvirt reaches.
fn of_chain(chain: &[DiskSource], socket: &Path) -> Over {
    let is_ours = |source: &DiskSource| matches!(source, DiskSource::Nbd(nbd) if nbd.socket == socket);
    if chain.iter().any(is_ours) { Over::Above } else { Over::Elsewhere }
}

/// Returns what the chain of an image reaches, from its headers. Blocks.
fn of_image(file: &Path, format: &str, socket: &Path) -> Over {
    let (mut file, mut format) = (PathBuf::from(file), format.to_owned());
    for _ in 0..CHAIN_MAX {
        // Opening a pipe would block.
        if !std::fs::metadata(&file).is_ok_and(|found| found.is_file()) {
            return Over::Unknown;
        }
        if format == "raw" {
            return Over::Elsewhere;
        }
        if format != "qcow2" {
            return Over::Unknown;
        }
        match TopLayer::of(&file, &ToLookAt) {
            Ok(TopLayer { backing: None, .. }) => return Over::Elsewhere,
            Ok(TopLayer { backing: Some(below), .. }) => {
                file = PathBuf::from(below.path);
                format = match below.format {
                    Format::Raw => "raw".to_owned(),
                    Format::Qcow2 => "qcow2".to_owned(),
                    Format::Other(other) => other,
                };
            }
            Err(Qcow2Error::BackingIsNoFile { name, .. }) if name.contains(&*socket.to_string_lossy()) => {
                return Over::Above;
            }
            Err(_) => return Over::Unknown,
        }
    }
    Over::Unknown
}

#[cfg(test)]
mod tests {
    use block::store::qcow2::{Qcow2Image, Qcow2Options};

    use super::*;

    #[test]
    fn an_image_stands_on_a_volume_only_as_its_headers_say() {
        let folder = tempfile::tempdir().unwrap();
        let socket = Path::new("/run/v/web1.sock");
        let raw = folder.path().join("raw");
        std::fs::write(&raw, [0; 512]).unwrap();
        assert_eq!(of_image(&raw, "raw", socket), Over::Elsewhere);
        let alone = folder.path().join("alone");
        drop(
            Qcow2Image::create(&alone, 1 << 20, &Qcow2Options { cluster_size: 65_536, backing: None })
                .unwrap(),
        );
        assert_eq!(of_image(&alone, "qcow2", socket), Over::Elsewhere);
        for (export, found) in [("/run/v/web1.sock", Over::Above), ("/run/v/web2.sock", Over::Unknown)] {
            let overlay = folder.path().join("overlay");
            write_overlay(&alone, &overlay, &format!("nbd+unix:///web1?socket={export}"));
            assert_eq!(of_image(&overlay, "qcow2", socket), found);
        }
        // Unreadable files and unknown formats are unknown.
        assert_eq!(of_image(&raw, "qcow2", socket), Over::Unknown);
        assert_eq!(of_image(&raw, "vmdk", socket), Over::Unknown);
        assert_eq!(of_image(&folder.path().join("none"), "raw", socket), Over::Unknown);
        assert_eq!(of_image(folder.path(), "raw", socket), Over::Unknown);
    }

    /// Writes an image whose header names a backing file.
    fn write_overlay(alone: &Path, overlay: &Path, name: &str) {
        const NAME_AT: usize = 512;
        let mut bytes = std::fs::read(alone).unwrap();
        bytes[8..16].copy_from_slice(&(NAME_AT as u64).to_be_bytes());
        bytes[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        bytes[NAME_AT..NAME_AT + name.len()].copy_from_slice(name.as_bytes());
        std::fs::write(overlay, bytes).unwrap();
    }

    #[test]
    fn a_chain_that_reaches_the_socket_stands_on_the_volume() {
        let nbd = |socket: &str| {
            DiskSource::Nbd(hypervisor::libvirt::NbdSource {
                socket: socket.into(),
                export: "web1".to_owned(),
                reconnect_s: None,
            })
        };
        let socket = Path::new("/run/v/web1.sock");
        let file = DiskSource::File("/srv/middle".into());
        assert_eq!(of_chain(&[file.clone(), nbd("/run/v/web1.sock")], socket), Over::Above);
        assert_eq!(of_chain(&[file, nbd("/run/v/web2.sock")], socket), Over::Elsewhere);
    }
}
