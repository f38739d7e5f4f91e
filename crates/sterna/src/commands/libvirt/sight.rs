//! Looks at a domain: at both libvirts, and at the daemon for its disks.

use std::path::{Path, PathBuf};

use api::{Client, Volume};
use hypervisor::libvirt::{Disk, DiskSource, NbdSource, disks, with_export};

use super::error::{LibvirtError, Obstacle};
use super::steps::{DomainState, Place, Seen};
use super::virsh::Virsh;
use crate::commands::CommandError;

/// A domain, and where to look for it.
pub(super) struct Domain {
    /// The user has given this name.
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
        name: &str,
        host: &str,
        here: Virsh,
        there: Virsh,
    ) -> Result<Self, LibvirtError> {
        // Both are asked, so that an unreachable one is known before anything begins.
        let (at_here, at_there) = (here.uuid(name).await?, there.uuid(name).await?);
        let uuid = at_here.or(at_there).ok_or_else(|| LibvirtError::Obstacle {
            domain: words::clean(name),
            obstacle: Obstacle::NoDomain,
        })?;
        Ok(Self { name: words::clean(name), uuid, here, there, host: host.to_owned() })
    }

    /// Returns what is seen of the domain now.
    pub(super) async fn look(&self, client: &Client) -> Result<Seen, CommandError> {
        let here = self.here.state(&self.uuid).await?;
        let there = self.there.state(&self.uuid).await?;
        let is_there = there == DomainState::Running || here == DomainState::Absent;
        let libvirt = if is_there { &self.there } else { &self.here };
        if is_there && there == DomainState::Absent {
            return Err(self.obstacle(Obstacle::NoDomain).into());
        }
        let definition = libvirt.ask(&["dumpxml", &self.uuid]).await?;
        let known = client.volumes().await?;
        let mut volumes = Vec::new();
        let mut migration = None;
        for disk in self.disks(&definition)? {
            let DiskSource::Nbd(source) = &disk.source else { return Err(self.no_volume(&disk).into()) };
            let found = known.iter().find(|volume| {
                volume.name == source.export && (is_there || Path::new(&volume.socket) == source.socket)
            });
            let place = match found {
                Some(volume) => {
                    migration = migration.or_else(|| volume.migration.clone());
                    self.place(volume)?
                }
                None if is_there => Place::There,
                None => return Err(self.no_volume(&disk).into()),
            };
            volumes.push((source.export.clone(), place));
        }
        if volumes.is_empty() {
            return Err(LibvirtError::NoVolumes { domain: self.name.clone() }.into());
        }
        volumes.sort_by(|(first, _), (second, _)| first.cmp(second));
        volumes.dedup();
        let vms = client.vms().await?;
        let is_adopted = |vm: &&api::Vm| {
            vm.libvirt_domain.is_some() && volumes.iter().any(|(name, _)| vm.volumes.contains(name))
        };
        let adopted = vms.iter().find(is_adopted).map(|vm| vm.name.clone());
        Ok(Seen { here, there, volumes, migration, adopted })
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

    /// The disks that the guest writes to. Drives without a medium, and what is only read, is libvirt's.
    fn disks(&self, definition: &str) -> Result<Vec<Disk>, LibvirtError> {
        let disks = disks(definition).map_err(|error| self.unreadable(&error))?;
        let is_written = |disk: &Disk| matches!(disk.device.as_str(), "disk" | "lun") && !disk.is_read_only;
        Ok(disks.into_iter().filter(is_written).collect())
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
                let is_there = |attachment: &&api::Attachment| attachment.host == self.host;
                let attachment = volume.attachments.iter().find(is_there);
                let is_attached = attachment.is_some_and(|found| found.is_confirmed && !found.read_only);
                Ok(Place::Here { is_attached })
            }
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
