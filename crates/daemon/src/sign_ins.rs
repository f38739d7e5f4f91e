//! Browsers that have signed in to the page, and may give orders there. `http/page_orders.rs` says which orders.
//!
//! ```text
//!   a client of the API ─ invite() ─► key, in a link ─ sign_in(), once ─► token, in the browser ─► owner(), for each order
//!                                       └─ KEY_LIFETIME                     └─ SESSION_LIFETIME, sign_out()
//! ```
//! A browser has the rights of the client that made its link. For a client over TLS these are looked up for each order, so that a
//! revoked client's browser can order nothing. Everything is in memory: a restart signs out all browsers.
//! **N.B.** So a process that listens at the page's port while no daemon does, and gets tokens there, can use none of them.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ring::rand::{SecureRandom as _, SystemRandom};
use transport::HostId;

use crate::audit::By;

/// How long the key of a link can be used: long enough to copy it to another machine's browser.
pub(crate) const KEY_LIFETIME: Duration = Duration::from_secs(5 * 60);
/// How long a browser stays signed in: a working day.
pub(crate) const SESSION_LIFETIME: Duration = Duration::from_secs(12 * 60 * 60);
/// The largest number of unused keys, and of browsers: more than a host needs. The oldest gives way.
const EACH_MAX: usize = 64;
const SECRET_BYTES: usize = 32;

/// The client that made the link of a browser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A client of the API's socket, as far as the kernel knows it.
    Local(Option<By>),
    /// A client over TLS, by its key.
    Remote(HostId),
}

/// The unused keys, and the browsers that have signed in.
#[derive(Debug, Default)]
pub(crate) struct SignIns {
    lists: Mutex<Lists>,
    /// Whether this daemon listens at the page's port. Before that, a link would lead to another process.
    is_listening: AtomicBool,
}

#[derive(Debug, Default)]
struct Lists {
    keys: Vec<Entry>,
    sessions: Vec<Entry>,
}

/// A secret, as its digest: comparing digests tells nothing about the secret by the time that it takes.
#[derive(Debug)]
struct Entry {
    digest: [u8; 32],
    owner: Owner,
    until: Instant,
}

impl SignIns {
    /// Records that this daemon listens at the page's port.
    pub(crate) fn listens(&self) {
        self.is_listening.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_listening(&self) -> bool {
        self.is_listening.load(Ordering::Relaxed)
    }

    /// Returns a key with which one browser can sign in; `None`: the system has no randomness.
    pub(crate) fn invite(&self, owner: Owner, now: Instant) -> Option<String> {
        add(&mut self.lists().keys, owner, now, KEY_LIFETIME)
    }

    /// Uses up a key. Returns the browser's token; `None`: the key is not valid.
    pub(crate) fn sign_in(&self, key: &str, now: Instant) -> Option<String> {
        let mut lists = self.lists();
        let digest = digest(key);
        let at = lists.keys.iter().position(|entry| entry.digest == digest)?;
        let entry = lists.keys.remove(at);
        if now >= entry.until {
            return None;
        }
        add(&mut lists.sessions, entry.owner, now, SESSION_LIFETIME)
    }

    /// Returns the owner of the browser that has this token; `None`: no browser has it.
    pub(crate) fn owner(&self, token: &str, now: Instant) -> Option<Owner> {
        let digest = digest(token);
        let lists = self.lists();
        let session = lists.sessions.iter().find(|entry| entry.digest == digest && now < entry.until);
        session.map(|entry| entry.owner.clone())
    }

    pub(crate) fn sign_out(&self, token: &str) {
        let digest = digest(token);
        self.lists().sessions.retain(|entry| entry.digest != digest);
    }

    fn lists(&self) -> std::sync::MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds a new secret to a list, and returns it.
fn add(list: &mut Vec<Entry>, owner: Owner, now: Instant, lifetime: Duration) -> Option<String> {
    let mut secret = [0; SECRET_BYTES];
    SystemRandom::new().fill(&mut secret).ok()?;
    let text: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    list.retain(|entry| now < entry.until);
    if list.len() >= EACH_MAX {
        list.remove(0);
    }
    list.push(Entry { digest: digest(&text), owner, until: now + lifetime });
    Some(text)
}

fn digest(secret: &str) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, secret.as_bytes());
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest.as_ref());
    bytes
}
