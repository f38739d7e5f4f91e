//! Two paired hosts: two daemons with folders of their own, and a link between them that can be cut.

use std::os::unix::fs::OpenOptionsExt as _;

use anyhow::{Context as _, ensure};
use api::{Migration, MigrationState, Volume, VolumeState};
use testbed::{Host, Link, LinkState, own_address, until};

use crate::host;
use crate::play::{expect_success, may_mount};

/// Name of the first host.
const ALPHA: &str = "alpha";
/// Name of the second host.
const BETA: &str = "beta";

/// Name of the folder in which a host can open the other one's store `a`.
pub const FAR: &str = "far";

/// Two hosts that are paired.
#[derive(Debug)]
pub struct Pair {
    /// The first host, which makes the volumes.
    pub alpha: Host,
    /// The second host of the pair.
    pub beta: Host,
    /// The link by which `alpha` dials `beta`.
    pub link: Link,
}

/// Runs a test with two paired hosts whose daemons are ready.
///
/// # Panics
/// If the test fails: with its error, and both daemons' logs.
pub fn play_pair(test: impl FnOnce(&mut Pair) -> anyhow::Result<()>) {
    play(Pair::new(), test);
}

fn play(pair: anyhow::Result<Pair>, test: impl FnOnce(&mut Pair) -> anyhow::Result<()>) {
    expect_success(pair.and_then(|mut pair| {
        test(&mut pair).map_err(|error| pair.alpha.with_log(pair.beta.with_log(error)))
    }));
}

/// Runs it as [`play_pair`], for a test that mounts. Without root it is left out.
///
/// # Panics
/// If the test fails: with its error, and both daemons' logs.
pub fn play_pair_with_mounts(test: impl FnOnce(&mut Pair) -> anyhow::Result<()>) {
    if may_mount() {
        play_pair(test);
    }
}

/// Runs it as [`play_pair`], with data folders on disks of this size, which a test may fill. Without root it is left out.
///
/// # Panics
/// If the test fails: with its error, and both daemons' logs.
pub fn play_pair_with_data_disks(bytes: u64, test: impl FnOnce(&mut Pair) -> anyhow::Result<()>) {
    if may_mount() {
        play(Pair::with_data_disks(bytes), test);
    }
}

/// Runs it as [`play_pair`], with hosts that search for each other's store `a` in a folder `far`, which `set`
/// makes before the daemons start.
///
/// # Panics
/// If the test fails: with its error, and both daemons' logs.
pub fn play_sharing_pair(
    set: impl FnOnce(&mut Host, &mut Host) -> anyhow::Result<()>,
    test: impl FnOnce(&mut Pair) -> anyhow::Result<()>,
) {
    match sharing_pair(set).transpose() {
        Some(pair) => play(pair, test),
        None => omission::kernel_lacks("direct I/O in the folder of temporary files"),
    }
}

/// Gives each of two hosts the other's store `a` as `far`.
///
/// # Errors
/// If the links cannot be made.
pub fn share(alpha: &Host, beta: &Host) -> anyhow::Result<()> {
    for (one, other) in [(alpha, beta), (beta, alpha)] {
        std::os::unix::fs::symlink(other.path("a"), one.path(FAR)).context("share a store")?;
    }
    Ok(())
}

impl Pair {
    /// Makes two hosts, pairs them, and leaves both daemons ready.
    ///
    /// # Errors
    /// If one does not start, or they cannot be paired.
    pub fn new() -> anyhow::Result<Self> {
        Self::of(host()?, host()?, "[hosts]\n")
    }

    /// Makes them as [`Pair::new`], with data folders on disks of their own, which a test may fill. Without
    /// root they are ordinary folders.
    ///
    /// # Errors
    /// Those of [`Pair::new`].
    pub fn with_data_disks(bytes: u64) -> anyhow::Result<Self> {
        let (mut alpha, mut beta) = (host()?, host()?);
        alpha.mount_data(bytes)?;
        beta.mount_data(bytes)?;
        Self::of(alpha, beta, "[hosts]\n")
    }

