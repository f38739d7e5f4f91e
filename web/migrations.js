// Migrations: running ones as cards with live plots, ended ones as a table with their reports.

import { byId, el, keyed, set, table, text, within } from "./dom.js";
import { buttonsOf, isArrival } from "./orders.js";
import { plots } from "./plot.js";
import * as units from "./units.js";

// Cards that are open at first: more do not fit a screen.
const OPEN_MAX = 3;
// How long a card stays after its migration has ended, in milliseconds.
const LINGER_MS = 60_000;
// Limit of a card's samples: enough for hours, because old ones are joined.
const SAMPLES_MAX = 3000;

// How the reason of a wait begins that an ordered limit causes.
const LIMIT = "its limit of ";

const FILLED = new Set(["three-phase", "post-copy"]);
const ENDED = new Set(["moved", "failed", "cancelled", "handed-back"]);
const STEPS = [
  { name: "queued", phases: ["queued"] },
  { name: "copying", phases: ["copying"] },
  { name: "memory", phases: ["memory"], vm: true },
  { name: "switch-over", phases: ["closing", "preparing", "releasing", "committing"] },
  { name: "filling", phases: ["filling"], filling: true },
  { name: "tidying up", phases: ["retiring", "discarding", "taking-back"] },
];

// The samples and phases of each running migration, by its identity and start.
const courses = new Map();

// What limits a copy, in words.
const LIMITED_BY = { "source-disk": "the source’s disk", "target-disk": "the target’s disk", "source-guests": "the source’s guests",
  "target-guests": "the target’s guests", link: "the link", bandwidth: "its limit", measuring: "a pause to measure guests" };

export function hasEnded(migration) {
  return ENDED.has(migration.state);
}

// Records the daemon's overview. Returns the identity of a migration whose recording should be fetched, or null.
export function see(overview, now) {
  const present = new Set();
  for (const { migration, samples } of overview.migrations) {
    const key = keyOf(migration);
    let course = courses.get(key);
    if (hasEnded(migration) && !course) continue;
    present.add(key);
    if (!course) courses.set(key, course = { samples: new Map(), phases: [], waits: [null, null], asked: false, endedAt: null });
    const newest = Math.max(-Infinity, ...course.samples.keys());
    // The page was hidden for a while: the recording has the samples of that time.
    if (samples.length && newest > -Infinity && samples[0].at_ms > newest + 3000) course.asked = false;
    addSamples(course, samples);
    course.waits = [course.waits[1], migration.waiting_for?.reason ?? null];
    const at = migration.seconds;
    const last = course.phases[course.phases.length - 1];
    if (last?.phase !== migration.phase) course.phases.push({ at, phase: migration.phase });
    if (hasEnded(migration) && course.endedAt === null) {
      // The recording has the switch-over, which is too short for the overviews.
      [course.endedAt, course.asked] = [now, false];
    }
  }
  for (const [key, course] of courses) {
    if (!present.has(key) || (course.endedAt !== null && now - course.endedAt > LINGER_MS)) courses.delete(key);
  }
  const wanting = overview.migrations.find(({ migration, recorded }) => {
    const course = courses.get(keyOf(migration));
    return course && recorded && !course.asked && cards.get(keyOf(migration))?.open;
  });
  if (!wanting) return null;
  courses.get(keyOf(wanting.migration)).asked = true;
  return wanting.migration.id;
}

// Adds the samples of a fetched recording.
export function fillIn(history) {
  const course = courses.get(keyOf(history.migration));
  if (!course || !history.recording) return;
  addSamples(course, history.recording.samples);
  course.phases = history.recording.phases.map(({ at_ms, phase }) => ({ at: at_ms / 1000, phase }));
}

function addSamples(course, samples) {
  for (const sample of samples) course.samples.set(sample.at_ms, new Sample(sample));
  if (course.samples.size > SAMPLES_MAX) {
    const kept = [...course.samples.values()].sort((a, b) => a.at - b.at);
    course.samples = new Map();
    for (let index = 0; index < kept.length; index += 2) {
      const joined = index + 1 < kept.length ? kept[index].join(kept[index + 1]) : kept[index];
      course.samples.set(joined.at * 1000, joined);
    }
  }
}

// The figures of one interval, in seconds and rates.
class Sample {
  constructor({ at_ms, length_ms, median_us, p99_us, worst_us, bytes_copied, bytes_mirrored, bytes_missing }) {
    Object.assign(this, { at: at_ms / 1000, length: length_ms / 1000, median: median_us, p99: p99_us, worst: worst_us,
      copied: bytes_copied, mirrored: bytes_mirrored, missing: bytes_missing ?? null });
  }

