//! The section about a VM that moved: its downtime in parts that add up, and the copying of its memory.

use api::{MachineDowntime, MemoryMove, Migration};

use crate::figures::{bytes, latency};

/// Returns the section; empty if no VM moved.
pub(crate) fn section(migration: &Migration) -> String {
    let Some(machine) = &migration.machine else { return String::new() };
    let stood = machine.downtime.as_ref().map(|downtime| stood_still(downtime, migration));
    let memory = machine.memory.as_ref().map(memory);
    if stood.is_none() && memory.is_none() {
        return String::new();
    }
    format!("<section><h2>The VM</h2>{}{}</section>", stood.unwrap_or_default(), memory.unwrap_or_default())
}

fn stood_still(downtime: &MachineDowntime, migration: &Migration) -> String {
    let handover = downtime.handover_ms.max(0.0);
    let disks = migration.switch_over.map_or(0.0, |parts| parts.gate_closed_ms.clamp(0.0, handover));
    let parts = [
        (
            "own",
            "memory",
            downtime.memory_ms.max(0.0),
            "the last of its memory, and its devices: until it was loaded there",
        ),
        ("prepare", "disks", disks, "the handover of its volumes: until their gates opened there"),
        ("start", "start", handover - disks, "its first step there, and the word of that"),
    ];
    let hundredths: Vec<u64> = parts.iter().map(|(_, _, part, _)| (part * 100.0).round() as u64).collect();
    let shown = |count: u64| format!("{}.{:02} ms", count / 100, count % 100);
    let segments: String = parts
        .iter()
        .zip(&hundredths)
        .map(|((class, name, ..), part)| {
            format!(
                "<div class=\"{class}\" style=\"flex-grow:{part}\" title=\"{name}: {}\"></div>",
                shown(*part)
            )
        })
        .collect();
    let rows: String = parts
        .iter()
        .zip(&hundredths)
        .map(|((class, name, _, meaning), part)| {
            format!(
                "<tr><th scope=\"row\"><span class=\"key {class}\"><i></i>{name}</span></th>\
                 <td class=\"number\">{}</td><td>{meaning}</td></tr>",
                shown(*part)
            )
        })
        .collect();
    let whole = hundredths.iter().sum::<u64>();
    format!(
        "<p>It stood still for <b>{}</b>.</p><div class=\"bar parts\" role=\"img\" aria-label=\"parts of the downtime\">\
         {segments}</div><table>{rows}<tr class=\"sum\"><th scope=\"row\">together</th><td class=\"number\">{}</td>\
         <td>from its stand at the source until it was heard to run at the target</td></tr></table>",
        latency(whole as f64 * 10.0),
        shown(whole),
    )
}

fn memory(memory: &MemoryMove) -> String {
    let throttled = match memory.throttle_percent {
        0 => "Its processors were not slowed down for that.".to_owned(),
        percent => {
            format!("Its processors were slowed down by {percent} % in the end, so that it wrote less.")
        }
    };
    let streams =
        if memory.streams > 1 { format!(" over {} streams", memory.streams) } else { String::new() };
    let followed = match memory.post_copy {
        true => " It ran at the target before all of it was there; the rest followed.",
        false => "",
    };
    format!(
        "<p>Of {} of memory <b>{}</b> were sent, in {} {}{streams}: what the guest wrote meanwhile went again. \
         {throttled}{followed}</p>",
        bytes(memory.total_bytes as f64),
        bytes(memory.sent_bytes as f64),
        memory.rounds,
        if memory.rounds == 1 { "round" } else { "rounds" },
    )
}
