//! The machine and the programs of a measurement, so that figures can be judged later.

use std::path::Path;

use serde::Serialize;

use super::image::{Forgotten, drop_caches};

/// The machine and the programs that were measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Environment {
    /// The processor's own name, for example "AMD EPYC".
    pub(super) processor: String,
    /// Number of CPUs that this process may use.
    pub(super) cpus: usize,
    /// Release of the kernel, as `uname` says it.
    pub(super) kernel: String,
    pub(super) file_system: String,
    /// The page cache that was dropped before each measurement: `all`, or the pages of the `images` without root.
    pub(super) dropped_caches: &'static str,
    pub(super) versions: Versions,
}

/// Versions of measured programs, by name.
pub(super) type Versions = std::collections::BTreeMap<String, String>;

impl Environment {
    /// Describes this machine, for images in `folder`. Fails if the page cache cannot be dropped.
    pub(super) async fn of(folder: &Path, versions: Versions) -> anyhow::Result<Self> {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let dropped_caches = match drop_caches(&[]).await? {
            Forgotten::All => "all",
            Forgotten::Images => "images",
        };
        Ok(Self {
            processor: processor_in(&read("/proc/cpuinfo")),
            cpus: std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            file_system: file_system_in(&read("/proc/self/mountinfo"), folder),
            dropped_caches,
            versions,
        })
    }

    /// Returns two lines: the machine, and the programs.
    pub(super) fn lines(&self) -> [String; 2] {
        let Self { processor, cpus, kernel, file_system, versions, .. } = self;
        let versions: Vec<String> =
            versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
        [format!("{processor}, {cpus} CPUs, Linux {kernel}, {file_system}"), versions.join(", ")]
    }
}

fn processor_in(cpuinfo: &str) -> String {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"));
    let name = line.and_then(|line| line.split_once(':')).map(|(_, name)| name.trim());
    name.unwrap_or(std::env::consts::ARCH).to_owned()
}

/// Returns the type of the file system that is mounted deepest above `folder`.
fn file_system_in(mountinfo: &str, folder: &Path) -> String {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let mounts = mountinfo.lines().filter_map(|line| {
        let (place, system) = line.split_once(" - ")?;
        Some((place.split(' ').nth(4)?, system.split(' ').next()?))
    });
    let above = mounts.filter(|(place, _)| folder.starts_with(place));
    // Of several mounts in one place, the last is visible.
    let deepest = above.max_by_key(|(place, _)| place.len());
    deepest.map_or_else(|| "a file system of unknown type".to_owned(), |(_, system)| system.to_owned())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{file_system_in, processor_in};

    #[test]
    fn the_deepest_mount_counts() {
        let mounts = "\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /tmp rw shared:5 - tmpfs tmpfs rw
31 30 0:26 / /tmp/disk rw shared:5 master:1 - xfs /dev/vdb rw
";
        let file_system = |folder| file_system_in(mounts, Path::new(folder));
        assert_eq!(file_system("/home/nobody"), "ext4");
        assert_eq!(file_system("/tmp/disk/there"), "xfs");
        assert_eq!(file_system("/tmp/diskette"), "tmpfs");
        assert_eq!(file_system_in("", Path::new("/")), "a file system of unknown type");
    }

    #[test]
    fn the_processor_has_some_name() {
        assert_eq!(processor_in("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n"), "Some CPU @ 3 GHz");
        assert_eq!(processor_in(""), std::env::consts::ARCH);
    }
}
