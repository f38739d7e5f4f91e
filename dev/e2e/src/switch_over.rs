//! Measures switch-overs: how long the lane's gate is closed, and how long a busy client gets no completion.
//!
//! ```text
//!   client:   ─c─c─c─c──c─c───────────c─c─c─c─►      c: a completion
//!                  ├ margin ┼ gate closed ┤
//!                                 └── gap ┘
//!   API:                                  first answer that says "retiring" or "ended"
//! ```
//! The gap is the longest time without a completion that lies, in whole or in part, between the two outer marks. An equal time
//! just before the migration shows the client's usual gaps on the shared machine.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use api::{Client, MigrateVolume, Migration, MigrationState, Phase, SwitchOver, WAIT_MAX_MS, Watch};
use comfy_table::{CellAlignment, Table, presets};
use lab::workload::Recorder;
use testbed::Host;

use crate::guest;

/// Requests of the guest between two migrations, a quarter of a second on a fast machine.
const REQUESTS_BETWEEN: u64 = 5000;

/// A gap that begins this long before the closing of the gate still counts.
const MARGIN: Duration = Duration::from_millis(10);

/// Settings of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Number of migrations, one after the other.
    pub rounds: u32,
    /// Size of the disk in bytes; all of it is filled.
    pub disk_bytes: u64,
}

/// One switch-over.
#[derive(Clone, Copy, Debug)]
pub struct Round {
    /// The lane's own measurement.
    pub gate: SwitchOver,
    /// The client's longest time without a completion around the switch-over.
    pub client_gap: Duration,
    /// The same in an equal time just before the migration.
    pub gap_before: Duration,
    /// Duration of the migration.
    pub migration: Duration,
}

/// All switch-overs of one run; displayed as a table.
#[derive(Clone, Debug)]
pub struct Rounds(Vec<Round>);

/// Moves the volume `v` of a scene to and fro under load, and verifies every block at the end.
///
/// # Errors
/// If a migration fails, or the client has read a wrong byte.
pub fn measure(scene: &Host, settings: Settings) -> anyhow::Result<Rounds> {
    let volume = scene.create_volume(settings.disk_bytes)?;
    let guest = guest::start(&volume.uri.parse()?, settings.disk_bytes)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = Client::new(scene.address()?);
    let mut observed = Vec::new();
    for round in 0..settings.rounds {
        // By then the last migration has ended completely.
        guest::until_worked(&guest, REQUESTS_BETWEEN)?;
        let store = if round % 2 == 0 { "b" } else { "a" };
        let one = runtime.block_on(observe(&client, store));
        observed.push(one.with_context(|| format!("migration {} of {}", round + 1, settings.rounds))?);
        scene.check_place(store)?;
    }
    let recorder = guest::stop_and_verify(guest)?.recorder;
    let rounds = observed.into_iter().map(|one| one.with_gaps(&recorder));
    Ok(Rounds(rounds.collect()))
}

/// A migration as seen from outside.
struct Observed {
    gate: SwitchOver,
    began: Instant,
    /// Time of the last answer with the phase *copying*.
    last_copying: Instant,
    /// Time of the first answer after the gate had opened at the target.
    switched: Instant,
    migration: Duration,
}

impl Observed {
    fn with_gaps(self, recorder: &Recorder) -> Round {
        let Self { gate, began, last_copying, switched, migration } = self;
        // The guest gets nothing after the last completion of the drain. If the answer that ends the window was late, everything
        // counts that was not certainly before the switch-over.
        let nothing = milliseconds(gate.gate_closed_ms - gate.drain_ms);
        let width = milliseconds(gate.gate_closed_ms) + MARGIN;
        let narrow = recorder.longest_stall(switched - width, switched);
        let client_gap =
            if narrow < nothing { recorder.longest_stall(last_copying, switched) } else { narrow };
        Round { gate, client_gap, gap_before: recorder.longest_stall(began - width, began), migration }
    }
}

fn milliseconds(milliseconds: f64) -> Duration {
    Duration::from_secs_f64(milliseconds.max(0.0) / 1000.0)
}

