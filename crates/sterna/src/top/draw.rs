//! Draws the screen of `sterna top`.
//!
//! ```text
//!   Sterna rack3-a  ready                                  0.1.0, up 3 min 12 s
//!   requests 1,760/s ▂▃▅▆▇   read 6.9 MiB/s ▂▃▅▆▇   written 6.9 MiB/s ▂▃▅▆▇
//!   ── migrations ─────────────────────────────  two lines each, a third of the screen at most
//!   ── 1 volumes  2 VMs  3 stores  4 hosts  5 history ──  a sheet: as many columns and rows as there is room for
//!   q quit  Tab next  s sort by name  / filter  ? help
//! ```

use std::time::Instant;

use api::{Activity, Migration, Overview};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};
use unicode_width::UnicodeWidthStr as _;

use super::sheet::{self, Cell, Column, Side, Tone};
use super::state::{Keys, Top, View};
use super::words::{self, clean, counted_at, latency, line, place, rate, state};
use crate::output;
use console::units::{bytes, duration};

const MIGRATION_LINES: u16 = 2;
const GAP: usize = 2;
/// Largest width of a column. Names may have 64 letters, but other columns need room as well.
const WIDTH_MAX: usize = 28;
/// The smallest screen that is drawn on.
const LEAST: (u16, u16) = (30, 8);
/// The shortest useful line of figures.
const LINE_WIDTH_MIN: usize = 8;
const BAR_WIDTH: usize = 16;

pub(crate) fn draw(frame: &mut Frame<'_>, top: &mut Top, now: Instant) {
    let area = frame.area();
    if area.width < LEAST.0 || area.height < LEAST.1 {
        frame.render_widget(Paragraph::new("too small: make this window larger"), area);
        return;
    }
    let away = top.away.as_ref().map(|(since, reason)| {
        let since = duration(now.saturating_duration_since(*since).as_secs_f64());
        format!("the daemon does not answer, for {since}; trying again every second: {reason}")
    });
    let Some(overview) = top.latest.take() else {
        let words = away.unwrap_or_else(|| "waiting for the answer of the daemon".to_owned());
        let [text, _, keys] =
            Layout::vertical([Constraint::Length(3), Constraint::Min(0), Constraint::Length(1)]).areas(area);
        frame.render_widget(Paragraph::new(clean(&words)).wrap(ratatui::widgets::Wrap { trim: true }), text);
        frame.render_widget(key_line(top), keys);
        return;
    };
    let migrations = sheet::under_way(&overview);
    let room = (area.height / 3 / MIGRATION_LINES).max(1) as usize;
    let shown = migrations.len().min(room);
    let lines = if migrations.is_empty() { 0 } else { 1 + shown as u16 * MIGRATION_LINES };
    let [head, totals, moving, rest, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(2),
        Constraint::Length(lines),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(head_line(&overview, away.as_deref(), head.width), head);
    frame.render_widget(totals_line(top, totals.width, away.is_some()), totals);
    if lines > 0 {
        draw_migrations(frame, moving, top, &overview, shown);
    }
    draw_sheet(frame, rest, top, &overview);
    frame.render_widget(key_line(top), keys);
    if top.keys == Keys::Help {
        draw_help(frame, area);
    }
    top.latest = Some(overview);
}

fn head_line(overview: &Overview, away: Option<&str>, width: u16) -> Line<'static> {
    if let Some(away) = away {
        return Line::from(Span::styled(clean(away), style(Tone::Bad).add_modifier(Modifier::BOLD)));
    }
    let problems = overview.readiness.problems.len();
    let health = match problems {
        0 => Span::styled("ready", style(Tone::Good)),
        1 => Span::styled("1 problem: ", style(Tone::Warm)),
        count => Span::styled(format!("{count} problems: "), style(Tone::Warm)),
    };
    let first = overview.readiness.problems.first().map(|problem| {
        let named = problem.name.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
        format!("{}{named}: {}", problem.part.name(), problem.message)
    });
    let up = overview.taken_unix_ms.saturating_sub(overview.host.started_unix_ms);
    let about = format!("{}, up {}", overview.host.version, duration(up as f64 / 1000.0));
    let mut spans = vec![
        Span::styled("Sterna ", style(Tone::Quiet)),
        Span::styled(clean(&overview.name), style(Tone::Name)),
        Span::raw("  "),
        health,
    ];
    let used: usize = spans.iter().map(Span::width).sum();
    let room = usize::from(width).saturating_sub(used + about.width() + 2);
    let told = cut(&clean(&first.unwrap_or_default()), room);
    let blanks = " ".repeat(room.saturating_sub(told.width()) + 2);
    spans.extend([
        Span::styled(told, style(Tone::Warm)),
        Span::raw(blanks),
        Span::styled(about, style(Tone::Quiet)),
    ]);
    Line::from(spans)
}