  // Returns both as one sample, with the higher latencies.
  join(next) {
    const higher = (a, b) => a === null ? b : b === null ? a : Math.max(a, b);
    const joined = Object.create(Sample.prototype);
    return Object.assign(joined, { at: this.at, length: next.at + next.length - this.at, median: higher(this.median, next.median),
      p99: higher(this.p99, next.p99), worst: higher(this.worst, next.worst), copied: this.copied + next.copied,
      mirrored: this.mirrored + next.mirrored, missing: next.missing ?? this.missing });
  }
}

const keyOf = (migration) => migration.id + "@" + migration.started_unix_ms;
const cards = new Map();

export function show(overview, now) {
  const shown = overview.migrations.filter(({ migration }) => courses.has(keyOf(migration)));
  // The guests' figures are those of volumes. If several volumes move together, the first one's are shown.
  for (const entry of shown) entry.activity = overview.volumes.find((volume) => volume.migration === entry.migration.id)?.activity;
  shown.sort((a, b) => hasEnded(a.migration) - hasEnded(b.migration) || rank(a.migration) - rank(b.migration));
  keyed(byId("running"), shown, ({ migration }) => keyOf(migration), ({ migration }) => {
    const card = makeCard(migration, cards.size < OPEN_MAX);
    cards.set(keyOf(migration), card);
    return card;
  });
  for (const key of cards.keys()) if (!courses.has(key)) cards.delete(key);
  byId("no-migrations").hidden = shown.length > 0;
  const running = overview.migrations.filter(({ migration }) => !hasEnded(migration)).length;
  text(byId("count-migrations"), running);
  text(byId("count-history"), overview.migrations_ended);
  const ended = overview.migrations.filter(({ migration }) => hasEnded(migration));
  showHistory(ended, overview.migrations_ended, now);
}

// Active migrations come before queued ones.
const rank = (migration) => migration.state === "queued" ? 1 : 0;

// The host that counts the copied bytes, if it is another host.
const countedAt = (migration) => isArrival(migration) ? migration.source.store : null;
const place = (location) => location.store ?? "in place";

function makeCard(first, isOpen) {
  const title = el("h3"), state = el("span", { class: "pill" }), outlook = el("span", { class: "outlook" });
  const fill = el("div", { class: "fill" });
  const bar = el("div", { class: "progress", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100,
    "aria-label": "Progress of " + first.id }, fill);
  const steps = el("ol", { class: "steps", "aria-label": "Phases" });
  const waits = el("span"), why = el("p", { class: "why" });
  const figures = el("dl", { class: "figures" });
  const report = el("a", { class: "button", href: `migrations/${encodeURIComponent(first.id)}/report`, target: "_blank", rel: "noopener" },
    "Report so far");
  const chart = plots([
    { title: "Written to the target", stacked: true, binary: true, format: units.rate, series: [
      { name: "copied", class: "copied", value: (sample) => sample.copied / sample.length },
      { name: "guest writes, mirrored", class: "mirrored", value: (sample) => sample.mirrored / sample.length },
    ] },
    { title: "Latency of the guest", scale: "log", format: units.latency, series: [
      { name: "median", class: "median", value: (sample) => sample.median },
      { name: "99 of 100", class: "p99", value: (sample) => sample.p99 },
      { name: "longest", class: "worst", value: (sample) => sample.worst },
    ] },
    { title: "Missing at the target", stacked: true, binary: true, format: units.bytes, series: [
      { name: "missing", class: "missing", value: (sample) => sample.missing },
    ] },
  ]);
  const body = el("div", { class: "body" }, figures, chart.node);
  const button = el("button", { type: "button", class: "fold", "aria-expanded": isOpen });
  const buttons = buttonsOf(first);
  const node = el("article", { class: "card migration", "aria-label": "Migration " + first.id },
    el("header", {}, title, state, outlook, buttons.node, report, button), bar, el("div", { class: "under" }, steps, waits), why, body);
  const card = { node, open: isOpen, update };
  const showFold = () => {
    body.hidden = !card.open;
    set(button, "aria-expanded", String(card.open));
    set(button, "aria-label", card.open ? "Hide plots" : "Show plots");
  };
  button.addEventListener("click", () => { card.open = !card.open; showFold(); });
  showFold();

  function update({ migration, activity }) {
    const course = courses.get(keyOf(migration));
    const ended = hasEnded(migration), elsewhere = countedAt(migration);
    title.replaceChildren(...[el("b", {}, migration.volume), " ", place(migration.source), el("span", { class: "arrow" }, " → "),
      place(migration.target), el("small", {}, " " + migration.id + (migration.machine ? " · with its VM" : "")
        + (migration.strategy === "tracking" ? " · in rounds" : ""))].map((piece) => piece));
    text(state, ended ? migration.state : migration.state === "running" ? migration.phase : migration.state);
    set(state, "class", "pill " + tone(migration));
    set(node, "class", "card migration " + tone(migration));
    const untold = migration.guest === "target" && migration.bytes_missing == null;
    const known = (!elsewhere && !untold) || ended;
    const queued = migration.state === "queued";
    text(outlook, ended ? ending(migration) : queued ? "waits for its turn" : known ? `${units.percent(migration.fraction)}, ${remaining(migration)}` : `${elsewhere ?? place(migration.target)} knows how far it is`);
    fill.style.width = known ? Math.min(100, migration.fraction * 100) + "%" : "0";
    set(bar, "aria-valuenow", known ? Math.floor(migration.fraction * 100) : null);
    set(bar, "class", "progress" + (known ? "" : " unknown"));
    showSteps(steps, migration);
    text(waits, ended ? "" : waiting(migration, course));
    const reason = migration.message ?? (migration.suspended ? "mirroring is suspended: " + migration.suspended : null);
    why.hidden = !reason;
    if (reason) text(why, reason);
    set(why, "class", "why" + (migration.state === "failed" ? " bad" : ""));
    buttons.update(migration);
    text(report, ended ? "Report" : "Report so far");
    report.hidden = queued;
    figures.hidden = queued;
    showFigures(figures, migration, activity);
    if (!card.open) return;
    chart.node.hidden = course.samples.size < 2;
    const samples = [...course.samples.values()].sort((a, b) => a.at - b.at);
    const last = samples[samples.length - 1];
    const to = Math.max(ended ? 0 : migration.seconds, last ? last.at + last.length : 0, 5);
    chart.update(samples, [Math.min(samples[0]?.at ?? 0, 0), to], bands(course, to, ended));
  }
  return card;
}