async fn observe(client: &Client, store: &str) -> anyhow::Result<Observed> {
    let order = MigrateVolume::to(store);
    let began = Instant::now();
    let mut migration = client.migrate("v", &order).await?;
    let (mut last_copying, mut switched) = (began, None);
    while !migration.state.has_ended() {
        // The time is taken before the request, because the volume was being copied at some time between request and answer.
        let asked = Instant::now();
        let watch = Watch { after: Some(migration.change), wait_ms: WAIT_MAX_MS };
        migration = client.migration(&migration.id, watch).await?;
        match migration.phase {
            Phase::Copying => last_copying = asked,
            Phase::Retiring | Phase::Ended => _ = switched.get_or_insert_with(Instant::now),
            _ => {}
        }
    }
    check(&migration)?;
    let gate = migration.switch_over.context("the migration has no switch-over")?;
    let switched = switched.unwrap_or_else(Instant::now);
    Ok(Observed {
        gate,
        began,
        last_copying,
        switched,
        migration: Duration::from_secs_f64(migration.seconds),
    })
}

fn check(migration: &Migration) -> anyhow::Result<()> {
    ensure!(migration.state == MigrationState::Moved, "{migration:?}");
    Ok(())
}

impl Rounds {
    /// Returns the switch-overs in order.
    pub fn rounds(&self) -> &[Round] {
        &self.0
    }

    /// Returns the median of a figure.
    pub fn median(&self, figure: impl Fn(&Round) -> f64) -> f64 {
        let mut figures: Vec<f64> = self.0.iter().map(figure).collect();
        figures.sort_by(f64::total_cmp);
        let (Some(low), Some(high)) =
            (figures.get((figures.len().saturating_sub(1)) / 2), figures.get(figures.len() / 2))
        else {
            return f64::NAN;
        };
        (low + high) / 2.0
    }

    /// Returns the maximum of a figure.
    pub fn maximum(&self, figure: impl Fn(&Round) -> f64) -> f64 {
        self.0.iter().map(figure).fold(f64::NAN, f64::max)
    }
}

/// A column of the table: its title, and its figure.
type Column = (&'static str, fn(&Round) -> f64);

/// The columns, in milliseconds except the last.
const COLUMNS: [Column; 9] = [
    ("gate closed", |round| round.gate.gate_closed_ms),
    ("drain", |round| round.gate.drain_ms),
    ("prepare", |round| round.gate.prepare_ms),
    ("release", |round| round.gate.release_ms),
    ("own", |round| round.gate.own_ms),
    ("start", |round| round.gate.start_ms),
    ("client gap", |round| round.client_gap.as_secs_f64() * 1000.0),
    ("gap before", |round| round.gap_before.as_secs_f64() * 1000.0),
    ("migration s", |round| round.migration.as_secs_f64()),
];

impl std::fmt::Display for Rounds {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new();
        table
            .load_preset(presets::NOTHING)
            .set_header(["ms"].into_iter().chain(COLUMNS.map(|(title, _)| title)));
        let row = |title: String, figure: &dyn Fn(fn(&Round) -> f64) -> f64| {
            let cells = COLUMNS.map(|(_, column)| format!("{:.2}", figure(column)));
            [title].into_iter().chain(cells)
        };
        for (index, round) in self.0.iter().enumerate() {
            table.add_row(row((index + 1).to_string(), &|column| column(round)));
        }
        table.add_row(row("median".to_owned(), &|column| self.median(column)));
        table.add_row(row("maximum".to_owned(), &|column| self.maximum(column)));
        for column in table.column_iter_mut() {
            column.set_cell_alignment(CellAlignment::Right);
        }
        write!(formatter, "{table}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(gates_ms: &[f64]) -> Rounds {
        let round = |gate_closed_ms: &f64| Round {
            gate: SwitchOver { gate_closed_ms: *gate_closed_ms, ..SwitchOver::default() },
            client_gap: Duration::ZERO,
            gap_before: Duration::ZERO,
            migration: Duration::ZERO,
        };
        Rounds(gates_ms.iter().map(round).collect())
    }

    #[test]
    fn median_is_the_middle_and_maximum_the_end() {
        let gate = |round: &Round| round.gate.gate_closed_ms;
        assert_eq!(rounds(&[5.0, 1.0, 2.0]).median(gate), 2.0);
        assert_eq!(rounds(&[5.0, 1.0, 2.0, 3.0]).median(gate), 2.5);
        assert_eq!(rounds(&[5.0, 1.0, 2.0, 3.0]).maximum(gate), 5.0);
        assert!(rounds(&[]).median(gate).is_nan());
    }
}