fn totals_line(top: &Top, width: u16, is_away: bool) -> Line<'static> {
    let totals = &top.totals;
    let newest = |figures: &super::state::Figures| figures.back().copied().flatten().filter(|_| !is_away);
    let requests = newest(&totals.requests)
        .map_or_else(|| words::DASH.to_owned(), |rate| format!("{}/s", words::whole(rate)));
    let told = [
        ("requests", requests, &totals.requests, Color::Blue),
        ("read", rate(newest(&totals.read)), &totals.read, Color::Cyan),
        ("written", rate(newest(&totals.written)), &totals.written, Color::Yellow),
    ];
    let room = usize::from(width) / told.len();
    let mut spans = Vec::new();
    for (name, figure, figures, colour) in told {
        let used = name.width() + figure.width() + 2;
        let drawn = room.saturating_sub(used + 2).min(60);
        spans.push(Span::styled(format!("{name} "), style(Tone::Quiet)));
        spans.push(Span::styled(format!("{figure} "), style(Tone::Name)));
        spans.push(Span::styled(line(figures.iter().copied(), drawn), Style::new().fg(colour)));
        spans.push(Span::raw(" ".repeat(room.saturating_sub(used + drawn))));
    }
    Line::from(spans)
}

fn draw_migrations(frame: &mut Frame<'_>, area: Rect, top: &Top, overview: &Overview, shown: usize) {
    let migrations = sheet::under_way(overview);
    let hidden = migrations.len() - shown;
    let more = if hidden > 0 { format!(", {hidden} more") } else { String::new() };
    let mut lines =
        vec![rule(&format!("{} under way{more}", count(migrations.len(), "migration")), area.width)];
    for told in &migrations[..shown] {
        // The latencies of the last second are known for volumes. Of several volumes of a migration, the first counts.
        let volume =
            overview.volumes.iter().find(|volume| volume.migration.as_ref() == Some(&told.migration.id));
        let activity = volume.and_then(|volume| volume.activity.as_ref());
        lines.extend(migration_lines(top, told, activity, usize::from(area.width)));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

fn migration_lines(
    top: &Top,
    told: &api::MigrationAtWork,
    activity: Option<&Activity>,
    width: usize,
) -> [Line<'static>; 2] {
    let migration = &told.migration;
    let (word, tone) = state(migration);
    let what = format!("{} {} → {}", migration.volume, place(&migration.source), place(&migration.target));
    let mut spans = vec![
        Span::styled(format!("{:<4}", migration.id), style(Tone::Quiet)),
        Span::styled(cut(&clean(&what), width.saturating_sub(52).max(18)), style(Tone::Name)),
        Span::raw("  "),
        Span::styled(word, style(tone)),
        Span::raw("  "),
    ];
    match counted_at(migration) {
        Some(host) => {
            spans.push(Span::styled(format!("{} knows how far it is", clean(host)), style(Tone::Quiet)));
        }
        None => {
            let filled = (migration.fraction.clamp(0.0, 1.0) * BAR_WIDTH as f64).floor() as usize;
            spans.push(Span::styled("█".repeat(filled), style(tone)));
            spans.push(Span::styled("░".repeat(BAR_WIDTH - filled), style(Tone::Quiet)));
            spans.push(Span::raw(format!(" {}  {}", output::share(migration), output::remaining(migration))));
        }
    }
    [Line::from(spans), migration_figures(top, migration, activity, width)]
}

fn migration_figures(
    top: &Top,
    migration: &Migration,
    activity: Option<&Activity>,
    width: usize,
) -> Line<'static> {
    let mut spans = vec![Span::raw("    ")];
    let mut add = |name: &str, figure: String| {
        spans.push(Span::styled(format!("{name} "), style(Tone::Quiet)));
        spans.push(Span::raw(format!("{figure}  ")));
    };
    if counted_at(migration).is_none() && migration.state != api::MigrationState::Queued {
        add("rate", rate(Some(migration.bytes_per_second)));
        if let Some(limit) = migration.limited_by {
            add("by", limit.words().to_owned());
        }
        add("missing", output::missing(migration));
    }
    if let Some(activity) = activity {
        add("guest", format!("{} / {}", latency(activity.median_us), latency(activity.p99_us)));
    }
    if let Some(memory) = memory_left(migration) {
        add("memory left", memory);
    }
    let room = |spans: &[Span<'_>]| width.saturating_sub(spans.iter().map(Span::width).sum::<usize>() + 1);
    let waits = words::course(migration);
    let is_worth_a_word =
        migration.queue.is_some() || migration.suspended.is_some() || top.has_waited(&migration.id);
    if !waits.is_empty() && is_worth_a_word {
        let words = cut(&clean(&waits), room(&spans));
        spans.push(Span::styled(format!("{words}  "), style(Tone::Warm)));
    }
    let left = room(&spans);
    if left >= LINE_WIDTH_MIN {
        let drawn = line(top.of_migration(&migration.id), left.min(40));
        spans.push(Span::styled(drawn, Style::new().fg(Color::Magenta)));
    }
    Line::from(spans)
}

fn memory_left(migration: &Migration) -> Option<String> {
    let memory = migration.machine.as_ref()?.memory.as_ref()?;
    Some(format!("{} (round {})", bytes(memory.remaining_bytes), memory.rounds))
}

fn draw_sheet(frame: &mut Frame<'_>, area: Rect, top: &mut Top, overview: &Overview) {
    let [tabs, body] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(area);
    frame.render_widget(tab_line(top, overview, tabs.width), tabs);
    let shown = top.sheet(overview);
    let width = usize::from(body.width);
    if shown.rows.is_empty() {
        let words = Line::from(Span::styled(shown.when_empty, style(Tone::Quiet)));
        frame.render_widget(words, body);
        return;
    }
    let chosen = fitting(&shown.columns, &shown.rows, width);
    let room = usize::from(body.height).saturating_sub(1);
    top.first_row = top.first_row.min(shown.rows.len().saturating_sub(room));
    let used: usize = chosen.iter().map(|(_, width)| width + GAP).sum();
    // The rest of the line shows the volume's requests over time.
    let drawn = if top.view == View::Volumes { width.saturating_sub(used + 1).min(60) } else { 0 };
    let drawn = if drawn < LINE_WIDTH_MIN { 0 } else { drawn };
    let titles = chosen.iter().map(|&(index, width)| {
        let Column { title, side, .. } = &shown.columns[index];
        Span::styled(aligned(title, *side, width), style(Tone::Quiet))
    });
    let mut lines = vec![Line::from(titles.collect::<Vec<_>>())];
    for row in shown.rows.iter().skip(top.first_row).take(room) {
        let mut spans: Vec<_> = chosen
            .iter()
            .map(|&(index, width)| {
                let Cell { text, tone } = &row[index];
                Span::styled(aligned(&clean(text), shown.columns[index].side, width), style(*tone))
            })
            .collect();
        if drawn > 0 {
            let name = row.first().map(|cell| cell.text.as_str()).unwrap_or_default();
            spans.push(Span::styled(line(top.of_volume(name), drawn), Style::new().fg(Color::Blue)));
        }
        lines.push(Line::from(spans));
    }
    frame.render_widget(Paragraph::new(lines), body);
}

/// Returns the columns that fit, by index, with their widths. Columns of the lowest ranks come first.
fn fitting(columns: &[Column], rows: &[Vec<Cell>], room: usize) -> Vec<(usize, usize)> {
    let width_of = |index: usize| {
        let words = rows.iter().map(|row| clean(&row[index].text).width());
        let most = words.chain([columns[index].title.width()]).max().unwrap_or(0);
        // A remark gets the remaining width.
        if columns[index].title.is_empty() { most } else { most.min(WIDTH_MAX) }
    };
    let mut by_rank: Vec<usize> = (0..columns.len()).collect();
    by_rank.sort_by_key(|index| columns[*index].rank);
    let (mut chosen, mut left) = (Vec::new(), room + GAP);
    for index in by_rank {
        let width = width_of(index);
        if width == 0 {
            continue;
        }
        let is_remark = columns[index].title.is_empty();
        let given = if is_remark { width.min(left.saturating_sub(GAP)) } else { width };
        if given + GAP > left || (is_remark && given < width.min(12)) {
            // A column of a higher rank must not replace it.
            break;
        }
        left -= given + GAP;
        chosen.push((index, given));
    }
    chosen.sort_unstable();
    chosen
}

fn tab_line(top: &Top, overview: &Overview, width: u16) -> Line<'static> {
    let mut spans = Vec::new();
    for (number, view) in (1..).zip(View::ALL) {
        let count = match view {
            View::Volumes => overview.volumes.len() as u64,
            View::Vms => overview.vms.len() as u64,
            View::Standbys => overview.standbys.len() as u64,
            View::Stores => overview.stores.len() as u64,
            View::Hosts => overview.peers.len() as u64,
            View::History => overview.migrations_ended,
        };
        let words = format!(" {number} {} {count} ", view.name());
        let chosen = Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD);
        spans.push(Span::styled(words, if view == top.view { chosen } else { style(Tone::Quiet) }));
    }
    if !top.filter.is_empty() || top.keys == Keys::Filter {
        spans.push(Span::styled(format!("  with \"{}\"", clean(&top.filter)), style(Tone::Warm)));
    }
    let used: usize = spans.iter().map(Span::width).sum();
    spans.push(Span::styled("─".repeat(usize::from(width).saturating_sub(used)), style(Tone::Quiet)));
    Line::from(spans)
}

