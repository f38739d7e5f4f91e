//! The attaching of a volume at a host that does not have it: the order of the host that gives it.

use chronicle::Generation;
use serde::{Deserialize, Serialize};

use super::forms::{at_most, cut};
use super::opening::{Refusal, RefusalCode};
use super::{DETAIL_BYTES_MAX, NAME_BYTES_MAX, WireError};
use crate::identity::VolumeId;
use crate::journal::ExportAccess;

/// A volume that another host is to offer to its clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferedAttachment {
    /// The identity of the volume.
    pub volume: VolumeId,
    /// The name of the volume at both hosts.
    pub name: String,
    /// The volume's size in bytes.
    pub size_bytes: u64,
    /// The size of a block in bytes.
    pub block_size_bytes: u32,
    /// The present generation.
    pub generation: Generation,
    /// What clients may do there.
    pub access: ExportAccess,
}

#[derive(Serialize, Deserialize)]
pub(super) struct AttachmentForm {
    volume: [u8; 16],
    name: String,
    size_bytes: u64,
    block_size_bytes: u32,
    generation: u64,
    is_read_only: bool,
}

/// A refusal; the code is one of those of openings.
#[derive(Serialize, Deserialize)]
pub(super) struct RefusedForm {
    code: super::forms::CodeForm,
    detail: String,
}

impl AttachmentForm {
    pub(super) fn check(&self) -> Result<(), WireError> {
        at_most(self.name.len(), NAME_BYTES_MAX, "bytes of a name")?;
        // A block size is a power of two, and a volume is not empty.
        let fits = self.block_size_bytes.is_power_of_two() && self.size_bytes > 0;
        if fits { Ok(()) } else { Err(WireError::Malformed) }
    }
}

impl RefusedForm {
    pub(super) fn check(&self) -> Result<(), WireError> {
        at_most(self.detail.len(), DETAIL_BYTES_MAX, "bytes of an explanation")
    }
}

impl From<OfferedAttachment> for AttachmentForm {
    fn from(offered: OfferedAttachment) -> Self {
        Self {
            volume: offered.volume.0,
            name: offered.name,
            size_bytes: offered.size_bytes,
            block_size_bytes: offered.block_size_bytes,
            generation: offered.generation.0,
            is_read_only: offered.access == ExportAccess::ReadOnly,
        }
    }
}

impl From<AttachmentForm> for OfferedAttachment {
    fn from(form: AttachmentForm) -> Self {
        Self {
            volume: VolumeId(form.volume),
            name: words::clean(&form.name),
            size_bytes: form.size_bytes,
            block_size_bytes: form.block_size_bytes,
            generation: Generation(form.generation),
            access: if form.is_read_only { ExportAccess::ReadOnly } else { ExportAccess::ReadWrite },
        }
    }
}

impl From<Refusal> for RefusedForm {
    fn from(refusal: Refusal) -> Self {
        Self { code: refusal.code.into(), detail: cut(refusal.detail) }
    }
}

impl From<RefusedForm> for Refusal {
    fn from(form: RefusedForm) -> Self {
        Self { code: RefusalCode::from(form.code), detail: words::clean(&form.detail) }
    }
}