// Returns the phases other than copying, as shaded intervals.
function bands(course, to, ended) {
  const found = course.phases.map(({ at, phase }, index) => ({ from: at, to: course.phases[index + 1]?.at ?? (ended ? at : to), phase }));
  return found.filter(({ phase }) => !["copying", "queued", "ended"].includes(phase))
    .map(({ from, to, phase }) => ({ from, to, name: STEPS.find((step) => step.phases.includes(phase))?.name.replaceAll(" ", "-") ?? phase }));
}

function showSteps(list, migration) {
  const steps = STEPS.filter((step) => (!step.vm || migration.machine) && (!step.filling || FILLED.has(migration.strategy)));
  const current = steps.findIndex((step) => step.phases.includes(migration.phase));
  const ended = hasEnded(migration);
  keyed(list, steps.map((step, index) => ({ ...step, now: index === current && !ended,
    done: ended ? migration.state === "moved" : index < current })), (step) => step.name, (step) => {
    const node = el("li", {}, step.name);
    return { node, update: ({ now, done }) => { set(node, "class", now ? "now" : done ? "done" : ""); set(node, "aria-current", now ? "step" : null); } };
  });
}

function showFigures(list, migration, activity) {
  const memory = migration.machine?.memory;
  const rows = countedAt(migration) && !hasEnded(migration) ? [["time", units.duration(migration.seconds)]] : [
    ["rate", hasEnded(migration) ? units.rate(migration.bytes_moved / Math.max(migration.seconds, 0.001)) : units.rate(migration.bytes_per_second)],
    ["limited by", LIMITED_BY[migration.limited_by] ?? null],
    ["missing", migration.bytes_missing != null ? units.bytes(migration.bytes_missing) : hasEnded(migration) ? null : "unknown"],
    ["moved", units.bytes(migration.bytes_moved)],
    ["guest’s median", activity ? units.latency(activity.median_us) : null],
    ["99 of 100", activity ? units.latency(activity.p99_us) : null],
    ["time", units.duration(migration.seconds)],
    ["memory left", memory && !hasEnded(migration) ? `${units.bytes(memory.remaining_bytes)}, round ${memory.rounds}` : null],
    ["guest held", migration.switch_over ? units.latency(migration.switch_over.gate_closed_ms * 1000) : null],
    ["VM stood still", migration.machine?.downtime ? units.latency(migration.machine.downtime.total_ms * 1000) : null],
    ["handover", migration.attempt > 1 ? `try ${migration.attempt}` : null],
    ["rounds", migration.rounds?.length ? units.count(migration.rounds.length) : null],
  ];
  keyed(list, rows.filter(([, value]) => value !== null), ([name]) => name, ([name]) => {
    const value = el("dd");
    return { node: el("div", {}, el("dt", {}, name), value), update: ([, told]) => text(value, told) };
  });
}

