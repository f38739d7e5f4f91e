//! Classifies a peer's message in the terms of [`migration::authority`].

use migration::VolumeId;
use migration::VolumeIndex;
use migration::authority::Request;
use migration::wire::{self, Message};

use super::head::{Address, Head, Operation};

/// A peer's request on the channel of a migration, or of clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// No request: it is an answer.
    Nothing,
    /// A call with this number.
    Call(u64, Request),
    /// A message of a handover.
    Message(Request),
    /// A message that cannot be decoded.
    Garbled,
}

impl Asked {
    /// Returns the request in this head and payload.
    pub fn by(head: &[u8], payload: &[u8]) -> Self {
        match Head::decode(head) {
            Ok(
                Head::Call { call, address, operation } | Head::FencedCall { call, address, operation, .. },
            ) => Self::Call(call, request(address, operation)),
            Ok(Head::Answer { .. }) => Self::Nothing,
            Ok(Head::Message) => match wire::decode(payload) {
                Ok(Message::ToTarget { migration, .. }) => Self::Message(Request::ToTarget(migration)),
                Ok(Message::ToSource { migration, .. }) => Self::Message(Request::ToSource(migration)),
                _ => Self::Garbled,
            },
            Err(_) => Self::Garbled,
        }
    }
}

fn request(address: Address, operation: Operation) -> Request {
    match address {
        Address::Replica(index) | Address::ReplicaInBulk(index) => Request::Store(VolumeIndex(index)),
        Address::Reservoir(index) | Address::ReservoirInBackground(index) => {
            Request::Reservoir(VolumeIndex(index))
        }
        Address::Copies(index) => Request::Copies(VolumeIndex(index)),
        Address::Owner(id) => match operation {
            Operation::Write { .. } | Operation::Discard { .. } | Operation::WriteZeroes { .. } => {
                Request::Change(VolumeId(id))
            }
            _ => Request::Volume(VolumeId(id)),
        },
    }
}
