//! Figures 2 and 3 of \[ESX\], and the shares of \[TPM\] §IV-A: how often guests rewrite blocks, and the effect on rounds.

use std::collections::BTreeMap;

use super::figure::Form;
use super::run::Case;
use super::{Column, Experiment, Figure, Point, Sample, Series, Stage};
use crate::bench::guest::Load;
use crate::demo::Progress;

/// Bytes of a counted block: one of the guests' requests.
const BLOCK_BYTES: u64 = 8 << 10;
/// Points of a logarithmic line: enough to look smooth.
const POINTS: usize = 40;

fn loads(case: Case) -> [(&'static str, Case); 2] {
    [("uniform", case), ("zipf", Case { load: Load::zipf(None), ..case })]
}

fn usual(stage: &Stage<'_>) -> Case {
    let size_bytes = stage.options.bench.size_bytes;
    Case { size_bytes, load: super::outstanding::oltp(16), target: stage.options.device, x: 0.0 }
}

/// Measures Figure 2: how often each block was written, and the share of writes to an already written block.
pub(super) async fn rewrites(stage: &mut Stage<'_>, progress: &mut Progress) -> anyhow::Result<Vec<Figure>> {
    let (mut lines, mut shares) = (Vec::new(), Vec::new());
    let span = stage.options.scale.look();
    for (index, (name, case)) in loads(usual(stage)).into_iter().enumerate() {
        progress.note(name);
        progress.advance(index as f64 / 2.0);
        let (requests, span) = stage.only_guest(&case, span).await?;
        let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
        for offset in requests.offsets_written(span) {
            *counts.entry(offset / BLOCK_BYTES).or_default() += 1;
        }
        let writes: u64 = counts.values().sum();
        let share = 100.0 * (writes - counts.len() as u64) as f64 / writes.max(1) as f64;
        shares.push(Series { name: name.to_owned(), points: vec![Point::of(0.0, vec![share]).called("%")] });
        let mut sorted: Vec<u64> = counts.into_values().collect();
        sorted.sort_unstable_by(|one, other| other.cmp(one));
        lines.push(Series { name: name.to_owned(), points: ranks(&sorted) });
    }
    Ok(vec![
        Figure {
            name: "figure-2",
            title: "how often each block was written, the most written first".to_owned(),
            x: "rank",
            y: "writes",
            series: lines,
            paper: Vec::new(),
            note: "The paper: of three disks of a mail server all follow a Zipf-like distribution.",
            form: Form::Logarithmic,
        },
        Figure {
            name: "rewrites",
            title: "writes to a block that had been written".to_owned(),
            x: "load",
            y: "part",
            series: shares,
            paper: Vec::new(),
            note: "[TPM], of whole runs: 11 % building a kernel, 25.2 % a banking server, 35.6 % a disk benchmark. Here: of the few \
                   seconds that were measured, so the shares grow with them.",
            form: Form::Table,
        },
    ])
}

/// Returns some of the ranks, evenly by their logarithm.
fn ranks(sorted: &[u64]) -> Vec<Point> {
    let last = sorted.len().max(1) as f64;
    let rank = |step: usize| last.powf(step as f64 / POINTS as f64).round() as usize;
    let mut ranks: Vec<usize> = (0..=POINTS).map(rank).collect();
    ranks.dedup();
    let at = |rank: usize| Some(Point::of(rank as f64, vec![*sorted.get(rank.checked_sub(1)?)? as f64]));
    ranks.into_iter().filter_map(at).collect()
}

/// Measures Figure 3: the blocks of each round, under both loads, and under one with so many writes that rounds hardly shrink.
pub(super) async fn blocks(stage: &mut Stage<'_>, progress: &mut Progress) -> anyhow::Result<Vec<Figure>> {
    let columns = Column::OF_ROUNDS;
    let mut figures = Vec::new();
    let case = usual(stage);
    let writes = ("zipf, mostly writes", Case { load: Load::zipf_writes(), ..case });
    let names = ["figure-3-uniform", "figure-3-zipf", "figure-3-zipf-writes"];
    for (index, ((name, case), figure)) in loads(case).into_iter().chain([writes]).zip(names).enumerate() {
        let case = Case { x: index as f64, ..case };
        let samples = stage.measure(Experiment::Rounds.name(), &columns, &[case], progress).await?;
        let line = |column: &Column| Series {
            name: column.name.to_owned(),
            points: of_rounds(samples.iter().filter(|sample| sample.column == column.name)),
        };
        figures.push(Figure {
            name: figure,
            title: format!("blocks copied in each round after the first, load: {name}"),
            x: "round",
            y: "blocks / image",
            series: columns.iter().map(line).collect(),
            paper: Vec::new(),
            note: "A part of the image's blocks. The first round copies everything and is left out, as in the paper: there, \
                   incremental tracking halves the next one, and with hot blocks left to the last but one rounds 5 to 10 are not \
                   needed (tracking here; the paper's taller bars are neither). The last is copied while guests are held.",
            form: Form::Table,
        });
    }
    Ok(figures)
}

fn of_rounds<'a>(samples: impl Iterator<Item = &'a Sample>) -> Vec<Point> {
    let mut rounds: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for sample in samples {
        let all = sample.rounds.first().map_or(1, |first| first.blocks.max(1)) as f64;
        for (index, round) in sample.rounds.iter().enumerate().skip(1) {
            rounds.entry(index + 1).or_default().push(round.blocks as f64 / all);
        }
    }
    rounds.into_iter().map(|(round, shares)| Point::of(round as f64, shares)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_go_from_the_most_to_the_least_written() {
        let sorted: Vec<u64> = (1..=1000).rev().collect();
        let points = ranks(&sorted);
        assert_eq!((points[0].x, points[points.len() - 1].x), (1.0, 1000.0));
        assert!(points.windows(2).all(|pair| pair[0].x < pair[1].x));
        assert_eq!(points[points.len() - 1].y.as_ref().map(|y| y.median), Some(1.0));
        assert!(ranks(&[]).is_empty());
    }
}
