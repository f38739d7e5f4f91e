//! A standby whose volumes are served here.
//!
//! ```text
//!   all lanes serve ─► they join the group ─► Group::begin ─► the line to the standby's host
//!        ▲                                        tasks: send, read, flush, record ◄─┘
//!        └── a volume has left, or a lane has ended: the group ends
//! ```

mod beginning;
mod checking;
mod lacking;
mod leading;
mod naming;
mod noting;
mod reading;
pub(crate) mod run;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use lane::capture::Group;
use migration::HostId;
use standby::StandbyId;
use standby::owner::State;
use standby::verification::Compared;
use tokio::sync::mpsc;

use super::asking::Asker;
use super::book::{Book, SourceConfig, parse};
use super::exporting::Detour;
use super::permissions::Permissions;
use crate::host::Stopping;
use crate::hosts::Hosts;
use crate::journal::Journal;
use crate::peers::Peers;
use crate::volumes::registry::Volumes;

/// What a standby's task works with.
#[derive(Clone)]
pub(super) struct Surroundings {
    pub(super) book: Book,
    pub(super) journal: Journal,
    pub(super) hosts: Arc<Hosts>,
    pub(super) peers: Arc<Peers>,
    pub(super) volumes: Arc<Volumes>,
    pub(super) permissions: Arc<Permissions>,
    pub(super) asker: Asker,
    pub(super) stopping: Stopping,
}

/// An order to the task.
#[derive(Clone, Debug)]
pub(super) enum Order {
    /// The configuration was changed.
    Changed,
    /// Compare everything with the standby.
    Check {
        /// Whether an administrator has ordered it.
        is_ordered: bool,
    },
    /// Its streams lead elsewhere.
    Led,
    /// End: the standby is being removed.
    End,
}

/// A standby at its source.
pub(crate) struct Source {
    config: Mutex<SourceConfig>,
    shown: Mutex<Shown>,
    /// Held while a migration of its volumes to another host is begun, and while it is decided where they are.
    pub(super) leaving: Arc<tokio::sync::Mutex<()>>,
    /// Where its streams lead while it is exported; `None`: to its host.
    detour: Mutex<Option<Arc<Detour>>>,
    orders: mpsc::UnboundedSender<Order>,
}

/// What the task shows of itself.
#[derive(Clone, Default)]
pub(super) struct Shown {
    pub(super) group: Option<Arc<Group>>,
    pub(super) state: Option<State>,
    /// Since when it has had no group.
    pub(super) waiting_since: Option<Instant>,
    /// Since when it has had no first copy.
    pub(super) seeding_since: Option<Instant>,
    /// Why it does not go on.
    pub(super) reason: Option<String>,
    /// While there is no group: the standby is of this time, or older.
    pub(super) older_than: Option<Instant>,
    pub(super) bytes_sent: u64,
    /// Bytes that the standby's host had already.
    pub(super) bytes_found: u64,
    /// What is known of comparisons of everything; `None`: that has not been read yet.
    pub(super) compared: Option<Compared>,
    pub(super) epochs: u64,
    /// The VMs that are described to the standby's host.
    pub(super) vms: Vec<api::StandbyVm>,
}

impl Shown {
    /// Notes the state of the machine.
    fn enter(&mut self, state: State) {
        self.state = Some(state);
        match state {
            State::Seeding => drop(self.seeding_since.get_or_insert_with(Instant::now)),
            State::Paused => {}
            _ => self.seeding_since = None,
        }
    }
}

impl Source {
    /// Begins a standby, or goes on with it after a start.
    pub(super) fn begin(config: SourceConfig, surroundings: Surroundings) -> Arc<Self> {
        let (orders, received) = mpsc::unbounded_channel();
        let source = Arc::new(Self {
            config: Mutex::new(config),
            shown: Mutex::default(),
            leaving: Arc::default(),
            detour: Mutex::default(),
            orders,
        });
        tokio::spawn(run::run(Arc::clone(&source), surroundings, received));
        source
    }

    pub(crate) fn config(&self) -> SourceConfig {
        lock(&self.config).clone()
    }

    /// Takes another configuration, which is durable.
    pub(super) fn set(&self, config: SourceConfig) {
        *lock(&self.config) = config;
        self.order(Order::Changed);
    }

    pub(super) fn end(&self) {
        self.order(Order::End);
    }

    /// Lets its streams lead to a folder, or to its host again.
    pub(super) fn lead(&self, detour: Option<Arc<Detour>>) {
        let has_changed = detour.is_some() || lock(&self.detour).is_some();
        *lock(&self.detour) = detour;
        if has_changed {
            self.order(Order::Led);
        }
    }

    fn detour(&self) -> Option<Arc<Detour>> {
        lock(&self.detour).clone()
    }

    /// Has everything compared with the standby.
    pub(super) fn check(&self, is_ordered: bool) {
        self.order(Order::Check { is_ordered });
    }

    pub(super) fn shown(&self) -> Shown {
        lock(&self.shown).clone()
    }

    pub(super) fn show(&self, change: impl FnOnce(&mut Shown)) {
        change(&mut lock(&self.shown));
    }

    fn order(&self, order: Order) {
        // A task that has ended needs no order.
        let _ = self.orders.send(order);
    }

    pub(crate) fn standby(&self) -> StandbyId {
        parse(&lock(&self.config).id).unwrap_or(StandbyId(0))
    }

    /// Returns the host of the standby.
    pub(crate) fn host(&self) -> HostId {
        host_of(&lock(&self.config).host)
    }
}

/// Returns the host whose identity is this text.
pub(super) fn host_of(text: &str) -> HostId {
    let byte =
        |index: usize| text.get(2 * index..2 * index + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    HostId(std::array::from_fn(|index| byte(index).unwrap_or(0)))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
