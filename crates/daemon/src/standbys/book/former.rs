//! What a host remembers of groups that it has given up after a promotion: what it has written and nobody has received.
//!
//! ```text
//!   standbys/ID.former.json    the volumes, their images, what becomes of them    standbys/ID.former   the record of the replication
//!   standbys/ID.N.written      the blocks of volume N that the other host may not have received
//! ```

use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use standby::record::{OwnerRecord, Record as _, Written};
use standby::reprotection::{Because, Stage};

use super::{Book, CopiedVolume, Keep, Look, Unreadable, remove};
use crate::files::whole_file;

const SUFFIX: &str = ".former.json";

/// A group that was given up here, because another host has promoted its standby.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FormerGroup {
    /// The identity of the standby that was promoted, 32 hexadecimal digits.
    pub(crate) id: String,
    pub(crate) name: String,
    /// The identity of the host that has promoted it, 64 hexadecimal digits.
    pub(crate) host: String,
    pub(crate) given_up_unix_ms: u64,
    pub(crate) volumes: Vec<FormerVolume>,
    /// The order of the other host to make the images its standby; `None`: there was none.
    pub(crate) order: Option<ReturnOrder>,
}

/// A volume of such a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FormerVolume {
    /// The identity that it had here, 32 hexadecimal digits.
    pub(crate) volume: String,
    pub(crate) name: String,
    pub(crate) size_bytes: u64,
    /// The store of its image; empty: the image is in none.
    pub(crate) store: String,
    /// Its image: a path, or the address of an export.
    pub(crate) image: String,
    /// Whether the image is a raw file in the folder of its store, so that it can become a standby's.
    pub(crate) is_plain: bool,
    /// The attributes of the image when it was given up; `None`: it is no file, or was not looked at.
    pub(crate) look: Option<Look>,
    pub(crate) kept: KeptDivergence,
}

/// Where that content of a volume is which nobody has received.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum KeptDivergence {
    /// In its image, which is as it was given up.
    InImage,
    /// In a file of blocks of this length, in the folder of divergences in the store.
    Blocks(u64),
    /// In a whole image, in that folder: it shares blocks with what has become the standby's.
    Clone,
    /// In its former image, which has this name now.
    Aside(String),
    /// It was given up by name, or there was none.
    Dropped,
}

/// The order of another host to make images that were given up its standby.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReturnOrder {
    /// The identity of the new standby, 32 hexadecimal digits.
    pub(crate) standby: String,
    /// The life of the new owner's history, 32 hexadecimal digits.
    pub(crate) life: String,
    pub(crate) name: String,
    pub(crate) store: String,
    pub(crate) keep: Keep,
    /// The volumes of the new owner, in the order of the group.
    pub(crate) volumes: Vec<CopiedVolume>,
    pub(crate) stage: Stage,
    /// Why the images may lack everything; `None`: what they lack is known.
    pub(crate) everything: Option<Because>,
    /// Why it does not go on; it is tried again.
    #[serde(default)]
    pub(crate) problem: Option<String>,
}

impl FormerGroup {
    /// Returns whether nothing of it is needed any more: the standby receives, and no divergence is kept.
    pub(crate) fn is_done(&self) -> bool {
        let is_ready = self.order.as_ref().is_some_and(|order| order.stage == Stage::Ready);
        is_ready && self.volumes.iter().all(|volume| volume.kept == KeptDivergence::Dropped)
    }
}

impl Book {
    /// Returns the groups that were given up here, and which files cannot be read.
    pub(crate) fn formers(&self) -> io::Result<(Vec<FormerGroup>, Vec<Unreadable>)> {
        self.files_of(SUFFIX)
    }

    /// Returns a group that was given up here.
    pub(crate) fn former(&self, id: &str) -> io::Result<Option<FormerGroup>> {
        let bytes = whole_file::read(&self.former_path(id), super::BYTES_MAX)?;
        Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
    }

    pub(crate) fn write_former(&self, former: &FormerGroup) -> io::Result<()> {
        whole_file::replace(&self.former_path(&former.id), &serde_json::to_vec_pretty(former)?)
    }

    /// Returns the record of the replication when the group was given up; `None`: there is none, or it is damaged.
    pub(crate) fn former_record(&self, id: &str) -> io::Result<Option<OwnerRecord>> {
        let bytes = whole_file::read(&self.folder.join(format!("{id}.former")), super::BYTES_MAX)?;
        Ok(bytes.and_then(|bytes| OwnerRecord::decode(&bytes)))
    }

    pub(crate) fn write_former_record(&self, id: &str, record: &OwnerRecord) -> io::Result<()> {
        whole_file::replace(&self.folder.join(format!("{id}.former")), &record.encode())
    }

    /// Returns what was written to a volume and may not have been received; `None`: it is not known.
    pub(crate) fn written(&self, id: &str, volume: usize) -> io::Result<Option<Written>> {
        let bytes = whole_file::read(&self.written_path(id, volume), super::BYTES_MAX)?;
        Ok(bytes.and_then(|bytes| Written::decode(&bytes)))
    }

    pub(crate) fn note_written(&self, id: &str, volume: usize, written: &Written) -> io::Result<()> {
        whole_file::replace(&self.written_path(id, volume), &written.encode())
    }

    /// Forgets a group that was given up here, durably.
    pub(crate) fn forget_former(&self, former: &FormerGroup) -> io::Result<()> {
        remove(&self.former_path(&former.id))?;
        remove(&self.folder.join(format!("{}.former", former.id)))?;
        (0..former.volumes.len()).try_for_each(|volume| remove(&self.written_path(&former.id, volume)))
    }

    fn former_path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}{SUFFIX}"))
    }

    fn written_path(&self, id: &str, volume: usize) -> PathBuf {
        self.folder.join(format!("{id}.{volume}.written"))
    }
}
