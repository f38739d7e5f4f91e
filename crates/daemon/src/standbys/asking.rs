//! Questions to the other host of a standby.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use lane::peer::ChannelEvent;
use migration::HostId;
use standby::StandbyId;
use transport::Priority;

use super::frames::{ANSWER_MAX, Answered, Ask, Frame, Purpose, cleaned, subject};
use super::turns::Turns;
use crate::error::{RequestError, StandbyError};
use crate::hosts::Hosts;
use crate::peers::Peers;
use crate::volumes::orders::create::random_number;

/// Asks hosts about standbys, one question of each host at a time: two would take each other's answers.
#[derive(Clone)]
pub(super) struct Asker {
    hosts: Arc<Hosts>,
    peers: Arc<Peers>,
    turns: Arc<Turns>,
}

impl Asker {
    pub(super) fn new(hosts: &Arc<Hosts>, peers: &Arc<Peers>) -> Self {
        Self { hosts: Arc::clone(hosts), peers: Arc::clone(peers), turns: Arc::default() }
    }

    /// Asks the other host of a standby, and waits for its answer.
    pub(super) async fn ask(
        &self,
        host: HostId,
        standby: StandbyId,
        ask: Ask,
        payload: Bytes,
    ) -> Result<Answered, RequestError> {
        let session = self.hosts.session_with(host)?;
        let _turn = self.turns.of(host).await;
        let (name, number) = (self.hosts.name_of(host), random_number());
        let subject = subject(standby, self.peers.own(), Purpose::Asks);
        let (line, mut arrivals) = self.peers.standby_channel(&session, subject);
        line.send(Priority::Bulk, Frame::Ask(number, ask).encode(), payload);
        let answered = async {
            while let Some(arrival) = arrivals.next().await {
                let ChannelEvent::Message { head, .. } = arrival else { continue };
                match Frame::decode(&head) {
                    Some(Frame::Answer(answered, answer)) if answered == number => return Some(answer),
                    _ => {}
                }
            }
            None
        };
        match tokio::time::timeout(ANSWER_MAX, answered).await {
            Ok(Some(Ok(answer))) => Ok(answer),
            Ok(Some(Err(reason))) => {
                let reason = cleaned(&reason);
                Err(StandbyError::Refused { host: name, reason }.into())
            }
            Ok(None) | Err(_) => {
                Err(StandbyError::NoAnswer { host: name, seconds: ANSWER_MAX.as_secs() }.into())
            }
        }
    }
}
