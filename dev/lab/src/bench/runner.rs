//! Runs a scenario: its variants in turns, round after round. Prints nothing.
//!
//! ```text
//!   stage ─ set ─ round 1 ─ part ─ point ─ variant 1 │ variant 2 │ variant 3
//!                 round 2 ─ part ─ point ─ variant 2 │ variant 3 │ variant 1     nobody is always first
//!         ─ end
//! ```
//!
//! All variants are measured in one run, so that changes in the VM's speed affect all alike. A ratio is taken between neighbours.

use std::path::Path;
use std::pin::Pin;

use anyhow::Context as _;

use super::Common;
use super::environment::{Environment, Versions};
use super::folder::BenchFolder;
use super::report::{Place, Report, Results, Sample, Section};
use super::tools::{FIO, Tool, check_fio_engines};
use crate::demo::{Bytes, Progress, Signals};

/// What is measured: the parts of a benchmark, and how one round of one variant is played.
pub(super) trait Scenario {
    /// What a turn needs to know of its part, or of its point on the axis.
    type Case: Copy;
    /// What competes.
    type Variant: Copy;
    /// What the turns of a stage share, such as an image or a link.
    type Stage;

    /// Describes the benchmark; fails if the machine lacks something.
    fn about(&self) -> anyhow::Result<About>;

    fn common(&self) -> &Common;

