//! `[stores.NAME.delay]` and `[stores.NAME.fault]`: slow a store down or make it fail, for tests and demonstrations. Such a
//! store must hold no valuable disk.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use block::device::ByteRange;
use block::filter::fault::{CERTAIN, FaultRule};
use block::filter::{DelaySwitch, FaultSwitch, Impairment, Operation, Operations};
use block::{IoError, device::ALIGNMENT};
use rustix::io::Errno;
use serde::Deserialize;

/// The longest delay of a request: above it everything that waits for a disk has given up.
const DELAY_US_MAX: u64 = 10_000_000;
/// The seed for faults with a probability, so that every run hits the same requests.
const SEED: u64 = 1;

/// The intended impairment of a store's requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImpairmentConfig {
    /// How the store is slowed down, if it is.
    pub delay: Option<DelayConfig>,
    /// Which requests fail, if any do.
    pub fault: Option<FaultConfig>,
}

/// How a store is slowed down. All of its volumes share the rates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DelayConfig {
    read: Duration,
    write: Duration,
    flush: Duration,
    bytes_per_second: Option<NonZeroU64>,
    operations_per_second: Option<NonZeroU64>,
}

/// Which requests to a store fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultConfig {
    operations: Vec<FaultyOperation>,
    error: FaultyError,
    probability: u32,
    after: u64,
    count: Option<u64>,
    range: Option<ByteRange>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FaultyOperation {
    Read,
    Write,
    Flush,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum FaultyError {
    #[default]
    Io,
    NoSpace,
}

/// Why the settings of an impairment are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImpairmentFault {
    /// A delay is too long.
    #[error("delay.{key} = {value} must be between 0 and {DELAY_US_MAX} microseconds")]
    TooLong {
        /// The key of the delay.
        key: &'static str,
        /// The delay as written.
        value: u64,
    },
    /// A number is 0 and must not be.
    #[error("{key} = 0 would let nothing through; leave it out for no limit")]
    Zero {
        /// The key of the number.
        key: &'static str,
    },
    /// The table of delays is empty.
    #[error(
        "delay is empty; set one of read_us, write_us, flush_us, bytes_per_second, operations_per_second, or remove it"
    )]
    NoDelay,
    /// No operation is named that fails.
    #[error("fault.operations is empty; name what fails: [\"read\", \"write\", \"flush\"]")]
    NoOperations,
    /// The probability is out of its range.
    #[error("fault.probability = {0} must be above 0 and at most 1")]
    Probability(String),
    /// Running out of space needs write operations.
    #[error("fault.error = \"no-space\" is for writes; leave the others out of fault.operations")]
    NoSpaceOfNoWrite,
    /// A range lacks its other half, or is not aligned to blocks.
    #[error(
        "fault.offset and fault.length belong together, and are multiples of {ALIGNMENT}; the length is not 0"
    )]
    Range,
}

/// The delays in their TOML form.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileDelay {
    read_us: u64,
    write_us: u64,
    flush_us: u64,
    bytes_per_second: Option<u64>,
    operations_per_second: Option<u64>,
}

/// The faults in their TOML form.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct FileFault {
    operations: Vec<FaultyOperation>,
    error: FaultyError,
    probability: Option<f64>,
    after: u64,
    count: Option<u64>,
    offset: Option<u64>,
    length: Option<u64>,
}

/// Checks both tables of a store; `None`: it has neither.
pub(super) fn check(
    delay: Option<FileDelay>,
    fault: Option<FileFault>,
) -> Result<Option<ImpairmentConfig>, ImpairmentFault> {
    let delay = delay.map(FileDelay::check).transpose()?;
    let fault = fault.map(FileFault::check).transpose()?;
    let is_impaired = delay.is_some() || fault.is_some();
    Ok(is_impaired.then_some(ImpairmentConfig { delay, fault }))
}

impl ImpairmentConfig {
    /// Returns the filters of the impairment, with counts and rates of their own.
    pub(crate) fn filters(&self) -> Impairment {
        Impairment {
            delay: self.delay.as_ref().map(DelayConfig::switch),
            fault: self.fault.as_ref().map(FaultConfig::switch),
        }
    }
}

impl DelayConfig {
    fn switch(&self) -> DelaySwitch {
        let switch = DelaySwitch::new();
        let changes = Operations::CHANGES;
        let latencies = [
            (Operations::of(&[Operation::Read]), self.read),
            (changes, self.write),
            (Operations::of(&[Operation::Flush]), self.flush),
        ];
        for (operations, latency) in latencies {
            switch.set_latency_of(operations, latency);
        }
        let data =
            Operations::of(&[Operation::Read, Operation::Write, Operation::Discard, Operation::WriteZeroes]);
        if let Some(rate) = self.bytes_per_second {
            switch.set_rate(data, rate);
        }
        if let Some(rate) = self.operations_per_second {
            switch.set_request_rate(data, rate);
        }
        switch
    }
}

