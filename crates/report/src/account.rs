//! The cost of the migration for its guest, the decisions with reasons, and the account of bytes.

use api::{Decisions, GuestFigures, HistorySample, Migration, Recording};

use crate::course::requests;
use crate::figures::{bytes as show, change, grouped, latency, seconds};
use crate::markup::escape;

/// A guest counts as disrupted while its requests are below this part of its requests before (\[TPM\] §III-A), unless
/// they were as low before.
const DISRUPTED_BELOW: f64 = 0.9;

/// Returns the guest's figures before, during and after the migration.
pub(crate) fn guest(recording: &Recording) -> String {
    let before = recording.before.as_ref();
    let rows = [
        row("before", before, None),
        row("while it ran", recording.during.as_ref(), before),
        row("after", recording.after.as_ref(), before),
    ];
    format!(
        "<section><h2>What the guest felt</h2><table class=\"wide\"><thead><tr><th></th><th class=\"number\">IOPS</th>\
         <th class=\"number\">against before</th><th class=\"number\">throughput</th><th class=\"number\">median</th>\
         <th class=\"number\">99 of 100</th><th class=\"number\">longest</th><th class=\"number\">errors</th></tr></thead>\
         <tbody>{}</tbody></table>{}</section>",
        rows.concat(),
        cost(recording)
    )
}

pub(crate) fn decisions(migration: &Migration, recording: &Recording) -> String {
    let decided = &recording.decisions;
    let mut rows = vec![
        ("strategy", strategy(&recording.strategy)),
        ("copy rate", bandwidth(recording.bandwidth_bytes_per_second)),
        ("guest writes meanwhile", writes(decided)),
        ("writes held", held(decided, recording.mirror_wait_max_ms)),
        (
            "chunks copied",
            format!(
                "{}, of which {} were copied a second time at once, because the guest wrote to them meanwhile",
                grouped(decided.chunks_copied as f64),
                grouped(decided.chunks_copied_again as f64)
            ),
        ),
        ("flushes of the target", format!("{} before the handover", grouped(decided.target_flushes as f64))),
        ("tries at the handover", tries(migration, recording)),
    ];
    if !migration.strategy_reason.is_empty() {
        rows.insert(1, ("chosen by the daemon", format!("because {}", migration.strategy_reason)));
    }
    if decided.writes_answered_late > 0 {
        let late = format!(
            "{}: the guest got its answer before the target had given one, and the blocks were copied again",
            grouped(decided.writes_answered_late as f64)
        );
        rows.push(("writes not waited for", late));
    }
    if decided.target_faults + decided.source_faults > 0 {
        let faults =
            format!("{} of the target, {} of the source", decided.target_faults, decided.source_faults);
        rows.push(("errors met", faults));
    }
    if decided.rounds_given_up > 0 {
        let instead = "the rounds did not converge, and a mirror went on with what was left".to_owned();
        rows.push(("mirrored instead", instead));
    }
    if decided.bytes_followed > 0 {
        let followed = format!(
            "{} were missing when the guest went on at the target; {} of these it waited for, the rest came in the background",
            show(decided.bytes_followed as f64),
            show(decided.bytes_pulled as f64)
        );
        rows.push(("followed after the handover", followed));
    }
    rows.push(("suspensions", suspensions(recording)));
    rows.push(("waited for", waits(recording)));
    let rows: Vec<String> = rows
        .iter()
        .map(|(name, text)| format!("<tr><th scope=\"row\">{name}</th><td>{text}</td></tr>"))
        .collect();
    format!(
        "<section><h2>What was decided, and why</h2><table class=\"facts\">{}</table></section>",
        rows.concat()
    )
}

