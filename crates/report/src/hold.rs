//! The section about the switch-over: the time that guests were held, in parts that add up.

use api::{Migration, SwitchOver};

use crate::figures::latency;

/// Name, class and meaning of each part, in order of time.
const PARTS: [(&str, &str); 5] = [
    ("drain", "waiting for the guest's requests in flight"),
    ("prepare", "flushing both stores; the target's promise becomes durable"),
    ("release", "the release becomes durable: the commit point"),
    ("own", "the new ownership becomes durable"),
    ("start", "the target's store is tried, and the gate opens"),
];

/// Returns the section; empty if there was no switch-over.
pub(crate) fn section(migration: &Migration) -> String {
    let Some(switch_over) = migration.switch_over else { return String::new() };
    let (whole, parts) = shown_parts(&switch_over);
    let hundredths = |count: u64| format!("{}.{:02}", count / 100, count % 100);
    let segments: Vec<String> = PARTS
        .iter()
        .zip(parts)
        .map(|((name, _), part)| {
            format!(
                "<div class=\"{name}\" style=\"flex-grow:{part}\" title=\"{name}: {} ms\"></div>",
                hundredths(part)
            )
        })
        .collect();
    let rows: Vec<String> = PARTS
        .iter()
        .zip(parts)
        .map(|((name, meaning), part)| {
            let percent = (part as f64 * 100.0 / whole.max(1) as f64).round();
            format!(
                "<tr><th scope=\"row\"><span class=\"key {name}\"><i></i>{name}</span></th><td class=\"number\">{} ms</td>\
                 <td class=\"number quiet\">{percent:.0} %</td><td>{meaning}</td></tr>",
                hundredths(part)
            )
        })
        .collect();
    format!(
        "<section><h2>The switch-over</h2><p>New requests of the guest were held for <b>{}</b>, once; none failed because of \
         it.</p><div class=\"bar parts\" role=\"img\" aria-label=\"parts of the switch-over\">{}</div><table>{}<tr class=\"sum\">\
         <th scope=\"row\">together</th><td class=\"number\">{} ms</td><td></td><td>from the first request that was held to \
         the opening of the gate</td></tr></table></section>",
        latency(switch_over.gate_closed_ms * 1000.0),
        segments.concat(),
        rows.concat(),
        hundredths(whole)
    )
}

/// Returns the total and its parts in hundredths of a millisecond. The largest remainders are rounded up, so that the parts add
/// up to the total.
fn shown_parts(switch_over: &SwitchOver) -> (u64, [u64; 5]) {
    let SwitchOver { gate_closed_ms, drain_ms, prepare_ms, release_ms, own_ms, start_ms } = *switch_over;
    let exact = [drain_ms, prepare_ms, release_ms, own_ms, start_ms].map(|part| part.max(0.0) * 100.0);
    let whole = (gate_closed_ms.max(0.0) * 100.0).round() as u64;
    let mut parts = exact.map(|part| part.floor() as u64);
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by(|one, other| exact[*other].fract().total_cmp(&exact[*one].fract()));
    let missing = whole.saturating_sub(parts.iter().sum());
    // More than one for each part is missing only if the daemon's figures do not add up.
    for index in order.into_iter().take(usize::try_from(missing).unwrap_or(0)) {
        parts[index] += 1;
    }
    (parts.iter().sum(), parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_that_are_shown_add_up_to_the_whole_that_is_shown() {
        let switch_over = SwitchOver {
            gate_closed_ms: 1.003,
            drain_ms: 0.004,
            prepare_ms: 0.515,
            release_ms: 0.181,
            own_ms: 0.147,
            start_ms: 0.156,
        };
        let (whole, parts) = shown_parts(&switch_over);
        assert_eq!((whole, parts), (100, [0, 51, 18, 15, 16]));
        assert_eq!(shown_parts(&SwitchOver::default()), (0, [0; 5]));
    }
}
