//! When volumes were served here last, also by a daemon before this one.
//!
//! One small file in the folder of sockets is replaced every second without being flushed: it is of no use after a boot of the host,
//! and says so itself.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use migration::VolumeId;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::files::whole_file;

const NAME: &str = ".served.json";
const BYTES_MAX: u64 = 16 << 20;

/// When each volume was served last, in milliseconds since the host has booted.
#[derive(Debug, Default)]
pub(super) struct Served {
    path: PathBuf,
    boot: String,
    at_ms: BTreeMap<String, u64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Noted {
    boot: String,
    at_ms: BTreeMap<String, u64>,
}

impl Served {
    /// Reads what a daemon before this one has noted, if the host has not booted since.
    pub(super) fn open(folder: &Path) -> Self {
        let path = folder.join(NAME);
        // Without it nothing is known to be of this boot.
        let boot = crate::boot::identity().unwrap_or_default();
        let noted = read(&path).ok().flatten().filter(|noted| !boot.is_empty() && noted.boot == boot);
        Self { path, at_ms: noted.map(|noted| noted.at_ms).unwrap_or_default(), boot }
    }

    /// Returns how long ago a volume was served; `None`: not since the host has booted, or it is not known.
    pub(super) fn away(&self, volume: VolumeId) -> Option<Duration> {
        let at_ms = *self.at_ms.get(&volume.to_string())?;
        // N.B. A time that has not come yet is not of this host.
        now_ms().checked_sub(at_ms).map(Duration::from_millis)
    }

    /// Notes that volumes are served now.
    pub(super) fn note(&mut self, volumes: impl IntoIterator<Item = VolumeId>) {
        let now_ms = now_ms();
        self.at_ms.extend(volumes.into_iter().map(|volume| (volume.to_string(), now_ms)));
    }

    /// Forgets volumes that have no standby.
    pub(super) fn keep_only(&mut self, volumes: &[VolumeId]) {
        let kept: Vec<String> = volumes.iter().map(VolumeId::to_string).collect();
        self.at_ms.retain(|volume, _| kept.contains(volume));
    }

    /// Returns what is to be written, and where.
    pub(super) fn written(&self) -> (PathBuf, Vec<u8>) {
        let noted = Noted { boot: self.boot.clone(), at_ms: self.at_ms.clone() };
        (self.path.clone(), serde_json::to_vec(&noted).unwrap_or_default())
    }
}

/// Writes what [`Served::written`] has returned. Nothing is flushed: a power cut makes it worthless.
pub(super) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    std::fs::write(&new, bytes)?;
    std::fs::rename(&new, path)
}

fn read(path: &Path) -> io::Result<Option<Noted>> {
    let bytes = whole_file::read(path, BYTES_MAX)?;
    Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
}

fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    u64::try_from(now.tv_sec).unwrap_or_default() * 1000
        + u64::try_from(now.tv_nsec).unwrap_or_default() / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_served_is_known_to_the_next_daemon_and_not_after_a_boot() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (VolumeId([1; 16]), VolumeId([2; 16]));
        let mut served = Served::open(folder.path());
        served.note([one, other]);
        served.keep_only(&[one]);
        let (path, bytes) = served.written();
        write(&path, &bytes).unwrap();
        let next = Served::open(folder.path());
        assert!(next.away(one).unwrap() < Duration::from_secs(60));
        assert_eq!(next.away(other), None);
        let text = String::from_utf8(bytes).unwrap();
        write(&path, text.replace(&served.boot, "another boot").as_bytes()).unwrap();
        assert_eq!(Served::open(folder.path()).away(one), None);
        // A time to come is not believed.
        let to_come = format!("{{\"boot\":\"{}\",\"at_ms\":{{\"{one}\":{}}}}}", served.boot, u64::MAX);
        write(&path, to_come.as_bytes()).unwrap();
        assert_eq!(Served::open(folder.path()).away(one), None);
        write(&path, b"garbage").unwrap();
        assert_eq!(Served::open(folder.path()).away(one), None);
    }
}
