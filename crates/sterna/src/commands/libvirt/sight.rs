//! Looks at a domain: at both libvirts, and at the daemon for its disks.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api::{Client, Volume, VolumeState};
use hypervisor::libvirt::{Disk, DiskSource, NbdSource, disks, with_export};

use super::error::{LibvirtError, Obstacle};
use super::steps::{DomainState, Place, Seen};
use super::virsh::Virsh;
use crate::commands::CommandError;

/// The longest wait for a volume that is not served yet.
const SETTLED_MAX: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How often two libvirts are asked again, while a domain seems to move between the questions.
const LOOKS_MAX: usize = 5;

/// A domain, and where to look for it.
pub(super) struct Domain {
    /// The name that libvirt knows.
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) here: Virsh,
    pub(super) there: Virsh,
    /// Name of the other host.
    pub(super) host: String,
}

impl Domain {
    /// Finds a domain at one of two hosts.
    pub(super) async fn find(
        given: &str,
        host: &str,
        here: Virsh,
        there: Virsh,
    ) -> Result<Self, LibvirtError> {
        // Both are asked, so that an unreachable one is known before anything begins.
        let (identity, other) = (here.host().await?, there.host().await?);
        if identity == other && !identity.is_empty() {
            return Err(LibvirtError::SameLibvirt { here: here.uri, there: there.uri });
        }
        for _ in 0..LOOKS_MAX {
            let found = match named(&here, given).await? {
                Some(found) => Some(found),
                None => named(&there, given).await?,
            };
            if let Some((uuid, name)) = found {
                return Ok(Self { name, uuid, here, there, host: host.to_owned() });
            }
        }
        Err(LibvirtError::Obstacle { domain: words::clean(given), obstacle: Obstacle::NoDomain })
    }

    /// Returns what is seen of the domain now.
    pub(super) async fn look(&self, client: &Client) -> Result<Seen, CommandError> {
        let (here, there) = self.states().await?;
        let is_there = there == DomainState::Running || here == DomainState::Absent;
        let libvirt = if is_there { &self.there } else { &self.here };
        if is_there && there == DomainState::Absent {
            return Err(self.obstacle(Obstacle::NoDomain).into());
        }
        let disks = self.disks(&libvirt.ask(&["dumpxml", &self.uuid]).await?)?;
        let known = self.settled(client, &disks).await?;
        let mut volumes = Vec::new();
        for disk in disks {
            if let Some(volume) = self.volume_of(&disk, &known, is_there) {
                if !is_there && disk.mirror.is_some() {
                    return Err(LibvirtError::Job { domain: self.name.clone(), disk: disk.target }.into());
                }
                if disk.is_read_only {
                    self.check_is_within_reach(&disk, volume, is_there)?;
                    continue;
                }
                volumes.push((volume.name.clone(), self.place(volume)?));
            } else if !is_passed_over(&disk) {
                let DiskSource::Nbd(source) = &disk.source else { return Err(self.no_volume(&disk).into()) };
                if !is_there {
                    return Err(self.no_volume(&disk).into());
                }
                volumes.push((source.export.clone(), Place::There));
            }
        }
        if volumes.is_empty() {
            return Err(LibvirtError::NoVolumes { domain: self.name.clone() }.into());
        }
        volumes.sort_by(|(first, _), (second, _)| first.cmp(second));
        volumes.dedup();
        let is_of = |migration: &&api::Migration| {
            let mut moving = migration.volume.split(", ");
            migration.ended_unix_ms.is_none()
                && moving.any(|moving| volumes.iter().any(|(name, _)| name == moving))
        };
        let migration = client.migrations().await?.iter().find(is_of).map(|found| found.id.clone());
        let vms = client.vms().await?;
        let is_adopted = |vm: &&api::Vm| vm.libvirt_domain.as_ref() == Some(&self.name);
        let adopted = vms.iter().find(is_adopted).map(|vm| vm.name.clone());
        Ok(Seen { here, there, volumes, migration, adopted })
    }

    /// Returns the states of the domain at both hosts. This host's libvirt is asked before and after the other one, because the domain
    /// may move between two questions.
    async fn states(&self) -> Result<(DomainState, DomainState), LibvirtError> {
        let mut here = self.here.state(&self.uuid).await?;
        for _ in 0..LOOKS_MAX {
            let there = self.there.state(&self.uuid).await?;
            let again = self.here.state(&self.uuid).await?;
            if again == here {
                return Ok((here, there));
            }
            here = again;
        }
        Err(self.obstacle(Obstacle::UnderWay))
    }

