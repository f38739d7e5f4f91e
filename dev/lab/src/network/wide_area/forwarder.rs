//! The thread between the two devices of a wide-area link.
//!
//! ```text
//!   device 0 ──read──► line 0 ──write──► device 1
//!   device 0 ◄─write── line 1 ◄──read─── device 1        orders (a channel, and an eventfd that wakes)
//! ```
//!
//! The thread sleeps until a device has a packet, a packet is due, or an order comes.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tun_rs::SyncDevice;

use super::conditions::Conditions;
use super::line::{Line, Pushed};
use super::packet::Packet;

/// Packets that are read from a device before the other one's turn.
const READ_BATCH: usize = 64;

#[derive(Clone, Copy, Debug)]
pub(super) enum Instruction {
    Change(Conditions),
    /// Drops everything that is on its way, and everything that comes.
    Cut,
    Restore,
    End,
}

/// An instruction, and the channel for its confirmation.
pub(super) type Told = (Instruction, SyncSender<()>);

/// The counts of packets by direction, which other threads may read.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) delivered_bytes: AtomicU64,
    pub(super) refused_packets: AtomicU64,
}

pub(super) struct Forwarder {
    devices: [SyncDevice; 2],
    lines: [Line; 2],
    is_cut: bool,
    instructions: Receiver<Told>,
    wake: Arc<OwnedFd>,
    counters: Arc<[Counters; 2]>,
    begun: Instant,
    /// Buffer for packets of still unknown length.
    scratch: Box<[u8]>,
}

impl Forwarder {
    pub(super) fn new(
        devices: [SyncDevice; 2],
        conditions: Conditions,
        instructions: Receiver<Told>,
        wake: Arc<OwnedFd>,
        counters: Arc<[Counters; 2]>,
    ) -> Self {
        // Each direction has random numbers of its own.
        let lines =
            [0, 1].map(|direction| Line::new(conditions, conditions.seed.wrapping_mul(2) + direction));
        let scratch = vec![0; Packet::BYTES_MAX].into();
        Self { devices, lines, is_cut: false, instructions, wake, counters, begun: Instant::now(), scratch }
    }

    /// Forwards until it is ordered to end. If a device fails, the link is dead.
    pub(super) fn run(mut self) -> io::Result<()> {
        // By default the kernel may wake a thread 50 us late: a fifth of the shortest emulated delay.
        rustix::thread::set_current_timer_slack(NonZeroU64::new(1))?;
        for device in &self.devices {
            rustix::io::ioctl_fionbio(device, true)?;
        }
        loop {
            if self.obey() == Next::End {
                return Ok(());
            }
            let mut is_more = false;
            for direction in [0, 1] {
                is_more |= self.take_in(direction)?;
                self.deliver(direction)?;
            }
            if !is_more {
                self.sleep()?;
            }
        }
    }

    fn obey(&mut self) -> Next {
        // Instructions are sent before the wake-up, so that none is left behind.
        while let Ok((instruction, done)) = self.instructions.try_recv() {
            let now = self.begun.elapsed();
            match instruction {
                Instruction::Change(conditions) => {
                    self.lines.iter_mut().for_each(|line| line.change(now, conditions));
                }
                Instruction::Cut => {
                    self.lines.iter_mut().for_each(Line::clear);
                    self.is_cut = true;
                }
                Instruction::Restore => self.is_cut = false,
                Instruction::End => return Next::End,
            }
            // The sender may have stopped waiting.
            let _ = done.send(());
        }
        Next::GoOn
    }

    /// Reads a batch; returns whether there may be more.
    fn take_in(&mut self, direction: usize) -> io::Result<bool> {
        for _ in 0..READ_BATCH {
            let length = match rustix::io::read(&self.devices[direction], &mut self.scratch[..]) {
                Ok(length) => length,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let packet = Packet::read(&self.scratch[..length]);
            if let (Some(packet), false) = (packet, self.is_cut) {
                let pushed = self.lines[direction].push(self.begun.elapsed(), packet);
                if pushed == Pushed::Refused {
                    self.counters[direction].refused_packets.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Ok(true)
    }

    fn deliver(&mut self, direction: usize) -> io::Result<()> {
        let now = self.begun.elapsed();
        while let Some(packet) = self.lines[direction].pop(now) {
            match rustix::io::write(&self.devices[1 - direction], packet.bytes()) {
                Ok(_) => {
                    let delivered = &self.counters[direction].delivered_bytes;
                    delivered.fetch_add(packet.wire_bytes(), Ordering::Relaxed);
                }
                // The interface is down, or the kernel has no room: the packet is lost, as networks may.
                Err(Errno::IO | Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM | Errno::INVAL) => {}
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn sleep(&self) -> io::Result<()> {
        let next = self.lines.iter().filter_map(Line::next).min();
        let pause = next.map(|next| next.saturating_sub(self.begun.elapsed()));
        if pause == Some(Duration::ZERO) {
            return Ok(());
        }
        let pause = pause.map(|pause| Timespec {
            tv_sec: i64::try_from(pause.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: pause.subsec_nanos().into(),
        });
        let [first, second] = &self.devices;
        let mut descriptors = [
            PollFd::new(first, PollFlags::IN),
            PollFd::new(second, PollFlags::IN),
            PollFd::new(&self.wake, PollFlags::IN),
        ];
        match poll(&mut descriptors, pause.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if descriptors[2].revents().contains(PollFlags::IN) {
            rustix::io::read(&self.wake, &mut [0; 8])?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    GoOn,
    End,
}
