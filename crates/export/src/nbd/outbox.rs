//! Replies that wait to be sent, a few in one send.

use std::collections::VecDeque;

use block::engine::SEND_PIECES_MAX;
use block::{Buffer, BufferPool};

use crate::nbd::export::ReplyStyle;
use crate::nbd::reply::{CHUNKS_MAX, Headers, Reply, Segment, encode_reply};

/// Bytes of headers in one batch: two hundred replies.
const HEADERS_LENGTH: usize = 8192;
/// Replies in one send. A client that gets many at once handles all of them before its next request, and meanwhile the disk is
/// idle. A separate send for each would cost more than that gains.
const REPLIES_MAX: usize = 4;
/// Segments from which on no further reply is added to a batch. Each may be two pieces, and one more reply may add
/// [`CHUNKS_MAX`] segments.
const SEGMENTS_MAX: usize = SEND_PIECES_MAX / 2 - CHUNKS_MAX;

pub(super) struct Outbox {
    style: ReplyStyle,
    queue: VecDeque<Reply>,
    /// Memory of the last batch's headers; free again when that has been sent.
    headers: Option<Buffer>,
    /// Kept for its capacity.
    segments: Vec<Segment>,
}

pub(super) struct Batch {
    pub(super) pieces: Vec<Buffer>,
    pub(super) weight: Weight,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Weight {
    pub(super) replies: usize,
    pub(super) reserved: usize,
}

impl Outbox {
    pub(super) fn new(style: ReplyStyle) -> Self {
        Self { style, queue: VecDeque::new(), headers: None, segments: Vec::new() }
    }

    pub(super) fn push(&mut self, reply: Reply) {
        self.queue.push_back(reply);
    }

    /// Drops all replies, and returns their reservations.
    pub(super) fn clear(&mut self) -> Weight {
        let reserved = self.queue.iter().map(|reply| reply.reserved).sum();
        let weight = Weight { replies: self.queue.len(), reserved };
        self.queue.clear();
        weight
    }

    pub(super) fn next_batch(&mut self, pool: &BufferPool) -> Option<Batch> {
        if self.queue.is_empty() {
            return None;
        }
        let free = self.headers.take().filter(Buffer::is_unique);
        let mut headers = free.unwrap_or_else(|| pool.take(HEADERS_LENGTH));
        let mut weight = Weight::default();
        // It is the only handle to its memory, so there always is a slice.
        let mut encoded = Headers::new(headers.as_mut_slice().unwrap_or_default());
        while weight.replies < REPLIES_MAX && self.segments.len() < SEGMENTS_MAX && encoded.has_room() {
            let Some(reply) = self.queue.pop_front() else { break };
            weight.replies += 1;
            weight.reserved += reply.reserved;
            encode_reply(reply, self.style, &mut encoded, &mut self.segments);
        }
        let pieces = gather(&headers, &mut self.segments);
        self.headers = Some(headers);
        Some(Batch { pieces, weight })
    }
}

/// Puts headers and data in order; headers without data between them become one piece.
fn gather(headers: &Buffer, segments: &mut Vec<Segment>) -> Vec<Buffer> {
    let mut pieces = Vec::with_capacity(2 * segments.len());
    let (mut start, mut end) = (0, 0);
    for Segment { headers_end, data } in segments.drain(..) {
        end = headers_end;
        if let Some(data) = data {
            pieces.push(headers.slice(start, end - start));
            start = end;
            if !data.is_empty() {
                pieces.push(data);
            }
        }
    }
    if end > start {
        pieces.push(headers.slice(start, end - start));
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::reply::Body;
    use crate::nbd::transmission::Framing;

    fn reply(cookie: u64, body: Body) -> Reply {
        Reply { cookie, offset: 0, reserved: 10, body }
    }

    #[test]
    fn replies_without_data_share_a_piece_and_data_is_not_copied() {
        let pool = BufferPool::new();
        let mut outbox = Outbox::new(ReplyStyle::Simple);
        assert!(outbox.next_batch(&pool).is_none());
        let data = Buffer::copy_of(&[7; 512]);
        let address = data.as_ptr();
        outbox.push(reply(1, Body::Done));
        outbox.push(reply(2, Body::Data { offset: 0, data, framing: Framing::Whole }));
        outbox.push(reply(3, Body::Done));
        outbox.push(reply(4, Body::Done));
        let batch = outbox.next_batch(&pool).unwrap();
        let lengths: Vec<_> = batch.pieces.iter().map(Buffer::len).collect();
        assert_eq!(lengths, [32, 512, 32]);
        assert_eq!(batch.pieces[1].as_ptr(), address);
        assert_eq!((batch.weight.replies, batch.weight.reserved), (4, 40));
    }

    #[test]
    fn a_batch_has_few_replies_and_keeps_their_order() {
        let pool = BufferPool::new();
        let mut outbox = Outbox::new(ReplyStyle::Simple);
        let replies_in = REPLIES_MAX as u64 * 2 + 1;
        (0..replies_in).for_each(|cookie| outbox.push(reply(cookie, Body::Done)));
        let mut cookies = Vec::new();
        while let Some(batch) = outbox.next_batch(&pool) {
            assert!(batch.weight.replies <= REPLIES_MAX);
            for reply in batch.pieces.iter().flat_map(|piece| piece.as_slice().chunks_exact(16)) {
                cookies.push(u64::from_be_bytes(reply[8..].try_into().unwrap()));
            }
        }
        assert_eq!(cookies, (0..replies_in).collect::<Vec<_>>());
    }

    #[test]
    fn a_batch_never_has_more_pieces_than_a_send_takes() {
        let pool = BufferPool::new();
        let mut outbox = Outbox::new(ReplyStyle::Structured);
        let mut striped = Buffer::zeroed(CHUNKS_MAX * (64 << 10));
        for stripe in (0..CHUNKS_MAX).step_by(2) {
            striped.as_mut_slice().unwrap()[stripe * (64 << 10)] = 1;
        }
        let replies_in = 300;
        for cookie in 0..replies_in {
            let data = if cookie % 3 == 0 { striped.clone() } else { Buffer::copy_of(&[1; 100]) };
            outbox.push(reply(cookie, Body::Data { offset: 0, data, framing: Framing::Chunks }));
        }
        let mut replies_out = 0;
        while let Some(batch) = outbox.next_batch(&pool) {
            assert!(batch.pieces.len() <= SEND_PIECES_MAX);
            assert!(batch.pieces.iter().all(|piece| !piece.is_empty()));
            replies_out += batch.weight.replies as u64;
        }
        assert_eq!(replies_out, replies_in);
    }
}