    /// Returns the volumes of this host, once each with the name of a disk is served: before that it is not known which host has it.
    async fn settled(&self, client: &Client, disks: &[Disk]) -> Result<Vec<Volume>, CommandError> {
        let is_disk = |volume: &Volume| {
            disks
                .iter()
                .any(|disk| matches!(&disk.source, DiskSource::Nbd(source) if source.export == volume.name))
        };
        let until = Instant::now() + SETTLED_MAX;
        loop {
            let volumes = client.volumes().await?;
            let is_unserved = |volume: &&Volume| {
                volume.host.is_none() && volume.state != VolumeState::Serving && is_disk(volume)
            };
            let Some(unserved) = volumes.iter().find(is_unserved) else { return Ok(volumes) };
            if Instant::now() > until {
                let volume = unserved.name.clone();
                return Err(LibvirtError::NotServed { volume }.into());
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Returns the volume here that a disk is. A domain at the other host has another socket, so there only a volume that the other
    /// host has, or has got attached, can be its disk.
    fn volume_of<'a>(&self, disk: &Disk, known: &'a [Volume], is_there: bool) -> Option<&'a Volume> {
        let DiskSource::Nbd(source) = &disk.source else { return None };
        known.iter().find(|volume| {
            let socket = Path::new(&volume.socket);
            let is_shown = match is_there {
                true => {
                    let is_at = volume.host.as_ref() == Some(&self.host) || self.attachment(volume).is_some();
                    is_at && source.socket.file_name() == socket.file_name()
                }
                false => source.socket == socket,
            };
            volume.name == source.export && is_shown
        })
    }

    fn attachment<'a>(&self, volume: &'a Volume) -> Option<&'a api::Attachment> {
        volume.attachments.iter().find(|attachment| attachment.host == self.host)
    }

    fn check_is_within_reach(
        &self,
        disk: &Disk,
        volume: &Volume,
        is_there: bool,
    ) -> Result<(), LibvirtError> {
        let is_within_reach = volume.host.as_ref() == Some(&self.host) || self.attachment(volume).is_some();
        if is_there || is_within_reach {
            return Ok(());
        }
        Err(LibvirtError::ReadOnly {
            domain: self.name.clone(),
            disk: words::clean(&disk.target),
            volume: volume.name.clone(),
            host: self.host.clone(),
        })
    }

    /// Returns the definition for the other host, in which the sockets of volumes are in another folder.
    pub(super) fn moved(&self, definition: &str, folder: &Path) -> Result<String, LibvirtError> {
        let mut moved = definition.to_owned();
        for disk in self.disks(definition)? {
            let DiskSource::Nbd(source) = disk.source else { continue };
            let name = source.socket.file_name().map(PathBuf::from).unwrap_or_default();
            let export = NbdSource { socket: folder.join(name), ..source };
            moved = with_export(&moved, &disk.target, &export).map_err(|error| self.unreadable(&error))?;
        }
        Ok(moved)
    }

    pub(super) fn obstacle(&self, obstacle: Obstacle) -> LibvirtError {
        LibvirtError::Obstacle { domain: self.name.clone(), obstacle }
    }

    fn disks(&self, definition: &str) -> Result<Vec<Disk>, LibvirtError> {
        disks(definition).map_err(|error| self.unreadable(&error))
    }

    fn unreadable(&self, error: &hypervisor::libvirt::LibvirtError) -> LibvirtError {
        LibvirtError::Definition { domain: self.name.clone(), words: words::clean(&error.to_string()) }
    }

    fn no_volume(&self, disk: &Disk) -> LibvirtError {
        LibvirtError::NoVolume { domain: self.name.clone(), disk: words::clean(&disk.target) }
    }

    fn place(&self, volume: &Volume) -> Result<Place, LibvirtError> {
        match &volume.host {
            None => {
                let attachment = self.attachment(volume);
                let is_attached = attachment.is_some_and(|found| found.is_confirmed && !found.read_only);
                Ok(Place::Here { is_attached })
            }
            Some(host) if *host == self.host && volume.attached_by.is_some() => Ok(Place::Borrowed),
            Some(host) if *host == self.host => Ok(Place::Forwarded),
            Some(host) => Err(LibvirtError::Elsewhere {
                domain: self.name.clone(),
                volume: volume.name.clone(),
                host: host.clone(),
                to: self.host.clone(),
            }),
        }
    }
}

/// Returns the UUID and the name of a domain; `None`: this libvirt does not have it.
async fn named(libvirt: &Virsh, given: &str) -> Result<Option<(String, String)>, LibvirtError> {
    let Some(uuid) = libvirt.uuid(given).await? else { return Ok(None) };
    Ok(libvirt.name(&uuid).await.ok().map(|name| (uuid, words::clean(&name))))
}

/// Returns whether a disk is libvirt's to care for: a drive, or what the guest only reads.
fn is_passed_over(disk: &Disk) -> bool {
    !matches!(disk.device.as_str(), "disk" | "lun") || disk.is_read_only
}