pub(crate) fn volume(migration: &Migration, recording: Option<&Recording>) -> String {
    let (copied, zero) = (migration.bytes_copied as f64, migration.bytes_zero as f64);
    let mut text = format!(
        "<p><b>{}</b> were written to the target: {} copied from the source, {} of guest writes mirrored. {} were found to \
         be zero and left as holes.",
        show(migration.bytes_moved as f64),
        show(copied),
        show(migration.bytes_mirrored as f64),
        show(zero),
    );
    if migration.shared {
        text += " They went straight to a store that both hosts can open: the link carried control only.";
    }
    if let Some(replica) = &migration.replica {
        text += &format!(
            " The other host had an image of an earlier stay: of the {} that the volume held, {} were there already.",
            show(replica.bytes_held as f64),
            show(replica.bytes_spared as f64),
        );
    }
    let mut bar = String::new();
    if let Some(size) = recording.map(|recording| recording.size_bytes as f64).filter(|size| *size > 0.0) {
        text += &format!(" The volume has {}.", show(size));
        if copied + zero <= size {
            let rest = size - copied - zero;
            let part = |class: &str, name: &str, count: f64| {
                format!(
                    "<div class=\"{class}\" style=\"flex-grow:{:.0}\" title=\"{name}: {}\"></div>",
                    count / 4096.0,
                    show(count)
                )
            };
            let key = |class: &str, name: &str, count: f64| {
                format!("<span class=\"key {class}\"><i></i>{name} {}</span>", show(count))
            };
            let parts =
                [("copied", "copied", copied), ("zero", "zeroes", zero), ("rest", "not allocated", rest)];
            let parts = if migration.state.has_ended() {
                parts
            } else {
                [parts[0], parts[1], ("rest", "not looked at yet", rest)]
            };
            bar = format!(
                "<div class=\"bar\" role=\"img\" aria-label=\"parts of the volume\">{}</div><p class=\"legend\">{}</p>",
                parts.iter().map(|(class, name, count)| part(class, name, *count)).collect::<String>(),
                parts.iter().map(|(class, name, count)| key(class, name, *count)).collect::<String>(),
            );
        } else {
            text += " Blocks that the guest wrote to while they were copied were copied again, so more was copied than that.";
        }
    }
    format!("<section><h2>The bytes</h2>{text}</p>{bar}</section>")
}

fn row(name: &str, figures: Option<&GuestFigures>, before: Option<&GuestFigures>) -> String {
    let Some(figures) = figures else {
        return format!(
            "<tr><th scope=\"row\">{name}</th><td class=\"quiet\" colspan=\"7\">not recorded</td></tr>"
        );
    };
    let time = |micros: Option<u64>| micros.map_or_else(|| "—".to_owned(), |micros| latency(micros as f64));
    let against = before.and_then(|before| change(before.iops, figures.iops)).unwrap_or_default();
    let cells = [
        grouped(figures.iops),
        against,
        format!("{}/s", show(figures.bytes_per_second)),
        time(figures.median_us),
        time(figures.p99_us),
        time(figures.worst_us),
        figures.errors.to_string(),
    ];
    let cells: Vec<String> = cells.iter().map(|cell| format!("<td class=\"number\">{cell}</td>")).collect();
    let length = seconds(figures.seconds);
    format!("<tr><th scope=\"row\">{name} <small>{length}</small></th>{}</tr>", cells.concat())
}

/// Returns loss and disruption, if there are figures to compare with.
fn cost(recording: &Recording) -> String {
    let (Some(before), Some(during)) = (&recording.before, &recording.during) else {
        return "<p class=\"quiet\">There is nothing to compare with.</p>".to_owned();
    };
    if before.iops < 1.0 {
        return "<p class=\"quiet\">The guest was idle before, so there is nothing to compare with.</p>"
            .to_owned();
    }
    let lost = (1.0 - during.iops / before.iops).max(0.0);
    format!(
        "<dl class=\"cost\"><div><dt>share lost</dt><dd>{:.0} %</dd><dd>of the guest's requests a second while it ran</dd></div>\
         <div><dt>time × loss</dt><dd>{}</dd><dd>of the guest's work at its former pace</dd></div>\
         <div><dt>disruption</dt><dd>{}</dd><dd>altogether below nine tenths of the pace before, and below its slowest sample then</dd></div></dl>",
        lost * 100.0,
        seconds(lost * during.seconds),
        seconds(disrupted_seconds(recording, before.iops))
    )
}

/// Returns how long the guest was disrupted, from the start of the migration on.
fn disrupted_seconds(recording: &Recording, iops_before: f64) -> f64 {
    let (before, since): (Vec<_>, Vec<_>) = recording.samples.iter().partition(|sample| sample.at_ms < 0.0);
    let slowest = before.into_iter().map(iops).fold(f64::INFINITY, f64::min);
    let limit = slowest.min(iops_before * DISRUPTED_BELOW);
    since.into_iter().filter(|sample| iops(sample) < limit).map(|sample| sample.length_ms / 1000.0).sum()
}

