//! Acts on the hosts of a trip. An act that an earlier fault has made impossible is left out, with a message.

use anyhow::ensure;
use rustix::process::Signal;
use testbed::{Host, LinkState};

use super::plan::{Act, Role};
use crate::pair::Pair;

/// Exit code of a daemon that is killed, or kills itself.
const KILLED: i32 = 137;

/// The host of the volume at the beginning of a trip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    Alpha,
    Beta,
}

pub(super) struct Hosts<'a> {
    pub(super) pair: &'a mut Pair,
    pub(super) home: Home,
    /// Hosts whose daemons are stopped by SIGSTOP.
    frozen: Vec<Role>,
    /// Whether one host has removed the other.
    are_unpaired: bool,
}

impl<'a> Hosts<'a> {
    pub(super) fn new(pair: &'a mut Pair, home: Home) -> Self {
        Self { pair, home, frozen: Vec::new(), are_unpaired: false }
    }

    pub(super) fn host(&mut self, role: Role) -> &mut Host {
        match (self.home, role) {
            (Home::Alpha, Role::Source) | (Home::Beta, Role::Target) => &mut self.pair.alpha,
            (Home::Alpha, Role::Target) | (Home::Beta, Role::Source) => &mut self.pair.beta,
        }
    }

    pub(super) fn both(&self) -> (&Host, &Host) {
        match self.home {
            Home::Alpha => (&self.pair.alpha, &self.pair.beta),
            Home::Beta => (&self.pair.beta, &self.pair.alpha),
        }
    }

    pub(super) fn answers(&mut self, role: Role) -> bool {
        self.host(role).runs() && !self.frozen.contains(&role)
    }

    /// Restarts daemons that have killed themselves, and returns their hosts.
    ///
    /// # Errors
    /// If one has ended otherwise.
    pub(super) fn revive(&mut self) -> anyhow::Result<Vec<Role>> {
        let mut revived = Vec::new();
        for role in [Role::Source, Role::Target] {
            if !self.host(role).runs() {
                continue;
            }
            if let Some(code) = self.host(role).take_end()? {
                ensure!(code == KILLED, "the daemon of the {role} ended by itself, with {code}");
                self.host(role).start()?;
                revived.push(role);
            }
        }
        Ok(revived)
    }

    /// Carries out an act. Returns its result, or why it was left out.
    ///
    /// # Errors
    /// If it cannot be done.
    pub(super) fn carry_out(&mut self, act: Act) -> anyhow::Result<Option<String>> {
        match act {
            Act::Link(state) => self.pair.link.set(state),
            Act::Kill(role) => {
                // An earlier fault may have killed it already.
                if self.host(role).runs() {
                    self.frozen.retain(|frozen| *frozen != role);
                    self.host(role).kill()?;
                }
            }
            Act::Stop(role) => return self.stop(role),
            Act::Start(role, fail_point) => return self.start(role, fail_point),
            Act::Freeze(role) => {
                if !self.answers(role) {
                    return left_out("it does not run");
                }
                self.host(role).signal(Signal::STOP)?;
                self.frozen.push(role);
            }
            Act::Thaw(role) => self.thaw(role)?,
            Act::FillData(role) => {
                return Ok(self.host(role).fill_data()?.then_some("it is full".to_owned()));
            }
            Act::FreeData(role) => self.host(role).free_data()?,
            Act::Unpair(role) => return self.unpair(role),
            Act::TouchImage | Act::TouchKept | Act::Pair | Act::Pause | Act::Resume | Act::Cancel(_) => {}
        }
        Ok(None)
    }

    /// Ends a daemon in order, unless it kills itself first.
    fn stop(&mut self, role: Role) -> anyhow::Result<Option<String>> {
        if !self.answers(role) {
            return left_out("it does not run");
        }
        self.host(role).signal(Signal::TERM)?;
        let code = self.host(role).wait_for_end()?;
        ensure!(code == 0 || code == KILLED, "the daemon of the {role} ended with {code}");
        Ok((code == KILLED).then(|| "it killed itself meanwhile".to_owned()))
    }

    /// Starts a daemon. If it kills itself before it answers, it is started again.
    fn start(&mut self, role: Role, fail_point: Option<&'static str>) -> anyhow::Result<Option<String>> {
        // Another fault may have restarted it already.
        if self.host(role).runs() {
            return left_out("it runs");
        }
        let environment = fail_point.map(|step| ("STERNA_FAIL_POINT", step));
        if let Err(error) = self.host(role).start_with(environment.as_slice()) {
            return match self.revive()?.as_slice() {
                [] => Err(error),
                _ => Ok(Some("it killed itself at once".to_owned())),
            };
        }
        Ok(None)
    }

    fn thaw(&mut self, role: Role) -> anyhow::Result<()> {
        // It may have been killed and restarted.
        if self.frozen.contains(&role) {
            self.frozen.retain(|frozen| *frozen != role);
            self.host(role).signal(Signal::CONT)?;
        }
        Ok(())
    }

    fn unpair(&mut self, role: Role) -> anyhow::Result<Option<String>> {
        if !self.answers(role) {
            return left_out("it does not run");
        }
        let is_alpha = (self.home == Home::Alpha) == (role == Role::Source);
        let other = if is_alpha { "beta" } else { "alpha" };
        let outcome = self.host(role).sterna(["host", "remove", other, "--force"])?;
        if outcome.code != 0 {
            return Ok(Some(format!("{}{}", outcome.stdout.trim(), outcome.stderr.trim())));
        }
        self.are_unpaired = true;
        Ok(None)
    }

    /// Pairs the hosts again if one has removed the other, and returns whether that succeeded. Both daemons must run,
    /// and the link must work.
    ///
    /// # Errors
    /// If a daemon does not start.
    pub(super) fn pair_again(&mut self) -> anyhow::Result<bool> {
        if !self.are_unpaired {
            return Ok(true);
        }
        self.pair.link.set(LinkState::Up);
        for role in [Role::Source, Role::Target] {
            self.thaw(role)?;
            if !self.host(role).runs() {
                self.host(role).start()?;
            }
        }
        self.are_unpaired = self.pair.join().is_err();
        Ok(!self.are_unpaired)
    }
}

fn left_out(why: &str) -> anyhow::Result<Option<String>> {
    Ok(Some(format!("left out: {why}")))
}