fn key_line(top: &Top) -> Line<'static> {
    if top.keys == Keys::Filter {
        let cursor = Span::styled(" ", Style::new().add_modifier(Modifier::REVERSED));
        let typed = Span::styled(clean(&top.filter), style(Tone::Name));
        return Line::from(vec![
            Span::raw("show only rows with: "),
            typed,
            cursor,
            Span::styled("  Enter keeps it, Esc removes it", style(Tone::Quiet)),
        ]);
    }
    let order = format!("sort: {}{}", top.order.name(), if top.is_reversed { ", reversed" } else { "" });
    let keys = [
        ("q", "quit"),
        ("Tab", "next"),
        ("s", order.as_str()),
        ("r", "reverse"),
        ("/", "filter"),
        ("↑↓", "scroll"),
        ("?", "help"),
    ];
    let spans = keys.iter().flat_map(|(key, meaning)| {
        [
            Span::styled((*key).to_owned(), Style::new().add_modifier(Modifier::BOLD)),
            Span::styled(format!(" {meaning}  "), style(Tone::Quiet)),
        ]
    });
    Line::from(spans.collect::<Vec<_>>())
}

const HELP: [(&str, &str); 9] = [
    ("q, Ctrl-C", "quit"),
    ("Tab, 1 to 5", "volumes, VMs, stores, hosts, history"),
    ("s", "sort volumes by the next column"),
    ("r", "reverse the order"),
    ("/", "show only rows that contain a text"),
    ("Esc", "show all again"),
    ("up, down", "scroll by a row, PgUp and PgDn by ten"),
    ("guest a / b", "latency of half, of 99 of 100 requests"),
    ("99/100", "what 99 of 100 requests did not exceed"),
];

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let lines = HELP.map(|(key, meaning)| {
        Line::from(vec![Span::styled(format!(" {key:<12}"), style(Tone::Name)), Span::raw(meaning)])
    });
    let (width, height) = (60.min(area.width), (HELP.len() as u16 + 2).min(area.height));
    let place =
        Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
    frame.render_widget(Clear, place);
    frame.render_widget(Paragraph::new(Vec::from(lines)).block(Block::bordered().title(" keys ")), place);
}