fn iops(sample: &HistorySample) -> f64 {
    requests(sample) as f64 * 1000.0 / sample.length_ms
}

fn strategy(name: &str) -> String {
    match name {
        "mirror" => "IO mirroring: one pass over the allocated blocks, while guest writes to what is copied already go to \
                     both stores"
            .to_owned(),
        "tracking" => "dirty block tracking: rounds, each of which copies what guests wrote in the one before; what is left in the \
                       end is copied while they are held"
            .to_owned(),
        "three-phase" => "three phases: a few rounds, as by dirty block tracking; then the volume changes hands, and what is missing \
                          follows it"
            .to_owned(),
        "post-copy" => "post-copy: the volume changes hands at once, and what it holds follows it, what guests read first"
            .to_owned(),
        other => escape(other),
    }
}

fn bandwidth(limit: Option<u64>) -> String {
    match limit {
        Some(limit) => format!("at most {}/s, as ordered", show(limit as f64)),
        None => "as fast as it went: no limit was ordered".to_owned(),
    }
}

fn writes(decided: &Decisions) -> String {
    let Decisions { writes_mirrored, writes_in_part, writes_source_only, .. } = *decided;
    let all = writes_mirrored + writes_in_part + writes_source_only;
    if all == 0 {
        return "none".to_owned();
    }
    let parts = [
        ("mirrored", "to both stores", writes_mirrored),
        ("part", "to both in part", writes_in_part),
        ("alone", "to the source only, copied later", writes_source_only),
    ];
    let segments = parts.map(|(class, name, count)| {
        format!(
            "<div class=\"{class}\" style=\"flex-grow:{count}\" title=\"{name}: {}\"></div>",
            grouped(count as f64)
        )
    });
    let keys = parts.map(|(class, name, count)| {
        format!("<span class=\"key {class}\"><i></i>{} {name}</span>", grouped(count as f64))
    });
    format!(
        "{}<div class=\"bar thin\" role=\"img\" aria-label=\"where guest writes went\">{}</div><span class=\"legend\">{}</span>",
        grouped(all as f64),
        segments.concat(),
        keys.concat()
    )
}

fn held(decided: &Decisions, wait_max_ms: f64) -> String {
    let limit = latency(wait_max_ms * 1000.0);
    if decided.writes_held == 0 {
        return format!("none; the limit is {limit}");
    }
    format!(
        "{}, the longest for {} (the limit is {limit}): the blocks were being copied a second time, or an earlier write to \
         them was on its way to both stores",
        grouped(decided.writes_held as f64),
        latency(decided.held_longest_ms * 1000.0)
    )
}

fn tries(migration: &Migration, recording: &Recording) -> String {
    let begun = recording.phases.iter().filter(|entered| entered.phase == api::Phase::Closing).count();
    match (migration.attempt, begun) {
        (0, _) => "none".to_owned(),
        (1, _) if migration.switch_over.is_some() => "1, which succeeded".to_owned(),
        (tries, begun) => format!("{tries}; the gates were closed in {begun} of them"),
    }
}

fn suspensions(recording: &Recording) -> String {
    if recording.suspensions.is_empty() {
        return match recording.decisions.suspensions {
            0 => "none: the target kept up".to_owned(),
            count => format!("{count}, too short to be seen in a sample"),
        };
    }
    let line = |suspension: &api::Suspension| {
        let at = seconds(suspension.at_ms / 1000.0);
        let length = suspension.ended_ms.map(|ended| seconds((ended - suspension.at_ms) / 1000.0));
        let length = length.map_or_else(|| "to the end".to_owned(), |length| format!("for about {length}"));
        format!("<li>after {at}, {length}: {}</li>", escape(&suspension.reason))
    };
    format!("<ul>{}</ul>", recording.suspensions.iter().map(line).collect::<String>())
}

fn waits(recording: &Recording) -> String {
    if recording.waits.is_empty() {
        return "nothing".to_owned();
    }
    let line = |wait: &api::Waited| {
        format!("<li>{}: about {}</li>", escape(&wait.reason), seconds(wait.total_ms / 1000.0))
    };
    format!("<ul>{}</ul>", recording.waits.iter().map(line).collect::<String>())
}
