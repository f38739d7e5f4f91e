//! A link with delay and loss: a wide-area network in user space.
//!
//! ```text
//!   namespace a                                            namespace b
//!   program ► TCP ► TUN ──► a thread, with a Line each way ──► TUN ► TCP ► program
//! ```
//!
//! The kernel's own emulator (netem) is missing on some VMs, which cannot load it either. TUN devices are everywhere.

mod conditions;
mod forwarder;
mod line;
mod packet;

pub use self::conditions::{Conditions, Order};

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use tun_rs::{DeviceBuilder, SyncDevice};

use self::forwarder::{Counters, Forwarder, Instruction, Told};
use super::Cut;
use super::commands::ip;
use super::error::NetworkError;
use super::hosts::{Addresses, End};

const MTU: u16 = 1500;
/// Packets that wait for the thread to read them. The default of 500 would be full after 6 ms of a gigabit in single packets. The
/// thread may have to wait as long for a processor.
const DEVICE_QUEUE_PACKETS: u32 = 10_000;
/// TCP passes on at most what the wire carries in this time, so that a slow link does not carry bursts.
const SEGMENTATION_TIME: Duration = Duration::from_millis(1);
/// The kernel's limit of bytes in one packet of segments.
const SEGMENTATION_BYTES_MAX: u64 = 65_536;
/// The kernel's limit of segments in one packet.
const SEGMENTS_MAX: u64 = 65_535;

/// A link between two hosts with rate, delay, jitter and loss. Dropping it removes it.
#[derive(Debug)]
pub struct WideAreaLink {
    ends: [End; 2],
    conditions: Conditions,
    cut: Option<Cut>,
    instructions: Sender<Told>,
    wake: Arc<OwnedFd>,
    counters: Arc<[Counters; 2]>,
    /// `None` once it has been joined.
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

/// The traffic of a link in one direction since its creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Bytes of IP packets that arrived.
    pub bytes: u64,
    /// Packets that were dropped at a full queue. One can stand for up to 64 KiB of segments.
    pub refused_packets: u64,
}

impl WideAreaLink {
    pub(super) fn create(ends: [End; 2], conditions: Conditions) -> Result<Self, NetworkError> {
        let [first, second] = &ends;
        let devices = [device(first)?, device(second)?];
        for end in &ends {
            ip(&end.namespace, &["address", "add", &end.address_with_prefix(), "dev", &end.interface])?;
            limit_segmentation(end, conditions)?;
            ip(&end.namespace, &["link", "set", &end.interface, "up"])?;
        }
        let (instructions, receiver) = channel();
        let wake = eventfd(0, EventfdFlags::CLOEXEC).map_err(NetworkError::system("make an eventfd"))?;
        let wake = Arc::new(wake);
        let counters = Arc::<[Counters; 2]>::default();
        let forwarder =
            Forwarder::new(devices, conditions, receiver, Arc::clone(&wake), Arc::clone(&counters));
        let thread = std::thread::Builder::new()
            .name("wide-area".to_owned())
            .spawn(|| forwarder.run())
            .map_err(NetworkError::system("start a thread"))?;
        Ok(Self { ends, conditions, cut: None, instructions, wake, counters, thread: Some(thread) })
    }

    /// Returns the addresses of its ends.
    pub fn addresses(&self) -> Addresses {
        self.ends.each_ref().map(|end| end.address)
    }

    /// Returns the conditions for packets.
    pub fn conditions(&self) -> Conditions {
        self.conditions
    }

    /// Returns the traffic from the first host to the second, and back.
    pub fn carried(&self) -> [Carried; 2] {
        self.counters.each_ref().map(|counters| Carried {
            bytes: counters.delivered_bytes.load(Ordering::Relaxed),
            refused_packets: counters.refused_packets.load(Ordering::Relaxed),
        })
    }

    /// Changes the conditions for packets that are not on the wire yet. The seed of a link does not change. Fails with
    /// [`NetworkError::EmulatorEnded`] if the thread has ended.
    pub fn change(&mut self, conditions: Conditions) -> Result<(), NetworkError> {
        self.ends.iter().try_for_each(|end| limit_segmentation(end, conditions))?;
        self.tell(Instruction::Change(conditions))?;
        self.conditions = conditions;
        Ok(())
    }

    /// Cuts the link; packets on their way are lost. If it is already cut, changes the kind of the cut.
    pub fn cut(&mut self, cut: Cut) -> Result<(), NetworkError> {
        self.restore()?;
        self.cut = Some(cut);
        self.tell(Instruction::Cut)?;
        match cut {
            Cut::Down => self.set_interfaces("down"),
            Cut::BlackHole => Ok(()),
        }
    }

    /// Restores the link after a cut.
    pub fn restore(&mut self) -> Result<(), NetworkError> {
        if self.cut == Some(Cut::Down) {
            self.set_interfaces("up")?;
        }
        if self.cut.is_some() {
            self.tell(Instruction::Restore)?;
        }
        self.cut = None;
        Ok(())
    }

    fn set_interfaces(&self, state: &str) -> Result<(), NetworkError> {
        self.ends.iter().try_for_each(|end| ip(&end.namespace, &["link", "set", &end.interface, state]))
    }

    /// Sends an instruction to the thread, and waits until it is carried out.
    fn tell(&self, instruction: Instruction) -> Result<(), NetworkError> {
        let (done, is_done) = sync_channel(1);
        self.instructions.send((instruction, done)).map_err(|_| NetworkError::EmulatorEnded)?;
        rustix::io::write(&self.wake, &1_u64.to_ne_bytes())
            .map_err(NetworkError::system("wake the thread of a link"))?;
        is_done.recv().map_err(|_| NetworkError::EmulatorEnded)
    }
}

impl Drop for WideAreaLink {
    fn drop(&mut self) {
        // The thread ends upon this, or has already ended.
        let _ = self.tell(Instruction::End);
        // The devices are removed with the thread.
        match self.thread.take().map(JoinHandle::join) {
            None | Some(Ok(Ok(()))) => {}
            Some(Ok(Err(error))) => {
                tracing::warn!(%error, "the emulator of a wide-area link ended by itself");
            }
            Some(Err(_)) => tracing::warn!("the emulator of a wide-area link panicked"),
        }
    }
}

/// Makes the device of an end, which is still down.
fn device(end: &End) -> Result<SyncDevice, NetworkError> {
    let made = end.namespace.run(|| {
        DeviceBuilder::new()
            .name(&end.interface)
            .mtu(MTU)
            .tx_queue_len(DEVICE_QUEUE_PACKETS)
            .offload(true)
            .enable(false)
            .build_sync()
    })?;
    made.map_err(|source| NetworkError::NoTun { source })
}

/// Limits how much TCP may pass on at once. Random losses affect single packets, so with losses each must come alone.
fn limit_segmentation(end: &End, conditions: Conditions) -> Result<(), NetworkError> {
    let bytes = conditions.rate.bytes_in(SEGMENTATION_TIME).clamp(MTU.into(), SEGMENTATION_BYTES_MAX);
    let segments = if conditions.lost_per_million > 0 { 1 } else { SEGMENTS_MAX };
    let (bytes, segments) = (bytes.to_string(), segments.to_string());
    ip(&end.namespace, &["link", "set", &end.interface, "gso_max_size", &bytes, "gso_max_segs", &segments])
}
