// Orders: signing in by the link of `sterna page`, and the buttons of a browser that has signed in.
//
//   link ─► key in the address ─► session: token, role ─► buttons ─► order, with the token
//                                                            └─ migrate: first the dry run, then the same order
//
// The daemon decides for each order whether this browser may give it; without a sign-in there are no buttons.

import { byId, el, set, text, within } from "./dom.js";
import * as units from "./units.js";

const STORED = "sterna-token", KEY = "#sign-in=";
// Deadline of an answer: the preflight check asks the other host.
const ANSWER_MAX_MS = 60_000;
// From these phases on a migration cannot be cancelled.
const COMMITTED = new Set(["releasing", "committing", "filling", "retiring", "taking-back"]);

let token = null, role = null, renew = () => {};

// Signs in if the address has a key, or if this tab has done so before. `changed` is called when the rights have changed.
export async function begin(changed) {
  renew = changed;
  byId("sign-out").addEventListener("click", signOut);
  byId("dismiss").addEventListener("click", () => { byId("told").hidden = true; });
  // A link may be pasted into a tab that has the page already.
  addEventListener("hashchange", signIn);
  token = stored();
  if (!await signIn() && token) await check();
}

// Returns whether this browser may give orders.
export function may() {
  return role === "operate" || role === "admin";
}

// Asks the daemon for the rights of this browser again: they end with a restart, or when they are revoked.
export async function check() {
  if (!token) return;
  try {
    become((await send("GET", "session")).role);
  } catch (error) {
    // Without an answer nothing is known.
    if (error.status === undefined) return;
    forget();
    say("This browser is signed out: " + error.message, true);
  }
}

async function signIn() {
  if (!location.hash.startsWith(KEY)) return false;
  const key = location.hash.slice(KEY.length);
  // The key does not stay in the browser's history.
  history.replaceState(null, "", location.pathname + location.search);
  try {
    const session = await send("POST", "session", { key });
    token = session.token;
    try { sessionStorage.setItem(STORED, token); } catch { /* It is forgotten at the next reload then. */ }
    become(session.role);
    say(may() ? `Signed in with the role ${role}.` : `Signed in with the role ${role}, which gives no orders.`);
  } catch (error) {
    say("Signing in failed: " + error.message, true);
  }
  return true;
}

async function signOut() {
  await send("DELETE", "session").catch(() => null);
  forget();
}

function forget() {
  token = null;
  try { sessionStorage.removeItem(STORED); } catch { /* There is nothing stored then. */ }
  become(null);
}

function stored() {
  try { return sessionStorage.getItem(STORED); } catch { return null; }
}

function become(now) {
  role = now;
  set(document.body, "data-role", may() ? "operate" : null);
  text(byId("rights"), role ? `This browser is signed in with the role ${role}.` : "Read-only: the command sterna page prints a link that adds buttons.");
  byId("sign-out").hidden = !role;
  renew();
}

async function send(method, path, body) {
  const headers = token ? { Authorization: "Bearer " + token } : {};
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal: AbortSignal.timeout(ANSWER_MAX_MS),
    cache: "no-store", credentials: "omit" });
  if (answer.status === 204) return null;
  const said = await answer.json().catch(() => ({}));
  if (answer.ok) return said;
  const error = new Error(said.error?.message ?? `the daemon answered with status ${answer.status}`);
  error.status = answer.status;
  throw error;
}

// Gives an order, and says what became of it. Returns whether it was accepted.
async function order(path, body, done) {
  try {
    const answer = await send("POST", path, body);
    say(done(answer));
    return true;
  } catch (error) {
    say(error.message, true);
    if (error.status === 403) await check();
    return false;
  }
}

function say(words, isBad = false) {
  text(byId("told-text"), words);
  set(byId("told"), "class", "banner told " + (isBad ? "bad" : "good"));
  byId("told").hidden = false;
}

const pathOf = (migration, what) => `v1/migrations/${encodeURIComponent(migration.id)}/${what}`;

