//! A link without delay: a pair of veth interfaces, each shaped by a token bucket.
//!
//! ```text
//!   namespace a                                    namespace b
//!   program ► TCP ► tbf (rate, queue) ► veth ─────► veth ► TCP ► program      and the same the other way
//! ```

use std::time::Duration;

use super::Cut;
use super::commands::{ip, tc};
use super::error::NetworkError;
use super::hosts::{Addresses, End};
use super::rate::BitRate;

/// The least capacity of the bucket: two of the largest packets that TCP passes on at once. With less, each of them would be
/// split before it is sent, which costs processor time.
const BURST_BYTES_MIN: u64 = 128 << 10;
/// The bucket's capacity at higher rates: more would let through bursts that the link could not carry.
const BURST_TIME: Duration = Duration::from_millis(1);
/// The length of the queue before the bucket: the buffer of a small switch. Without delay TCP needs no more, and a deep queue
/// would make every round trip long.
const QUEUE_TIME: Duration = Duration::from_millis(10);

/// A link between two hosts with a fixed rate in each direction. Dropping it removes it.
#[derive(Debug)]
pub struct ShapedLink {
    ends: [End; 2],
    rate: BitRate,
    cut: Option<Cut>,
}

impl ShapedLink {
    pub(super) fn create(ends: [End; 2], rate: BitRate) -> Result<Self, NetworkError> {
        let [first, second] = &ends;
        let path = second.namespace.path();
        let path = path.to_string_lossy();
        let pair = ["link", "add", &first.interface, "type", "veth", "peer", "name", &second.interface];
        ip(&first.namespace, &[&pair[..], &["netns", &path]].concat())?;
        // From here on, dropping the link removes the pair.
        let link = Self { ends, rate, cut: None };
        for end in &link.ends {
            ip(&end.namespace, &["address", "add", &end.address_with_prefix(), "dev", &end.interface])?;
            shape(end, rate)?;
            ip(&end.namespace, &["link", "set", &end.interface, "up"])?;
        }
        Ok(link)
    }

    /// Returns the addresses of its ends.
    pub fn addresses(&self) -> Addresses {
        self.ends.each_ref().map(|end| end.address)
    }

    /// Returns the rate in each direction.
    pub fn rate(&self) -> BitRate {
        self.rate
    }

    /// Changes the rate; queued packets stay in the queue.
    pub fn set_rate(&mut self, rate: BitRate) -> Result<(), NetworkError> {
        self.rate = rate;
        if self.cut != Some(Cut::BlackHole) {
            self.ends.iter().try_for_each(|end| shape(end, rate))?;
        }
        Ok(())
    }

    /// Cuts the link; queued packets are lost. If it is already cut, changes the kind of the cut.
    pub fn cut(&mut self, cut: Cut) -> Result<(), NetworkError> {
        self.restore()?;
        self.cut = Some(cut);
        for end in &self.ends {
            match cut {
                Cut::Down => ip(&end.namespace, &["link", "set", &end.interface, "down"]),
                Cut::BlackHole => {
                    tc(&end.namespace, &["qdisc", "replace", "dev", &end.interface, "root", "blackhole"])
                }
            }?;
        }
        Ok(())
    }

    /// Restores the link after a cut.
    pub fn restore(&mut self) -> Result<(), NetworkError> {
        for end in &self.ends {
            match self.cut {
                None => {}
                Some(Cut::Down) => ip(&end.namespace, &["link", "set", &end.interface, "up"])?,
                Some(Cut::BlackHole) => shape(end, self.rate)?,
            }
        }
        self.cut = None;
        Ok(())
    }
}

impl Drop for ShapedLink {
    fn drop(&mut self) {
        // The other end is removed with it. If this fails, the namespaces' end removes both.
        let [first, _] = &self.ends;
        if let Err(error) = ip(&first.namespace, &["link", "delete", &first.interface]) {
            tracing::warn!(%error, "a link of the lab is not removed");
        }
    }
}

/// Puts a token bucket before an interface, or changes the rate of the present one.
fn shape(end: &End, rate: BitRate) -> Result<(), NetworkError> {
    let burst = rate.bytes_in(BURST_TIME).max(BURST_BYTES_MIN);
    let limit = burst + rate.bytes_in(QUEUE_TIME);
    let arguments = [
        ["qdisc", "replace", "dev", &end.interface, "root", "tbf"],
        [
            "rate",
            &format!("{}bit", rate.bits_per_second()),
            "burst",
            &burst.to_string(),
            "limit",
            &limit.to_string(),
        ],
    ];
    tc(&end.namespace, &arguments.concat())
}