fn rule(words: &str, width: u16) -> Line<'static> {
    let rest = usize::from(width).saturating_sub(words.width() + 2);
    Line::from(vec![
        Span::styled(format!(" {words} "), Style::new().add_modifier(Modifier::BOLD)),
        Span::styled("─".repeat(rest), style(Tone::Quiet)),
    ])
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// Returns a text aligned to `width` columns, with the gap after it.
fn aligned(text: &str, side: Side, width: usize) -> String {
    let shown = cut(text, width);
    let blanks = " ".repeat(width.saturating_sub(shown.width()));
    let gap = " ".repeat(GAP);
    match side {
        Side::Left => shown + &blanks + &gap,
        Side::Right => blanks + &shown + &gap,
    }
}

fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut shown = String::new();
    for character in text.chars() {
        let next = unicode_width::UnicodeWidthChar::width(character).unwrap_or(0);
        if shown.width() + next + 1 > width {
            break;
        }
        shown.push(character);
    }
    if width > 0 {
        shown.push('…');
    }
    shown
}

/// Uses only the terminal's own sixteen colours, which suit its background.
fn style(tone: Tone) -> Style {
    match tone {
        Tone::Plain => Style::new(),
        Tone::Name => Style::new().add_modifier(Modifier::BOLD),
        Tone::Quiet => Style::new().fg(Color::DarkGray),
        Tone::Good => Style::new().fg(Color::Green),
        Tone::Busy => Style::new().fg(Color::Magenta),
        Tone::Warm => Style::new().fg(Color::Yellow),
        Tone::Bad => Style::new().fg(Color::Red),
    }
}