// Returns the buttons of a migration, as { node, update(migration) }.
export function buttonsOf(first) {
  const node = el("span", { class: "orders" });
  const choices = {
    pause: ["Pause", (migration) => order(pathOf(migration, "pause"), null, () => `Migration ${migration.id} is paused.`)],
    resume: ["Resume", (migration) => order(pathOf(migration, "resume"), null, () => `Migration ${migration.id} is resumed.`)],
    cancel: ["Cancel", confirmCancel],
    retry: ["Retry", (migration) => order(pathOf(migration, "retry"), null, (again) => `Migration ${migration.id} is repeated as ${again.id}.`)],
  };
  let latest = first, shown = null;
  return {
    node,
    update(migration) {
      latest = migration;
      const wanted = may() ? possible(migration) : [];
      if (shown === wanted.join()) return;
      shown = wanted.join();
      node.replaceChildren(...wanted.map((what) => {
        const [word, act] = choices[what];
        const button = el("button", { type: "button", class: "button", "aria-label": `${word} migration ${migration.id}` }, word);
        button.addEventListener("click", async () => {
          button.disabled = true;
          await act(latest);
          button.disabled = false;
        });
        return button;
      }));
    },
  };
}

// Returns whether a migration was ordered at another host, whose image has no path here.
export const isArrival = (migration) => migration.source.image === "";

// Returns the orders that a migration can take in its state.
function possible(migration) {
  const cancel = COMMITTED.has(migration.phase) ? [] : ["cancel"];
  switch (migration.state) {
    case "queued": return ["cancel"];
    case "running": return ["pause", ...cancel];
    case "paused": return ["resume", ...cancel];
    // The host that ordered a migration repeats it.
    case "failed": case "cancelled": case "handed-back": return migration.retried_as || isArrival(migration) ? [] : ["retry"];
    default: return [];
  }
}

// Shows a button in a cell that moves a volume or a VM. `named` says which of the two the name means.
export function showMove(cell, name, named, isPossible, overview) {
  const holder = within(cell, () => ({ node: el("span"), button: null, overview: null }));
  holder.overview = overview;
  if (!may() || !isPossible) {
    holder.button?.remove();
    holder.button = null;
  } else if (!holder.button) {
    holder.button = el("button", { type: "button", class: "button", "aria-label": `Migrate ${name}` }, "Migrate …");
    holder.button.addEventListener("click", () => askWhere(name, named, holder.overview));
    holder.node.append(holder.button);
  }
}

function confirmCancel(migration) {
  return new Promise((resolve) => {
    const yes = el("button", { type: "button", class: "button strong" }, "Cancel the migration");
    const no = el("button", { type: "button", class: "button" }, "Let it continue");
    const close = openDialog(`Cancel migration ${migration.id}?`, [
      el("p", {}, `${migration.volume} stays at its source, where its guest works on. What was copied is deleted.`),
      el("p", { class: "choices" }, yes, no),
    ], () => resolve(false));
    no.addEventListener("click", close);
    yes.addEventListener("click", async () => {
      close();
      resolve(await order(pathOf(migration, "cancel"), null, () => `Migration ${migration.id} is being cancelled.`));
    });
  });
}

