//! The state of `sterna top`: the latest overview, the history of figures, and the user's view.
//!
//! ```text
//!   told ──► see ──┐                       ┌─► draw
//!   no answer ──► lose ──► Top ◄── press ──┤
//!                                          └─► quit
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use api::{Activity, Overview, VolumeAtWork};
use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::sheet::{self, Order, Sheet};

/// Largest number of figures that are kept for a line: the width of a wide screen.
const LOOKS_MAX: usize = 240;
/// Largest length of a filter, longer than any name.
const FILTER_MAX: usize = 64;

/// Everything that the screen shows.
pub(crate) struct Top {
    /// The latest overview; `None`: there is none yet.
    pub(crate) latest: Option<Overview>,
    /// Since when the daemon does not answer, and why; `None` while it does.
    pub(crate) away: Option<(Instant, String)>,
    /// Figures of all guests together.
    pub(crate) totals: Totals,
    volumes: BTreeMap<String, Figures>,
    /// Copy rate of each migration under way.
    migrations: BTreeMap<String, Figures>,
    /// The reason of each migration's wait in the latest two overviews.
    waits: BTreeMap<String, [Option<String>; 2]>,
    /// The table in the lower part.
    pub(crate) view: View,
    pub(crate) order: Order,
    pub(crate) is_reversed: bool,
    /// The text that a row must contain to be shown.
    pub(crate) filter: String,
    pub(crate) keys: Keys,
    pub(crate) first_row: usize,
}

/// Figures that are drawn as a line.
pub(crate) type Figures = VecDeque<Option<f64>>;

/// Figures of all guests together over time.
#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) requests: Figures,
    pub(crate) read: Figures,
    pub(crate) written: Figures,
}

/// The table in the lower part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    Volumes,
    Vms,
    Standbys,
    Stores,
    Hosts,
    History,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    Commands,
    /// Keys are letters of the filter.
    Filter,
    /// Any key closes the help.
    Help,
}

/// What follows after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    GoOn,
    Quit,
}

impl View {
    pub(crate) const ALL: [Self; 6] =
        [Self::Volumes, Self::Vms, Self::Standbys, Self::Stores, Self::Hosts, Self::History];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Volumes => "volumes",
            Self::Vms => "VMs",
            Self::Standbys => "standbys",
            Self::Stores => "stores",
            Self::Hosts => "hosts",
            Self::History => "history",
        }
    }
}

impl Top {
    pub(crate) fn new() -> Self {
        Self {
            latest: None,
            away: None,
            totals: Totals::default(),
            volumes: BTreeMap::new(),
            migrations: BTreeMap::new(),
            waits: BTreeMap::new(),
            view: View::Volumes,
            order: Order::Name,
            is_reversed: false,
            filter: String::new(),
            keys: Keys::Commands,
            first_row: 0,
        }
    }

    /// Takes an overview of the daemon.
    pub(crate) fn see(&mut self, overview: Overview) {
        self.away = None;
        // The same overview must not count twice.
        if self.latest.as_ref().is_some_and(|latest| latest.taken_unix_ms == overview.taken_unix_ms) {
            return;
        }
        let known: Vec<&Activity> =
            overview.volumes.iter().filter_map(|volume| volume.activity.as_ref()).collect();
        let is_known = !known.is_empty() || overview.volumes.is_empty();
        let sum =
            |of: fn(&Activity) -> f64| is_known.then(|| known.iter().map(|activity| of(activity)).sum());
        push(&mut self.totals.requests, sum(Activity::requests_per_second));
        push(&mut self.totals.read, sum(|activity| activity.bytes_read_per_second));
        push(&mut self.totals.written, sum(|activity| activity.bytes_written_per_second));
        let volumes = overview
            .volumes
            .iter()
            .map(|volume| (volume.name.clone(), volume.activity.as_ref().map(Activity::requests_per_second)));
        remember(&mut self.volumes, volumes.collect());
        let migrations = sheet::under_way(&overview).into_iter().map(|told| {
            let migration = &told.migration;
            (migration.id.clone(), Some(migration.bytes_per_second))
        });
        remember(&mut self.migrations, migrations.collect());
        let waits = sheet::under_way(&overview).into_iter().map(|told| {
            let migration = &told.migration;
            let before = self.waits.get(&migration.id).and_then(|[_, latest]| latest.clone());
            let now = migration.waiting_for.as_ref().map(|waiting| waiting.reason.clone());
            (migration.id.clone(), [before, now])
        });
        self.waits = waits.collect();
        self.latest = Some(overview);
    }

    /// Returns whether a migration has the same wait in two overviews. Shorter waits are normal.
    pub(crate) fn has_waited(&self, id: &str) -> bool {
        self.waits.get(id).is_some_and(|[before, now]| now.is_some() && before == now)
    }

    pub(crate) fn lose(&mut self, reason: String, now: Instant) {
        let since = self.away.as_ref().map_or(now, |(since, _)| *since);
        if self.away.replace((since, reason)).is_none() {
            let totals = [&mut self.totals.requests, &mut self.totals.read, &mut self.totals.written];
            let all = self.volumes.values_mut().chain(self.migrations.values_mut()).chain(totals);
            all.for_each(|figures| push(figures, None));
        }
    }