    /// Pairs two hosts. `heading` is the part of their configurations before the keys of `[hosts]`.
    fn of(mut alpha: Host, mut beta: Host, heading: &str) -> anyhow::Result<Self> {
        let address = own_address()?;
        let link = Link::to(address)?;
        // Only `alpha` dials, and only over the link, behind which `beta` listens.
        alpha.configure(&format!("{heading}listen = []\n"))?;
        let link_address = link.address().to_string();
        beta.configure(&format!(
            "{heading}listen = ['{address}']\nlinks = [{{ address = '{link_address}' }}]\n"
        ))?;
        alpha.start()?;
        beta.start()?;
        alpha.sterna(["host", "init", "--name", ALPHA])?.success()?;
        beta.sterna(["host", "init", "--name", BETA])?.success()?;
        let pair = Self { alpha, beta, link };
        pair.join()?;
        Ok(pair)
    }

    /// Pairs the hosts, or pairs them again after one of them has forgotten the other.
    ///
    /// # Errors
    /// If they cannot be paired.
    pub fn join(&self) -> anyhow::Result<()> {
        let invitation: api::Invitation = self.beta.ask(&["host", "invite", "--allow-machines"])?;
        let link = self.link.address().to_string();
        self.alpha.sterna(["host", "join", &link, &invitation.token, "--allow-machines"])?.success().map(drop)
    }

    /// Moves the volume `v` from `alpha` to a store of `beta`, and waits.
    ///
    /// # Errors
    /// If the migration fails.
    pub fn leave(&self) -> anyhow::Result<Migration> {
        let ended = self.alpha.ask(&["migrate", "v", "--to", "beta:a"])?;
        self.check_at(&self.beta, &self.alpha)?;
        Ok(ended)
    }

    /// Moves the volume `v` from `beta` to a store of `alpha`, and waits.
    ///
    /// # Errors
    /// If the migration fails.
    pub fn come_home(&self) -> anyhow::Result<Migration> {
        let ended = self.beta.ask(&["migrate", "v", "--to", "alpha:a"])?;
        self.check_at(&self.alpha, &self.beta)?;
        Ok(ended)
    }

    /// Moves the volume `v` from `alpha` to a store of `beta`. The named host's daemon kills itself at a fail point meanwhile,
    /// and is started again.
    ///
    /// # Errors
    /// If it is not killed.
    pub fn leave_killed(&mut self, host: &str, fail_point: &str) -> anyhow::Result<()> {
        let is_source = host == ALPHA;
        let killed = if is_source { &mut self.alpha } else { &mut self.beta };
        killed.stop()?;
        killed.start_with(&[("STERNA_FAIL_POINT", fail_point)])?;
        // The command is interrupted, or gets an error about the other host.
        let migrating = self.alpha.start_migrating("beta:a")?;
        let killed = if is_source { &mut self.alpha } else { &mut self.beta };
        ensure!(killed.wait_for_end()? == 137, "{host} was not killed at {fail_point}");
        drop(migrating);
        killed.start()
    }

    /// Kills and restarts the daemon of `alpha`, of `beta`, or both, in turn.
    ///
    /// # Errors
    /// If one does not start.
    pub fn kill_in_turn(&mut self, turn: u32) -> anyhow::Result<()> {
        let killed = [turn % 3 != 1, !turn.is_multiple_of(3)];
        let mut hosts: Vec<_> = [&mut self.alpha, &mut self.beta].into_iter().zip(killed).collect();
        hosts.retain(|(_, is_killed)| *is_killed);
        hosts.iter_mut().try_for_each(|(host, _)| host.kill())?;
        hosts.iter_mut().try_for_each(|(host, _)| host.start())
    }

    /// Waits for the end of the migration `departure` of `alpha`, whose volumes have returned. It must report that,
    /// and leave nothing at `beta`.
    ///
    /// # Errors
    /// If that is not the case.
    pub fn check_departure_taken_back(&self, departure: &str) -> anyhow::Result<()> {
        let departure = until("the departure has ended, too", || {
            let shown = self.alpha.migration(departure)?;
            Ok(Some(shown).filter(|shown| shown.state != MigrationState::Running))
        })?;
        let said = departure.message.clone().unwrap_or_default();
        ensure!(departure.state == MigrationState::Moved && said.contains("returned"), "{departure:?}");
        ensure!(self.beta.images("a")?.is_empty(), "{:?}", self.beta.images("a")?);
        Ok(())
    }

