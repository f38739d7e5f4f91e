//! What survives a restart: which conditions were told, and what waits for each destination.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use api::Notice;
use serde::{Deserialize, Serialize};

use super::migrations::SeenMigrations;
use super::post::Post;
use super::watch::{Subject, Watch};
use super::{Book, Posted};
use crate::files::whole_file;

/// Name of the file in the data folder.
pub(super) const FILE: &str = "notices.json";
/// The largest file that is read: more notices than can wait.
const BYTES_MAX: u64 = 8 << 20;

/// The content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Kept {
    told: Vec<(Subject, String)>,
    next_migration: Option<u64>,
    unfinished_migrations: BTreeSet<u64>,
    waiting: BTreeMap<String, Vec<Notice>>,
}

impl Kept {
    pub(super) fn of(book: &Book, destinations: impl Iterator<Item = String>) -> Self {
        let waiting = destinations.zip(&book.posts);
        Self {
            told: book.watch.told().map(|(subject, message)| (subject.clone(), message.to_owned())).collect(),
            next_migration: book.migrations.next,
            unfinished_migrations: book.migrations.unfinished.clone(),
            waiting: waiting.map(|(name, posted)| (name, posted.post.waiting().cloned().collect())).collect(),
        }
    }

    pub(super) fn into_book(mut self, destinations: impl Iterator<Item = String>) -> Book {
        let posts = destinations.map(|name| {
            let mut post = Post::default();
            post.add(self.waiting.remove(&name).unwrap_or_default());
            Posted { post, delivered_unix_ms: None }
        });
        Book {
            posts: posts.collect(),
            watch: Watch::with_told(self.told),
            migrations: SeenMigrations { next: self.next_migration, unfinished: self.unfinished_migrations },
        }
    }
}

/// Reads the file. One that cannot be read is as good as none: nothing but repetition depends on it.
pub(super) fn read(path: &Path) -> Kept {
    let read = whole_file::read(path, BYTES_MAX);
    let kept = read.and_then(|content| match content {
        Some(content) => serde_json::from_slice(&content).map_err(io::Error::from),
        None => Ok(Kept::default()),
    });
    kept.unwrap_or_else(|error| {
        tracing::warn!(%error, file = %path.display(), "what was told is not known; it may be told again");
        Kept::default()
    })
}

pub(super) fn write(path: &Path, kept: &Kept) -> io::Result<()> {
    whole_file::replace(path, &serde_json::to_vec(kept).map_err(io::Error::from)?)
}

/// Draws the identity of a notice: 32 hexadecimal digits.
pub(super) fn draw_identity() -> String {
    let mut bytes = [0; 16];
    // Without random numbers the time is all that tells two apart.
    let is_drawn = ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes).is_ok();
    let drawn = u128::from_be_bytes(bytes);
    format!("{:032x}", if is_drawn { drawn } else { u128::from(crate::journal::now_unix_ms()) })
}
