//! What a keeper is told, and what it answers.

use std::any::Any;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc;

use bytes::Bytes;
use chronicle::BlockRange;
use standby::asking::{Question, Word};
use standby::receiver::{PromoteOrder, Refusal};
use standby::wire::{StreamId, ToStandby};
use standby::{VolumeIndex, Watermark};
use tokio::sync::oneshot;

use super::cloning::CloneOrder;
use super::exported::Export;
use super::extents::Extents;
use super::view::CopyView;
use crate::standbys::frames::Line;

/// An input of a keeper.
pub(crate) enum Input {
    /// A message of the source. `credit` goes back to it when the message is done.
    Frame { line: Line, stream: StreamId, message: ToStandby, payload: Bytes, credit: Box<dyn Any + Send> },
    /// The source asks whether the image has contents with these hashes.
    Named(Box<Named>),
    /// Puts files of the store in the places of the images, which are empty.
    Seed {
        files: Vec<(VolumeIndex, PathBuf)>,
        /// What is known of the files; `None`: nothing.
        exported: Option<Carried>,
        answer: oneshot::Sender<Result<(), String>>,
    },
    /// The host that has the volumes asks whether they were promoted here.
    Question { question: Question, answer: oneshot::Sender<Word> },
    /// The source's host is not connected.
    Lost,
    /// An administrator orders to promote the standby.
    Promote { order: PromoteOrder, answer: oneshot::Sender<Result<Promoted, NotPromoted>> },
    /// A migration to this host, of this number, begins with the images: they get these names as well.
    Lend { migration: u64, to: Vec<PathBuf>, answer: oneshot::Sender<Result<(), String>> },
    /// That migration has ended. An error is tried again.
    EndLending { to: Vec<PathBuf>, end: LendingEnd, answer: oneshot::Sender<io::Result<()>> },
    /// Moves the images to these paths and closes them: they belong to volumes.
    Release { to: Vec<PathBuf>, answer: oneshot::Sender<io::Result<()>> },
    /// Makes a clone of a recovery point, for a test.
    Clone(CloneOrder),
    /// The thread of the clone of this number has copied the images, and asks for what was overwritten meanwhile.
    Copied { number: u64, answer: mpsc::Sender<io::Result<Vec<Extents>>> },
    /// That clone is complete, or has failed.
    Cloned { number: u64, result: Result<(), String> },
    /// The clone that is being made is not wanted any more.
    EndClone,
    /// Asks which blocks of a volume, from `first` on, have contents with these hashes.
    Compare {
        volume: VolumeIndex,
        first: u64,
        hashes: Bytes,
        answer: oneshot::Sender<io::Result<Vec<(u64, u64)>>>,
    },
    /// Asks for the present state.
    Look { answer: oneshot::Sender<CopyView> },
    /// Ends the keeper, and closes its files first.
    End(Ending, oneshot::Sender<()>),
}

/// Files that are those of an exported folder, if their hashes say so.
pub(crate) struct Carried {
    pub(crate) export: Export,
    /// The state of all images; `None`: it is of another standby, or not of all volumes.
    pub(crate) at: Option<Watermark>,
}

/// Contents that the source names.
pub(crate) struct Named {
    pub(crate) line: Line,
    pub(crate) stream: StreamId,
    /// The number of the question.
    pub(crate) number: u64,
    pub(crate) volume: VolumeIndex,
    pub(crate) blocks: BlockRange,
    pub(crate) hashes: Bytes,
    /// Whether what is found counts as sent; else it is only compared.
    pub(crate) is_taken: bool,
    /// Goes back to the source when the question is answered.
    pub(crate) credit: Box<dyn Any + Send>,
}

/// A standby that was promoted, and whose volumes this host owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Promoted {
    pub(crate) at: Watermark,
}

/// Why a standby was not promoted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotPromoted {
    /// The order was refused.
    Refused(Refusal),
    /// Something failed; the text says what.
    Failed(String),
}

/// Why a keeper ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The standby is removed.
    Removed,
    /// The daemon ends in order.
    InOrder,
}

/// How a migration has ended that began with the images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LendingEnd {
    /// The images are those of volumes of this host.
    UsedUp,
    /// It has failed. The images have lost their other names.
    GivenBack,
}
