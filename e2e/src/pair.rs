//! Two hosts that know each other: two daemons with folders of their own, and links between them that can be cut.

use std::fs::File;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Context as _, ensure};
use api::{Migration, Volume, VolumeState};

use crate::scene::Scene;
use crate::wait::until;
use crate::wire::Wire;

/// What the hosts are called.
const ALPHA: &str = "alpha";
/// What the hosts are called.
const BETA: &str = "beta";

/// Two hosts that are paired.
#[derive(Debug)]
pub struct Pair {
    /// Where volumes are made.
    pub alpha: Scene,
    /// The other one.
    pub beta: Scene,
    /// What `alpha` calls `beta` through.
    pub wire: Wire,
}

/// Plays a scene with two hosts that are paired, both daemons ready.
///
/// # Panics
/// If the test fails: with its error, and both daemons' logs.
pub fn play_pair(test: impl FnOnce(&mut Pair) -> anyhow::Result<()>) {
    let result = Pair::new().and_then(|mut pair| {
        test(&mut pair).map_err(|error| pair.alpha.with_log(&pair.beta.with_log(&error)))
    });
    #[expect(clippy::panic, reason = "this is how a test fails")]
    if let Err(error) = result {
        panic!("{error:#}");
    }
}

/// As [`play_pair`], for a test that mounts; without root it is left out.
///
/// # Panics
/// If the test fails: with its error, and both daemons' logs.
pub fn play_pair_with_mounts(test: impl FnOnce(&mut Pair) -> anyhow::Result<()>) {
    if !rustix::process::geteuid().is_root() {
        return omission::machine_lacks("root, which mounting needs");
    }
    play_pair(test);
}

impl Pair {
    /// Makes two hosts, pairs them, and leaves both daemons ready.
    ///
    /// # Errors
    /// If one does not start, or they do not get to know each other.
    pub fn new() -> anyhow::Result<Self> {
        let (mut alpha, mut beta) = (Scene::new()?, Scene::new()?);
        let address = own_address()?;
        let wire = Wire::to(address)?;
        // Only `alpha` calls, and only over the wire; `beta` listens behind it.
        configure(&alpha, "listen = []")?;
        let link = wire.address().to_string();
        configure(&beta, &format!("listen = ['{address}']\nlinks = [{{ address = '{link}' }}]"))?;
        alpha.start()?;
        beta.start()?;
        alpha.sterna(["host", "init", "--name", ALPHA])?.success()?;
        beta.sterna(["host", "init", "--name", BETA])?.success()?;
        let invitation: api::Invitation = beta.ask(&["host", "invite"])?;
        alpha.sterna(["host", "join", &link, &invitation.token])?.success()?;
        Ok(Self { alpha, beta, wire })
    }

    /// Moves the volume `v` from `alpha` to a store of `beta`, and waits.
    ///
    /// # Errors
    /// If it does not get there.
    pub fn leave(&self) -> anyhow::Result<Migration> {
        let ended = self.alpha.ask(&["migrate", "v", "--to", "beta:a"])?;
        self.check_at(&self.beta, &self.alpha)?;
        Ok(ended)
    }

    /// Moves the volume `v` from `beta` to a store of `alpha`, and waits.
    ///
    /// # Errors
    /// If it does not get there.
    pub fn come_home(&self) -> anyhow::Result<Migration> {
        let ended = self.beta.ask(&["migrate", "v", "--to", "alpha:a"])?;
        self.check_at(&self.alpha, &self.beta)?;
        Ok(ended)
    }

    /// Checks that the volume `v` is served at `owner` and that nothing but forwarding is left at `other`.
    ///
    /// # Errors
    /// If it is not so.
    pub fn check_at(&self, owner: &Scene, other: &Scene) -> anyhow::Result<()> {
        until("the volume is served by its owner", || {
            let volume: Option<Volume> = owner.ask(&["volume", "show", "v"]).ok();
            Ok(volume.filter(|volume| volume.state == VolumeState::Serving))
        })?;
        ensure!(owner.images("a")? == ["v.img"], "{:?}", owner.images("a")?);
        until("the other host's image is gone", || Ok(other.images("a")?.is_empty().then_some(())))?;
        let left: Option<Volume> = other.ask(&["volume", "show", "v"]).ok();
        ensure!(left.as_ref().is_none_or(|left| left.state == VolumeState::Forwarding), "{left:?}");
        Ok(())
    }
}

fn configure(scene: &Scene, hosts: &str) -> anyhow::Result<()> {
    let mut file = File::options().append(true).open(scene.path("sterna.toml")).context("configure")?;
    write!(file, "[hosts]\n{hosts}\n").context("configure")
}

/// An address of the loopback interface that no other test has, and a port there: nobody else is given that port, also while
/// the daemon that is to have it does not run.
fn own_address() -> anyhow::Result<SocketAddr> {
    static COUNT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    // Clear of 127.0.0.1, where everybody else is.
    let address = Ipv4Addr::new(127, 128 | high >> 2, low, COUNT.fetch_add(1, Ordering::Relaxed));
    Ok(TcpListener::bind((address, 0))?.local_addr()?)
}
