//! What the top of a chain says of itself, read while somebody serves it: how to make another top for the same chain.
//!
//! Its header does not change in these fields while an image is served, and a guest cannot reach it; so nothing is locked.

use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::OFlags;

use super::create::{BackingFile, Qcow2Options};
use super::header::{HEADER_MAX, Header};
use super::image::{Qcow2Error, resolve};
use super::probe::{Format, probe_held};
use crate::held::{Finder, Held, ToLookAt};
use crate::store::image::ImageError;

/// The top of a chain, as far as it takes to make another one in its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopLayer {
    /// Bytes of a cluster.
    pub cluster_size: u64,
    /// What it stands on, by an absolute path; `None`: it stands alone.
    pub backing: Option<BackingFile>,
}

/// What an image has beside its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Within {
    /// How many internal snapshots.
    pub snapshots: u32,
    /// Whether it has persistent bitmaps of backup tools, and they are true.
    pub has_bitmaps: bool,
}

impl Within {
    /// Reads what the image at `path` says of itself. It may sleep.
    ///
    /// # Errors
    /// [`Qcow2Error`], as opening it would.
    pub fn of(path: &Path) -> Result<Self, Qcow2Error> {
        let held = ToLookAt.find(path, None).map_err(|error| ImageError::of("find", path, error))?;
        let header = header_of(&held, path)?;
        Ok(Self { snapshots: header.snapshots, has_bitmaps: header.has_bitmaps })
    }
}

fn header_of(held: &Held, path: &Path) -> Result<Header, Qcow2Error> {
    let fail = |operation| move |error| ImageError::of(operation, path, error);
    let file = held.open(OFlags::RDONLY).map_err(fail("open"))?;
    let length = file.metadata().map_err(fail("examine"))?.len();
    let mut bytes = vec![0; HEADER_MAX.min(usize::try_from(length).unwrap_or(HEADER_MAX))];
    file.read_exact_at(&mut bytes, 0).map_err(fail("read the header of"))?;
    Header::parse(&bytes, length).map_err(|reason| Qcow2Error::Header { path: path.to_owned(), reason })
}

impl TopLayer {
    /// Reads what the image at `path`, which is absolute, says of itself, if `finder` says that it and what it stands on may be
    /// opened. It may sleep.
    ///
    /// # Errors
    /// [`Qcow2Error`], as opening it would; [`Qcow2Error::Backing`] if what it stands on is not there.
    pub fn of(path: &Path, finder: &dyn Finder) -> Result<Self, Qcow2Error> {
        let held = finder.find(path, None).map_err(|error| ImageError::of("find", path, error))?;
        let header = header_of(&held, path)?;
        let cluster_size = header.cluster_size();
        let Some(named) = header.backing else { return Ok(Self { cluster_size, backing: None }) };
        let found = resolve(path, &named.name)?;
        let missing = |source: ImageError| Qcow2Error::Backing {
            path: path.to_owned(),
            backing: found.clone(),
            source: Box::new(source.into()),
        };
        let below = finder.find(&found, Some(&held));
        let below = below.map_err(|error| missing(ImageError::of("find", &found, error)))?;
        // By another image in another folder it is found only by its whole path.
        let backing = below.path().to_owned();
        let format = match named.format.as_deref() {
            Some("raw" | "file") => Format::Raw,
            Some("qcow2") => Format::Qcow2,
            Some(other) => Format::Other(other.to_owned()),
            None => probe_held(&below).map_err(missing)?,
        };
        let no_text =
            || Qcow2Error::BackingIsNoFile { path: path.to_owned(), name: backing.display().to_string() };
        let path = backing.to_str().map(str::to_owned).ok_or_else(no_text)?;
        Ok(Self { cluster_size, backing: Some(BackingFile { path, format }) })
    }

    /// How another top for the same chain is made.
    pub fn options(&self) -> Qcow2Options {
        Qcow2Options { cluster_size: self.cluster_size, backing: self.backing.clone() }
    }
}