impl FaultConfig {
    fn switch(&self) -> FaultSwitch {
        let switch = FaultSwitch::new(SEED);
        for operation in &self.operations {
            let (operations, name) = match operation {
                FaultyOperation::Read => (Operations::of(&[Operation::Read]), "read"),
                FaultyOperation::Write => (Operations::CHANGES, "write"),
                FaultyOperation::Flush => (Operations::of(&[Operation::Flush]), "flush"),
            };
            let errno = match self.error {
                FaultyError::Io => Errno::IO,
                FaultyError::NoSpace => Errno::NOSPC,
            };
            switch.add(FaultRule {
                range: self.range,
                after: self.after,
                probability: self.probability,
                count: self.count,
                ..FaultRule::always(operations, IoError::os(name, errno))
            });
        }
        switch
    }
}

impl fmt::Display for ImpairmentConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.delay, &self.fault) {
            (Some(delay), Some(fault)) => write!(f, "{delay}; {fault}"),
            (Some(delay), None) => delay.fmt(f),
            (None, Some(fault)) => fault.fmt(f),
            (None, None) => Ok(()),
        }
    }
}

impl fmt::Display for DelayConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let latencies = [("read", self.read), ("write", self.write), ("flush", self.flush)];
        let rates = [("bytes", self.bytes_per_second), ("requests", self.operations_per_second)].into_iter();
        let latencies = latencies.into_iter().filter(|(_, latency)| !latency.is_zero());
        let latencies = latencies.map(|(name, latency)| format!("{latency:?} more for each {name}"));
        let rates = rates.filter_map(|(name, rate)| Some(format!("at most {} {name} a second", rate?)));
        write!(f, "SLOWED on purpose: {}", latencies.chain(rates).collect::<Vec<_>>().join(", "))
    }
}

impl fmt::Display for FaultConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.operations.iter().map(|operation| match operation {
            FaultyOperation::Read => "reads",
            FaultyOperation::Write => "writes",
            FaultyOperation::Flush => "flushes",
        });
        write!(f, "FAULTY on purpose: {}", names.collect::<Vec<_>>().join(", "))?;
        match self.error {
            FaultyError::Io => write!(f, " fail")?,
            FaultyError::NoSpace => write!(f, " find no space")?,
        }
        if self.probability < CERTAIN {
            write!(f, " with a probability of {}", f64::from(self.probability) / f64::from(CERTAIN))?;
        }
        if let Some(range) = self.range {
            write!(f, " in the {} bytes from {} on", range.length, range.offset)?;
        }
        if self.after > 0 {
            write!(f, " after the first {}", self.after)?;
        }
        match self.count {
            None => Ok(()),
            Some(count) => write!(f, ", {count} times"),
        }
    }
}

impl FileDelay {
    fn check(self) -> Result<DelayConfig, ImpairmentFault> {
        let latency = |key, value| match value {
            0..=DELAY_US_MAX => Ok(Duration::from_micros(value)),
            value => Err(ImpairmentFault::TooLong { key, value }),
        };
        let checked = DelayConfig {
            read: latency("read_us", self.read_us)?,
            write: latency("write_us", self.write_us)?,
            flush: latency("flush_us", self.flush_us)?,
            bytes_per_second: not_zero("delay.bytes_per_second", self.bytes_per_second)?,
            operations_per_second: not_zero("delay.operations_per_second", self.operations_per_second)?,
        };
        let latencies = [checked.read, checked.write, checked.flush];
        let has_no_rate = checked.bytes_per_second.is_none() && checked.operations_per_second.is_none();
        if has_no_rate && latencies.iter().all(Duration::is_zero) {
            return Err(ImpairmentFault::NoDelay);
        }
        Ok(checked)
    }
}

impl FileFault {
    fn check(self) -> Result<FaultConfig, ImpairmentFault> {
        let Self { mut operations, error, probability, after, count, offset, length } = self;
        operations.dedup();
        if operations.is_empty() {
            return Err(ImpairmentFault::NoOperations);
        }
        if error == FaultyError::NoSpace && operations.iter().any(|name| *name != FaultyOperation::Write) {
            return Err(ImpairmentFault::NoSpaceOfNoWrite);
        }
        let probability = match probability {
            None => CERTAIN,
            Some(part) if part > 0.0 && part <= 1.0 => {
                ((part * f64::from(CERTAIN)).round() as u32).clamp(1, CERTAIN)
            }
            Some(other) => return Err(ImpairmentFault::Probability(other.to_string())),
        };
        let is_whole = |bytes: u64| bytes.is_multiple_of(u64::from(ALIGNMENT));
        let range = match (offset, length) {
            (None, None) => None,
            (Some(offset), Some(length)) if length > 0 && is_whole(offset) && is_whole(length) => {
                Some(ByteRange::new(offset, length.min(u64::MAX - offset)))
            }
            _ => return Err(ImpairmentFault::Range),
        };
        let count = not_zero("fault.count", count)?.map(NonZeroU64::get);
        Ok(FaultConfig { operations, error, probability, after, count, range })
    }
}

fn not_zero(key: &'static str, value: Option<u64>) -> Result<Option<NonZeroU64>, ImpairmentFault> {
    let checked = value.map(|value| NonZeroU64::new(value).ok_or(ImpairmentFault::Zero { key }));
    checked.transpose()
}
