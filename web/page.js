// Fetches the host's overview from the daemon once a second, while the page is visible, and shows it.
//
//   overview ──► migrations.see, inventory.see: what is remembered ──► show: what is drawn
//       └─ no answer ──► "not reachable", asked again until there is one

import { byId, el, set, text } from "./dom.js";
import * as inventory from "./inventory.js";
import * as migrations from "./migrations.js";
import * as orders from "./orders.js";
import * as units from "./units.js";

// Interval between two requests while the daemon answers, and the longest one while it does not, in milliseconds.
const INTERVAL_MS = 1000, RETRY_MAX_MS = 5000;
// Deadline of an answer.
const ANSWER_MAX_MS = 10_000;

let latest = null, seenVersion = null, seenStart = null, lostAt = null, retryMs = INTERVAL_MS, timer = null, asking = false;
let wantedHistory = null;

async function ask(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(ANSWER_MAX_MS), cache: "no-store", credentials: "omit" });
  if (!answer.ok) throw new Error(`the daemon answered with status ${answer.status}`);
  return answer.json();
}

async function turn() {
  timer = null;
  if (asking || document.hidden) return;
  asking = true;
  try {
    // Each turn makes one request: a recording is fetched instead of an overview.
    if (wantedHistory) {
      const id = wantedHistory;
      wantedHistory = null;
      const history = await ask(`migrations/${encodeURIComponent(id)}/history`).catch(() => null);
      if (history) migrations.fillIn(history);
    }
    else take(await ask("overview"));
  } catch (error) {
    lose(error);
  }
  asking = false;
  timer ??= setTimeout(turn, lostAt === null ? INTERVAL_MS : retryMs);
  if (latest && lostAt === null) show();
}

function take(overview) {
  // Another version of the daemon has another page.
  if (seenVersion !== null && seenVersion !== overview.host.version) return location.reload();
  if (lostAt !== null) {
    inventory.interrupt();
    say(seenStart === overview.host.started_unix_ms ? "the daemon answers again" : "the daemon answers again: it was restarted");
  }
  // A restart signs out all browsers.
  if (seenStart !== null && seenStart !== overview.host.started_unix_ms) orders.check();
  [seenVersion, seenStart] = [overview.host.version, overview.host.started_unix_ms];
  [lostAt, retryMs] = [null, INTERVAL_MS];
  announce(overview);
  if (latest?.taken_unix_ms !== overview.taken_unix_ms) inventory.see(overview);
  latest = overview;
  wantedHistory = migrations.see(overview, Date.now());
}

function lose(error) {
  if (lostAt === null) say("the daemon does not answer");
  lostAt ??= Date.now();
  retryMs = Math.min(RETRY_MAX_MS, retryMs * 1.5);
  const reason = error.name === "TimeoutError" ? "it takes too long to answer" : error.message;
  const stale = latest ? " What is shown is how it was before." : "";
  const away = byId("away");
  away.hidden = false;
  text(away, `The daemon is not reachable, and is asked again every few seconds.${stale} (${reason}; for ${units.duration((Date.now() - lostAt) / 1000)})`);
  set(document.body, "class", "stale");
  const health = byId("health");
  text(health, "not reachable");
  set(health, "class", "pill bad");
}

// Announces changes to screen readers.
function announce(overview) {
  if (!latest) return;
  const before = new Map(latest.migrations.map(({ migration }) => [migration.id, migration.state]));
  for (const { migration } of overview.migrations) {
    const was = before.get(migration.id);
    if (was === migration.state) continue;
    if (migrations.hasEnded(migration) && was !== undefined) say(`migration ${migration.id} of ${migration.volume}: ${migration.state}`);
    else if (was === undefined && !migrations.hasEnded(migration)) say(`migration ${migration.id} of ${migration.volume} has begun`);
  }
}

function say(words) {
  text(byId("news"), words);
}

function show() {
  byId("away").hidden = true;
  set(document.body, "class", null);
  set(byId("content"), "aria-busy", null);
  text(byId("host"), latest.name);
  document.title = latest.name + " · Sterna";
  const now = Date.now();
  text(byId("about"), `${latest.host.version} · up ${units.duration(Math.max(0, (latest.taken_unix_ms - latest.host.started_unix_ms) / 1000))}`);
  showHealth(latest.readiness);
  inventory.show(latest);
  migrations.show(latest, now);
}

function showHealth({ ready, problems, warnings }) {
  const health = byId("health"), list = byId("problems");
  const count = (all, what) => `${all.length} ${what}${all.length === 1 ? "" : "s"}`;
  text(health, !ready ? count(problems, "problem") : warnings.length ? `ready, ${count(warnings, "warning")}` : "ready");
  set(health, "class", "pill " + (!ready ? "bad" : warnings.length ? "warm" : "good"));
  list.hidden = ready && warnings.length === 0;
  const lines = [...problems, ...warnings].map(({ part, name, message }) => `${part}${name ? " " + name : ""}: ${message}`);
  if (list.told === lines.join("\n")) return;
  list.told = lines.join("\n");
  list.replaceChildren(el("ul", {}, lines.map((line) => el("li", {}, line))));
}

// The theme: light, dark, or the system's.
function themes() {
  const button = byId("theme"), choices = ["auto", "light", "dark"];
  const words = { auto: ["◐", "Auto"], light: ["☀", "Light"], dark: ["☾", "Dark"] };
  let theme = "auto";
  try { theme = localStorage.getItem("sterna-theme") ?? "auto"; } catch { /* It is not remembered then. */ }
  if (!choices.includes(theme)) theme = "auto";
  const wear = () => {
    set(document.documentElement, "data-theme", theme === "auto" ? null : theme);
    const [sign, word] = words[theme];
    button.replaceChildren(sign, el("span", {}, " " + word));
    set(button, "aria-label", `Colours: ${theme}. Change`);
  };
  button.addEventListener("click", () => {
    theme = choices[(choices.indexOf(theme) + 1) % choices.length];
    try { localStorage.setItem("sterna-theme", theme); } catch { /* As above. */ }
    wear();
  });
  wear();
}

themes();
orders.begin(() => { if (latest && lostAt === null) show(); });
byId("filter").addEventListener("input", () => { if (latest) inventory.show(latest); });
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return inventory.interrupt();
  clearTimeout(timer);
  turn();
});
turn();
