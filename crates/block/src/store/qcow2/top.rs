//! Reads the top of a chain while it is being served, for making another top for the same chain.
//!
//! These fields of its header do not change while an image is served, and a guest cannot reach them; so no lock is needed.

use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::OFlags;

use super::create::{BackingFile, Qcow2Options};
use super::header::{HEADER_MAX, Header};
use super::image::{Qcow2Error, resolve};
use super::probe::{Format, probe_held};
use crate::held::{Finder, Held, ToLookAt};
use crate::store::image::ImageError;

/// The properties of a chain's top that another top must share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopLayer {
    /// Bytes of a cluster in the image.
    pub cluster_size: u64,
    /// Its backing file, by an absolute path; `None`: it has none.
    pub backing: Option<BackingFile>,
}

/// The content of an image besides its disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Within {
    /// The number of internal snapshots.
    pub snapshots: u32,
    /// Whether it has valid persistent bitmaps of backup tools.
    pub has_bitmaps: bool,
}

impl Within {
    /// Reads the additional content of the image at `path`. May sleep.
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
    /// Reads the top at `path`, which is absolute, if `finder` permits it and its backing file. May sleep.
    ///
    /// # Errors
    /// [`Qcow2Error`], as opening it would; [`Qcow2Error::Backing`] if its backing file does not exist.
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
        // An image in another folder finds it only by its whole path.
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

    /// Returns the options for another top of the same chain.
    pub fn options(&self) -> Qcow2Options {
        Qcow2Options { cluster_size: self.cluster_size, backing: self.backing.clone() }
    }
}
