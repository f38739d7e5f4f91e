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

/// What the bucket holds at least: two of the largest packets that TCP hands down at once. With less, each of them would
/// have to be cut up before it is sent, at the cost of processor time that is not the link's.
const BURST_BYTES_MIN: u64 = 128 << 10;
/// What the bucket holds at higher rates: more would let through bursts that the link could not carry.
const BURST_TIME: Duration = Duration::from_millis(1);
/// What waits before the bucket: the buffer of a small switch. Over a link without delay TCP needs no more, and a deep
/// queue would make every round trip long.
const QUEUE_TIME: Duration = Duration::from_millis(10);

/// A link between two hosts that carries so much and no more, each way. Dropping it removes it.
#[derive(Debug)]
pub struct ShapedLink {
    ends: [End; 2],
    rate: BitRate,
    /// How it is cut at present.
    cut: Option<Cut>,
}

impl ShapedLink {
    /// Makes the interfaces, gives them addresses and shapes them.
    pub(super) fn create(ends: [End; 2], rate: BitRate) -> Result<Self, NetworkError> {
        let [first, second] = &ends;
        let path = second.namespace.path();
        let path = path.to_string_lossy();
        let pair = ["link", "add", &first.interface, "type", "veth", "peer", "name", &second.interface];
        ip(&first.namespace, &[&pair[..], &["netns", &path]].concat())?;
        // From here on dropping it removes the pair.
        let link = Self { ends, rate, cut: None };
        for end in &link.ends {
            ip(&end.namespace, &["address", "add", &end.address_with_prefix(), "dev", &end.interface])?;
            shape(end, rate)?;
            ip(&end.namespace, &["link", "set", &end.interface, "up"])?;
        }
        Ok(link)
    }

    /// The addresses of its ends.
    pub fn addresses(&self) -> Addresses {
        self.ends.each_ref().map(|end| end.address)
    }

    /// What it carries each way.
    pub fn rate(&self) -> BitRate {
        self.rate
    }

    /// Lets it carry more or less from now on; what waits goes on waiting.
    ///
    /// # Errors
    /// What the system says.
    pub fn set_rate(&mut self, rate: BitRate) -> Result<(), NetworkError> {
        self.rate = rate;
        if self.cut != Some(Cut::BlackHole) {
            self.ends.iter().try_for_each(|end| shape(end, rate))?;
        }
        Ok(())
    }

    /// Cuts it; what waits is lost. One that is cut already is cut in the other way.
    ///
    /// # Errors
    /// What the system says.
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

    /// Lets it carry again.
    ///
    /// # Errors
    /// What the system says.
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
        // The other end goes with it. If it cannot be removed, it goes with the namespaces.
        let [first, _] = &self.ends;
        if let Err(error) = ip(&first.namespace, &["link", "delete", &first.interface]) {
            tracing::warn!(%error, "a link of the lab is not removed");
        }
    }
}

/// Puts a token bucket before an interface, or gives the one that is there another rate.
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