// Asks for the target, shows the dry run, and then gives the very order that was checked.
function askWhere(name, named, overview) {
  const place = overview.volumes.find((volume) => named === "volume" && volume.name === name)?.store;
  const stores = overview.stores.map((store) => store.name).filter((store) => store !== place);
  const targets = [...stores, ...overview.peers.map(({ peer }) => peer.name)];
  const to = el("input", { type: "text", list: "targets", autocomplete: "off", spellcheck: "false", placeholder: "STORE, HOST or HOST:STORE" });
  const limit = el("input", { type: "number", min: "1", placeholder: "no limit" });
  const keep = el("input", { type: "checkbox" });
  const checkButton = el("button", { type: "button", class: "button strong" }, "Show what would happen");
  const begin = el("button", { type: "button", class: "button strong", disabled: true }, "Migrate");
  const cancel = el("button", { type: "button", class: "button" }, "Close");
  const found = el("div", { class: "plan", "aria-live": "polite" });
  const close = openDialog(`Migrate ${name}`, [
    el("label", {}, "To ", to), el("datalist", { id: "targets" }, targets.map((target) => el("option", { value: target }))),
    el("label", {}, "Largest rate, in MiB/s ", limit),
    el("label", {}, keep, " Keep the source’s image under another name"),
    found, el("p", { class: "choices" }, checkButton, begin, cancel),
  ]);
  const path = (what) => `v1/volumes/${encodeURIComponent(name)}/${what}`;
  let checked = null, asked = 0;
  const spoil = () => { checked = null; asked += 1; begin.disabled = true; found.replaceChildren(); };
  for (const input of [to, limit, keep]) input.addEventListener("input", spoil);
  const look = async () => {
    spoil();
    const mine = asked, wanted = { to: to.value.trim(), keep_source: keep.checked, named };
    if (limit.value) wanted.bandwidth_bytes_per_second = Math.round(Number(limit.value) * 1024 * 1024);
    found.replaceChildren(el("p", { class: "quiet" }, "The hosts are asked …"));
    const plan = await send("POST", path("plan"), wanted).catch((error) => error);
    // The order was changed meanwhile.
    if (mine !== asked) return;
    if (plan instanceof Error) {
      if (plan.status === 403) await check();
      return found.replaceChildren(el("p", { class: "why bad" }, plan.message));
    }
    found.replaceChildren(...describe(plan));
    if (plan.can_begin) [checked, begin.disabled] = [wanted, false];
  };
  checkButton.addEventListener("click", look);
  to.addEventListener("keydown", (event) => { if (event.key === "Enter") look(); });
  cancel.addEventListener("click", close);
  begin.addEventListener("click", async () => {
    if (!checked) return;
    begin.disabled = true;
    const began = await order(path("migrate"), checked, (migration) => `Migration ${migration.id} of ${name} has begun, or waits for its turn.`);
    // What is in the way now shows the next dry run.
    if (began) close();
    else spoil();
  });
}

// Describes a dry run, as `sterna migrate --dry-run` does.
function describe(plan) {
  const place = (location) => location ? location.store ?? location.image : "–";
  const seconds = plan.forecast?.seconds;
  const time = seconds == null ? "" : `, about ${units.duration(seconds.middle)} (${units.duration(seconds.least)} to ${units.duration(seconds.most)})`;
  return [
    el("p", {}, el("b", {}, plan.can_begin ? `${plan.name} would move${plan.host ? " to " + plan.host : ""}.` : `${plan.name} would not move:`)),
    el("ul", {}, plan.refusals.map((refusal) => el("li", { class: "refusal" }, refusal.message))),
    el("ul", {},
      plan.volumes.map((volume) => el("li", {}, `${volume.name}: ${units.bytes(volume.size_bytes)}, of which ${units.bytes(volume.held_bytes)} are used, `
        + `from ${place(volume.source)} to ${place(volume.target)}${volume.free_bytes == null ? "" : ` with ${units.bytes(volume.free_bytes)} free`}`)),
      plan.machine && el("li", {}, `VM ${plan.machine.name}` + (plan.machine.stopped ? ", which is stopped and stays so"
        : plan.machine.memory_bytes == null ? "" : ` with ${units.bytes(plan.machine.memory_bytes)} of memory`)
        + (plan.machine.max_downtime_ms == null ? "" : `; it pauses for ${plan.machine.max_downtime_ms} ms at most`)),
      el("li", {}, `copied: at most ${units.bytes(plan.bytes_max)}, and what guests write meanwhile${time}`),
      plan.queue && el("li", {}, `it would wait: number ${plan.queue.place} of ${plan.queue.waiting} in the queue: ${plan.queue.reason}`),
      plan.warnings.map((warning) => el("li", {}, "N.B. " + warning))),
  ];
}

// Opens a dialog, and returns what closes it. `closed` is called once it is closed.
function openDialog(title, content, closed = () => {}) {
  const dialog = el("dialog", { "aria-label": title }, el("h2", {}, title), content);
  document.body.append(dialog);
  dialog.addEventListener("close", () => { dialog.remove(); closed(); });
  dialog.showModal();
  return () => dialog.close();
}