    /// Returns the stages, each with the parts that are played on it in every round.
    fn stages(&self, ground: &Ground<'_>) -> Vec<Vec<Part<Self::Case, Self::Variant>>>;

    /// Makes what the turns of a stage share; `case` is the first one of the stage.
    async fn set(
        &self,
        ground: &Ground<'_>,
        case: Self::Case,
        progress: &mut Progress,
    ) -> anyhow::Result<Self::Stage>;

    /// Plays one round of one variant. Returns a sample for each row that it gives.
    async fn play(
        &self,
        ground: &Ground<'_>,
        stage: &mut Self::Stage,
        turn: Turn<'_, Self::Case, Self::Variant>,
    ) -> anyhow::Result<Vec<Sample>>;

    /// Ends a stage, after its last round or after an error.
    async fn end(
        &self,
        _stage: Self::Stage,
        played: anyhow::Result<()>,
        _progress: &mut Progress,
    ) -> anyhow::Result<()> {
        played
    }
}

/// A benchmark in words and numbers.
pub(super) struct About {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// What is measured, in sentences.
    pub(super) words: String,
    /// Programs that it runs besides Sterna.
    pub(super) tools: &'static [Tool],
    /// Images of the usual size for which there must be room.
    pub(super) images: u64,
    /// The usual number of rounds, and the usual size of an image in bytes.
    pub(super) usual: (u32, u64),
    /// Settings that readers of the JSON need.
    pub(super) settings: serde_json::Value,
}

/// A part of a benchmark: its table, its points, and its variants.
pub(super) struct Part<C, V> {
    pub(super) section: Section,
    /// The cases, each with its place on the part's axis. None: other parts give its rows.
    pub(super) points: Vec<(Option<Place>, C)>,
    pub(super) variants: Vec<(&'static str, V)>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Turn<'a, C, V> {
    pub(super) part: &'a str,
    pub(super) case: C,
    pub(super) variant: V,
    pub(super) round: usize,
}

/// Where everything is measured: a temporary folder, and the sizes of the measurement.
#[derive(Debug)]
pub(super) struct Ground<'a> {
    pub(super) folder: BenchFolder,
    /// The program whose `serve` is measured.
    pub(super) program: &'a Path,
    pub(super) size_bytes: u64,
    pub(super) rounds: u32,
}

/// Runs a scenario. Fails if a program or room is missing, or if a copy differs from its source; the error ends with the
/// server's log. A signal ends it in order, with [`crate::demo::Interrupted`]. The folder is removed before this returns.
pub(super) async fn run<S: Scenario>(
    scenario: &S,
    program: &Path,
    progress: &mut Progress,
) -> anyhow::Result<Report> {
    let About { name, title, words, tools, images, usual: (rounds, size_bytes), settings } =
        scenario.about()?;
    let mut versions = Versions::from([("sterna".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
    for tool in tools {
        versions.insert(tool.program.to_owned(), tool.version().await?);
    }
    if tools.contains(&FIO) {
        check_fio_engines().await?;
    }
    let common = scenario.common();
    let (rounds, size_bytes) = (common.rounds.unwrap_or(rounds), common.size.unwrap_or(size_bytes));
    let folder = BenchFolder::create(common.folder.as_deref(), images, size_bytes)?;
    let environment = Environment::of(folder.root(), versions).await?;
    let ground = Ground { folder, program, size_bytes, rounds };
    let mut signals = Signals::listen()?;
    let played: Pin<Box<dyn Future<Output = _> + '_>> = Box::pin(play(scenario, &ground, progress));
    let played = signals.unless(played).await;
    progress.end();
    let removed = ground.folder.remove();
    let (parts, results) = played?;
    removed?;
    let (results, curves) = results.into_found();
    let lead = format!("Image: {}. Rounds: {rounds}. {words}", Bytes(size_bytes));
    Ok(Report { bench: name, title, lead, environment, size_bytes, rounds, settings, parts, results, curves })
}

async fn play<S: Scenario>(
    scenario: &S,
    ground: &Ground<'_>,
    progress: &mut Progress,
) -> anyhow::Result<(Vec<Section>, Results)> {
    let (mut sections, mut results) = (Vec::new(), Results::of(ground.rounds));
    for parts in scenario.stages(ground) {
        let cases = || parts.iter().flat_map(|part| &part.points);
        let (_, first) = cases().next().context("a stage has no turns")?;
        let mut stage = scenario.set(ground, *first, progress).await?;
        let played = play_stage(scenario, ground, &mut stage, &parts, &mut results, progress).await;
        scenario.end(stage, played, progress).await?;
        for part in parts {
            results.compare(&part.section);
            sections.push(part.section);
        }
    }
    Ok((sections, results))
}

async fn play_stage<S: Scenario>(
    scenario: &S,
    ground: &Ground<'_>,
    stage: &mut S::Stage,
    parts: &[Part<S::Case, S::Variant>],
    results: &mut Results,
    progress: &mut Progress,
) -> anyhow::Result<()> {
    for round in 0..ground.rounds as usize {
        for Part { section, points, variants } in parts {
            let name = &section.name;
            progress.begin(&format!("round {} of {}: {name}", round + 1, ground.rounds));
            for (index, (at, case)) in points.iter().enumerate() {
                for place in 0..variants.len() {
                    let (who, variant) = variants[(place + round) % variants.len()];
                    progress.note(who);
                    progress.advance(
                        (index * variants.len() + place) as f64 / (points.len() * variants.len()) as f64,
                    );
                    let turn = Turn { part: name, case: *case, variant, round };
                    let samples = scenario.play(ground, stage, turn).await;
                    for sample in samples.with_context(|| format!("measure {name} of {who}"))? {
                        results.keep(name, who, *at, round, sample);
                    }
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::bench::metric::{Metric, Unit};

    const SECONDS: Metric = Metric::less("seconds", "SECONDS", Unit::Seconds);

    /// Three variants that only note their turns.
    #[derive(Default)]
    struct Noted {
        common: Common,
        turns: RefCell<Vec<(usize, char)>>,
    }

    impl Scenario for Noted {
        type Case = ();
        type Stage = ();
        type Variant = char;

        fn about(&self) -> anyhow::Result<About> {
            let (words, settings) = (String::new(), serde_json::Value::Null);
            Ok(About { name: "noted", title: "Noted", words, tools: &[], images: 0, usual: (3, 0), settings })
        }

        fn common(&self) -> &Common {
            &self.common
        }

        fn stages(&self, _: &Ground<'_>) -> Vec<Vec<Part<(), char>>> {
            let section = Section { name: "part".to_owned(), ..Section::default() };
            let variants = vec![("a", 'a'), ("b", 'b'), ("c", 'c')];
            vec![vec![Part { section, points: vec![(None, ())], variants }]]
        }

        async fn set(&self, _: &Ground<'_>, (): (), _: &mut Progress) -> anyhow::Result<()> {
            Ok(())
        }

        async fn play(
            &self,
            _: &Ground<'_>,
            (): &mut (),
            turn: Turn<'_, (), char>,
        ) -> anyhow::Result<Vec<Sample>> {
            self.turns.borrow_mut().push((turn.round, turn.variant));
            Ok(vec![Sample::of([(SECONDS, turn.round as f64)])])
        }
    }

    #[tokio::test]
    async fn everybody_has_one_turn_in_each_round_and_each_is_first_once() {
        let parent = tempfile::tempdir().unwrap();
        let common = Common { folder: Some(parent.path().to_owned()), ..Common::default() };
        let noted = Noted { common, ..Noted::default() };
        let report = run(&noted, Path::new("/no/program"), &mut Progress::silent()).await.unwrap();
        let turns = noted.turns.into_inner();
        let order: String = turns.iter().map(|(_, variant)| *variant).collect();
        assert_eq!(order, "abcbcacab");
        let samples = report.results.iter().map(|found| (found.variant.as_str(), &found.summary.samples[..]));
        let expected = [Some(0.0), Some(1.0), Some(2.0)];
        assert_eq!(samples.collect::<Vec<_>>(), [("a", &expected[..]), ("b", &expected), ("c", &expected)]);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0, "nothing may be left behind");
    }
}