function ending(migration) {
  const held = migration.switch_over ? `, guest held ${units.latency(migration.switch_over.gate_closed_ms * 1000)}` : "";
  return `in ${units.duration(migration.seconds)}${held}`;
}

function remaining({ remaining_seconds: range }) {
  if (!range) return "time left unknown";
  if (range.latest - range.earliest < 1) return units.duration(range.latest) + " left";
  return `${units.duration(range.earliest)} to ${units.duration(range.latest)} left`;
}

// Describes what a migration waits for, if two samples in a row agree: shorter waits are normal.
function waiting(migration, course) {
  if (migration.queue) return `number ${migration.queue.place} of ${migration.queue.waiting} in the queue: ${migration.queue.reason}`;
  if (!migration.waiting_for || course.waits.some((reason) => reason !== migration.waiting_for.reason)) return "";
  const { reason, remaining_ms: left } = migration.waiting_for;
  if (reason.startsWith(LIMIT)) return "limited to " + reason.slice(LIMIT.length);
  return "waits for " + reason + (left === null || left < 1000 ? "" : ` (at most ${units.duration(left / 1000)} longer)`);
}

export function tone(migration) {
  switch (migration.state) {
    case "moved": return "good";
    case "failed": case "handed-back": return "bad";
    case "running": return "busy";
    default: return "warm";
  }
}

let historyTable = null;

function showHistory(items, all, now) {
  const holder = byId("history-table");
  if (!historyTable) {
    historyTable = table("Migrations that have ended", [
      { name: "Migration", head: true, value: ({ migration }) => migration.id, cell: (cell, { migration }) => text(cell, migration.id) },
      { name: "Volume", value: ({ migration }) => migration.volume, class: "name", cell: (cell, { migration }) => text(cell, migration.volume) },
      { name: "From", value: ({ migration }) => place(migration.source), class: "wide", cell: (cell, { migration }) => text(cell, place(migration.source)) },
      { name: "To", value: ({ migration }) => place(migration.target), cell: (cell, { migration }) => text(cell, place(migration.target)) },
      { name: "Outcome", value: ({ migration }) => migration.state, cell: (cell, { migration }) => {
        const { pill, why, next } = within(cell, () => {
          const pill = el("span"), why = el("small", { class: "reason" }), next = el("small", { class: "reason next" });
          return { pill, why, next, node: [pill, why, next] };
        });
        text(pill, migration.state);
        set(pill, "class", "pill small " + tone(migration));
        set(pill, "title", migration.message);
        text(why, migration.state === "moved" ? "" : migration.message ?? "");
        const repeated = migration.retried_as ? `repeated as ${migration.retried_as}` : `sterna migration retry ${migration.id}`;
        text(next, migration.state === "moved" || isArrival(migration) ? "" : repeated);
      } },
      { name: "Ended", falling: true, value: ({ migration }) => migration.ended_unix_ms ?? 0, class: "wide",
        cell: (cell, { migration }) => text(cell, migration.ended_unix_ms ? units.moment(migration.ended_unix_ms, now) : "–") },
      { name: "Took", falling: true, value: ({ migration }) => migration.seconds, class: "number wide", cell: (cell, { migration }) => text(cell, units.duration(migration.seconds)) },
      { name: "Moved", falling: true, value: ({ migration }) => migration.bytes_moved, class: "number wide",
        cell: (cell, { migration }) => text(cell, countedAt(migration) ? "–" : units.bytes(migration.bytes_moved)) },
      { name: "Guest held", falling: true, value: ({ migration }) => migration.switch_over?.gate_closed_ms ?? -1, class: "number wide",
        cell: (cell, { migration }) => text(cell, migration.switch_over ? units.latency(migration.switch_over.gate_closed_ms * 1000) : "–") },
      { name: "Report", class: "number", cell: (cell, { migration, recorded }) => {
        const link = within(cell, () => el("a", { target: "_blank", rel: "noopener" }));
        set(link, "href", recorded ? `migrations/${encodeURIComponent(migration.id)}/report` : null);
        set(link, "aria-label", recorded ? "Report of " + migration.id : null);
        text(link, recorded ? "report" : "–");
      } },
      { name: "Order", class: "orders", cell: (cell, { migration }) => within(cell, () => buttonsOf(migration)).update(migration) },
    ], ({ migration }) => keyOf(migration), { column: "Ended", falling: true });
    holder.append(historyTable.node, el("p", { class: "empty quiet" }));
  }
  historyTable.node.hidden = items.length === 0;
  historyTable.update(items);
  const rest = all - items.length;
  text(holder.lastChild, items.length === 0 ? "No migration has ended yet."
    : rest > 0 ? `${units.count(rest)} older ones: sterna migration list` : "");
}
