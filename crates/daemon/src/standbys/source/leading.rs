//! Where the streams of a standby lead: to its host, or to a folder while it is exported.

use futures_channel::mpsc as lanes;
use lane::peer::ChannelEvent;
use standby::Watermark;
use standby::wire::{Answer, RefusedBecause, ToOwner};

use super::run::{Running, SourceLine};
use super::{Source, Surroundings};
use crate::standbys::book::SourceConfig;
use crate::standbys::frames::{Purpose, subject};

impl Source {
    /// Opens the line of its streams. The error says what is waited for.
    pub(super) fn open_line(
        &self,
        with: &Surroundings,
    ) -> Result<(SourceLine, lanes::UnboundedReceiver<ChannelEvent>), String> {
        let own = with.peers.own();
        let subject = subject(self.standby(), own, Purpose::Streams);
        if let Some(detour) = self.detour() {
            return Ok(detour.line(subject.channel(own)));
        }
        let session = with.hosts.session_with(self.host()).map_err(|error| error.to_string())?;
        Ok(with.peers.standby_channel(&session, subject))
    }

    /// Returns the configuration of its streams: what holds for the link does not hold for a folder.
    pub(super) fn streamed(&self) -> SourceConfig {
        let config = self.config();
        match self.detour() {
            Some(_) => SourceConfig { is_paused: false, bandwidth: None, ..config },
            None => config,
        }
    }

    /// Ends an export whose folder has no room.
    pub(super) fn hear_of_room(&self, message: &ToOwner) {
        if let (Some(detour), ToOwner::Refused { reason }) = (self.detour(), message) {
            detour.refuse(match reason {
                RefusedBecause::NoSpace => "the file system of the folder is full, or nearly so".to_owned(),
                RefusedBecause::CannotGrow => "its file system cannot hold so large a file".to_owned(),
                RefusedBecause::BaseMissing => "what it had is gone".to_owned(),
            });
        }
    }
}

impl Running<'_> {
    /// Returns whether the standby's host has the state that was exported, and had nothing when the group began. The group begins
    /// anew then, with what was recorded since.
    pub(super) fn has_arrived(&self, message: &ToOwner) -> bool {
        let ToOwner::Answer(Answer::Receiving { watermark: Some(Watermark { life, epoch, .. }), .. }) =
            message
        else {
            return false;
        };
        let is_recorded = self.group.look(|machine, _| {
            let record = machine.record();
            let is_known = record.acknowledged.is_some_and(|acknowledged| acknowledged <= *epoch);
            machine.lacks_everything()
                && record.life == *life
                && is_known
                && *epoch <= record.numbered_through
        });
        self.naming.has_had_nothing() && is_recorded == Some(true)
    }
}