    pub(crate) fn press(&mut self, key: KeyEvent) -> Next {
        if key.kind == KeyEventKind::Release {
            return Next::GoOn;
        }
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        if is_control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return Next::Quit;
        }
        match self.keys {
            Keys::Help => self.keys = Keys::Commands,
            Keys::Filter => self.type_filter(key.code),
            Keys::Commands => return self.command(key.code),
        }
        Next::GoOn
    }

    pub(crate) fn of_migration(&self, id: &str) -> impl DoubleEndedIterator<Item = Option<f64>> + Clone + '_ {
        self.migrations.get(id).into_iter().flatten().copied()
    }

    pub(crate) fn of_volume(&self, name: &str) -> impl DoubleEndedIterator<Item = Option<f64>> + Clone + '_ {
        self.volumes.get(name).into_iter().flatten().copied()
    }

    /// Returns the table of the lower part, after the filter.
    pub(crate) fn sheet(&self, overview: &Overview) -> Sheet {
        let mut shown = match self.view {
            View::Volumes => sheet::volumes(&self.volumes_in_order(overview)),
            View::Vms => sheet::vms(overview),
            View::Standbys => sheet::standbys(&overview.standbys),
            View::Stores => sheet::stores(&overview.stores.iter().collect::<Vec<_>>()),
            View::Hosts => sheet::hosts(&overview.peers.iter().collect::<Vec<_>>()),
            View::History => sheet::migrations(&sheet::ended(overview)),
        };
        let wanted = self.filter.to_lowercase();
        if !wanted.is_empty() {
            shown.rows.retain(|row| row.iter().any(|cell| cell.text.to_lowercase().contains(&wanted)));
            shown.when_empty = "no row contains that; Esc removes the filter";
        }
        shown
    }

    fn volumes_in_order<'a>(&self, overview: &'a Overview) -> Vec<&'a VolumeAtWork> {
        let mut volumes: Vec<_> = overview.volumes.iter().collect();
        sheet::sort(&mut volumes, self.order, self.is_reversed);
        volumes
    }

    fn command(&mut self, code: KeyCode) -> Next {
        match code {
            KeyCode::Char('q') => return Next::Quit,
            KeyCode::Esc => {
                self.filter.clear();
                self.first_row = 0;
            }
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.keys = Keys::Help,
            KeyCode::Char('/') => self.keys = Keys::Filter,
            KeyCode::Char('s') => {
                self.order = following(&Order::ALL, self.order);
                (self.view, self.is_reversed) = (View::Volumes, false);
            }
            KeyCode::Char('r') => self.is_reversed = !self.is_reversed,
            KeyCode::Tab | KeyCode::Right => self.turn_to(following(&View::ALL, self.view)),
            KeyCode::BackTab | KeyCode::Left => {
                let mut backwards = View::ALL;
                backwards.reverse();
                self.turn_to(following(&backwards, self.view));
            }
            KeyCode::Char(digit @ '1'..='6') => self.turn_to(View::ALL[digit as usize - '1' as usize]),
            KeyCode::Down | KeyCode::Char('j') => self.first_row += 1,
            KeyCode::Up | KeyCode::Char('k') => self.first_row = self.first_row.saturating_sub(1),
            KeyCode::PageDown | KeyCode::Char(' ') => self.first_row += 10,
            KeyCode::PageUp => self.first_row = self.first_row.saturating_sub(10),
            KeyCode::Home | KeyCode::Char('g') => self.first_row = 0,
            // The drawing limits this to the last page.
            KeyCode::End | KeyCode::Char('G') => self.first_row = usize::MAX / 2,
            _ => {}
        }
        Next::GoOn
    }

    fn type_filter(&mut self, code: KeyCode) {
        self.first_row = 0;
        match code {
            KeyCode::Enter => self.keys = Keys::Commands,
            KeyCode::Esc => {
                self.filter.clear();
                self.keys = Keys::Commands;
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(letter) if self.filter.chars().count() < FILTER_MAX => self.filter.push(letter),
            _ => {}
        }
    }

    fn turn_to(&mut self, view: View) {
        (self.view, self.first_row) = (view, 0);
    }
}

/// Returns the item after `now`, or the first.
fn following<T: Copy + PartialEq>(all: &[T], now: T) -> T {
    let index = all.iter().position(|one| *one == now).map_or(0, |index| (index + 1) % all.len());
    all[index]
}

fn push(figures: &mut Figures, figure: Option<f64>) {
    figures.push_back(figure);
    if figures.len() > LOOKS_MAX {
        figures.pop_front();
    }
}

/// Adds a figure for each reported name, and forgets the other names.
fn remember(known: &mut BTreeMap<String, Figures>, told: Vec<(String, Option<f64>)>) {
    known.retain(|name, _| told.iter().any(|(present, _)| present == name));
    for (name, figure) in told {
        push(known.entry(name).or_default(), figure);
    }
}