    /// Moves the volume `v` from `alpha` to a store of `beta`, kills `alpha`'s daemon before the commit point, and promotes the
    /// copy by force without contact between the hosts. `alpha`'s daemon is not restarted, and the link stays cut.
    ///
    /// # Errors
    /// If one of these steps fails.
    pub fn promote_by_force(&mut self) -> anyhow::Result<()> {
        self.alpha.stop()?;
        self.alpha.start_with(&[("STERNA_FAIL_POINT", "before-released")])?;
        self.alpha.begin_to_migrate("beta:a", None)?;
        ensure!(self.alpha.wait_for_end()? == 137, "the daemon is to be killed before its commit point");
        self.link.set(LinkState::Cut);
        self.beta.sterna(["volume", "promote", "v", "--force"])?.success()?;
        let promoted: Volume = self.beta.volume()?;
        ensure!(promoted.state == VolumeState::Serving, "{promoted:?}");
        Ok(())
    }

    /// Waits until no migration is under way and one host serves all `volumes`, and returns whether that is `alpha`.
    ///
    /// # Errors
    /// If that does not happen in time.
    pub fn settled(&self, volumes: usize) -> anyhow::Result<bool> {
        self.alpha.until_idle()?;
        self.beta.until_idle()?;
        let serves = |host: &Host| -> anyhow::Result<usize> {
            let volumes: Vec<Volume> = host.ask(&["volume", "list"])?;
            Ok(volumes.iter().filter(|volume| volume.state == VolumeState::Serving).count())
        };
        until("one host has all volumes", || {
            Ok(match (serves(&self.alpha)?, serves(&self.beta)?) {
                (all, 0) if all == volumes => Some(true),
                (0, all) if all == volumes => Some(false),
                _ => None,
            })
        })
    }

    /// Checks that the volume `v` is served at `owner` and that nothing but forwarding is left at `other`.
    ///
    /// # Errors
    /// If that is not the case.
    pub fn check_at(&self, owner: &Host, other: &Host) -> anyhow::Result<()> {
        until("the volume is served by its owner", || {
            let volume: Option<Volume> = owner.ask(&["volume", "show", "v"]).ok();
            Ok(volume.filter(|volume| volume.state == VolumeState::Serving))
        })?;
        until("the owner's store has the image and nothing else", || {
            Ok((owner.images("a")? == ["v.img"]).then_some(()))
        })?;
        until("the other host's image is gone", || Ok(other.images("a")?.is_empty().then_some(())))?;
        // A forwarded volume whose last client has just left is being removed.
        until("the other host forwards the volume, or knows nothing of it", || {
            let left: Option<Volume> = other.ask(&["volume", "show", "v"]).ok();
            ensure!(left.as_ref().is_none_or(|left| left.state != VolumeState::Serving), "{left:?}");
            Ok(left.is_none_or(|left| left.state == VolumeState::Forwarding).then_some(()))
        })
    }
}

/// Makes a pair that shares stores; `None` if the stores do not support it.
fn sharing_pair(
    set: impl FnOnce(&mut Host, &mut Host) -> anyhow::Result<()>,
) -> anyhow::Result<Option<Pair>> {
    let (mut alpha, mut beta) = (host()?, host()?);
    if !has_direct_io(&alpha)? {
        return Ok(None);
    }
    for scene in [&alpha, &beta] {
        scene.configure(&format!("[hosts]\nshared_folders = ['{}']\n", scene.path(FAR).display()))?;
    }
    set(&mut alpha, &mut beta)?;
    Pair::of(alpha, beta, "").map(Some)
}

/// Returns whether a scene's stores support direct I/O.
fn has_direct_io(scene: &Host) -> anyhow::Result<bool> {
    let path = scene.path("probe");
    std::fs::write(&path, b"").context("make a file")?;
    let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let opened = std::fs::File::options().read(true).custom_flags(direct).open(&path);
    std::fs::remove_file(path).context("remove a file")?;
    Ok(opened.is_ok())
}
