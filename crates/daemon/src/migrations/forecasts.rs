//! What earlier migrations have shown of each way from store to store, in one file of the data folder.
//!
//! No decision about the owner of a volume depends on it: a file that is lost or cannot be read costs the precision of forecasts.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use api::{Expected, Migration, MigrationState};
use forecast::{Forecast, Origin, Range, Route, Sample};
use serde::{Deserialize, Serialize};

use crate::files::whole_file;

const FILE: &str = "ways.json";
/// The version of the file; other versions are ignored.
const VERSION: u32 = 1;
/// The longest file that is read: many times the usual length.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// How many ways are remembered: those used last.
const WAYS_MAX: usize = 200;

/// A way that migrations take. Copies that give way to guests are another way than those at full speed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Way(String);

impl Way {
    /// Returns the way from a store of this host to a store here, or to `HOST:STORE`.
    pub(crate) fn new(from: &str, to: &str, gives_way: bool) -> Self {
        Self(format!("{from} > {to}{}", if gives_way { ", guests first" } else { "" }))
    }
}

#[derive(Debug)]
pub(crate) struct Forecasts {
    path: PathBuf,
    ways: Mutex<BTreeMap<String, Known>>,
    /// Held while the file is written, so that it is as new as the memory.
    writing: Mutex<()>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Known {
    /// The order in which ways were used.
    used: u64,
    route: Route,
}

#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    ways: BTreeMap<String, Known>,
}

impl Forecasts {
    pub(crate) fn open(data_dir: &Path) -> Self {
        let path = data_dir.join(FILE);
        let ways = read(&path).unwrap_or_else(|error| {
            tracing::warn!(path = %path.display(), %error, "cannot read what earlier migrations have shown: forecasts begin anew");
            BTreeMap::new()
        });
        Self { path, ways: Mutex::new(ways), writing: Mutex::default() }
    }

    /// Returns what is known of a way.
    pub(crate) fn of(&self, way: &Way) -> Route {
        self.lock().get(&way.0).map(|known| known.route.clone()).unwrap_or_default()
    }

    /// Remembers what an ended migration has shown of its way. May block.
    pub(crate) fn learn(&self, way: &Way, sample: Sample) {
        {
            let mut ways = self.lock();
            let used = ways.values().map(|known| known.used).max().unwrap_or_default() + 1;
            let known = ways.entry(way.0.clone()).or_default();
            known.used = used;
            known.route.learn(sample);
            while ways.len() > WAYS_MAX {
                let oldest = ways.iter().min_by_key(|(_, known)| known.used).map(|(way, _)| way.clone());
                oldest.and_then(|oldest| ways.remove(&oldest));
            }
        }
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let stored = Stored { version: VERSION, ways: self.lock().clone() };
        let written = serde_json::to_vec(&stored)
            .map_err(io::Error::from)
            .and_then(|content| whole_file::replace(&self.path, &content));
        if let Err(error) = written {
            tracing::warn!(path = %self.path.display(), %error, "cannot keep what a migration has shown");
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Known>> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(path: &Path) -> io::Result<BTreeMap<String, Known>> {
    let Some(content) = whole_file::read(path, FILE_BYTES_MAX)? else { return Ok(BTreeMap::new()) };
    let stored: Stored = serde_json::from_slice(&content)?;
    if stored.version == VERSION { Ok(stored.ways) } else { Ok(BTreeMap::new()) }
}

/// Returns what an ended migration shows of its way; `None`: nothing, because it was not left alone.
pub(crate) fn shown_by(ended: &Migration, load: f64, was_limited: bool) -> Option<Sample> {
    let memory = ended.machine.as_ref().and_then(|machine| machine.memory.as_ref());
    let bytes = ended.bytes_moved + memory.map_or(0, |memory| memory.sent_bytes);
    let was_alone = ended.state == MigrationState::Moved && !was_limited && ended.retry_of.is_none();
    let forecast = ended.forecast.map(|forecast| forecast.seconds.middle);
    // Cloned bytes say nothing about the disks.
    let was_alone = was_alone && ended.bytes_cloned == 0;
    was_alone.then(|| Sample::of(bytes, ended.seconds, load, forecast)).flatten()
}

/// Describes a forecast for the API.
pub(crate) fn forecast_shown(forecast: &Forecast, probed: bool) -> api::Forecast {
    let range = |range: Range, unit: f64| Expected {
        least: range.least * unit,
        middle: range.middle * unit,
        most: range.most * unit,
    };
    api::Forecast {
        seconds: range(forecast.seconds, 1.0),
        bytes: range(forecast.bytes, 1.0),
        downtime_ms: range(forecast.downtime, 1000.0),
        // Between 0 and 100.
        ends_percent: (forecast.ends * 100.0).round() as u8,
        learned_from: match forecast.origin {
            Origin::Learned(count) => u32::try_from(count).unwrap_or(u32::MAX),
            Origin::Rate => 0,
        },
        probed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(seconds: f64) -> Sample {
        Sample::of(100 << 20, seconds, 0.0, Some(1.0)).unwrap()
    }

    #[test]
    fn what_was_learned_is_there_after_a_restart_and_ways_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let (there, back) = (Way::new("a", "b", false), Way::new("b", "a", false));
        let known = Forecasts::open(folder.path());
        known.learn(&there, sample(2.0));
        known.learn(&there, sample(4.0));
        let again = Forecasts::open(folder.path());
        assert_eq!(again.of(&there), known.of(&there));
        assert!(again.of(&there).rate().is_some());
        assert_eq!(again.of(&back).rate(), None);
        assert_eq!(again.of(&Way::new("a", "b", true)).rate(), None);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_begun_anew_and_the_oldest_ways_are_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), b"{\"version\":1,\"ways\":[").unwrap();
        let known = Forecasts::open(folder.path());
        let way = |number: usize| Way::new("a", &number.to_string(), false);
        for number in 0..=WAYS_MAX {
            known.learn(&way(number), sample(1.0));
        }
        assert_eq!(known.of(&way(0)).rate(), None);
        assert!(Forecasts::open(folder.path()).of(&way(WAYS_MAX)).rate().is_some());
    }
}
