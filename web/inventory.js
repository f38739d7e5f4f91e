// The inventory: volumes, VMs, standbys, stores and other hosts.

import { byId, el, keyed, set, table, text, within } from "./dom.js";
import { showMove } from "./orders.js";
import { spark } from "./plot.js";
import * as units from "./units.js";

// Samples of a line in a row or a tile: two minutes.
const POINTS = 120;
const VOLUME_TONES = { serving: "good", failed: "bad", unconfirmed: "bad", waiting: "warm", creating: "busy", arriving: "busy", forwarding: "calm", removing: "warm" };
const VM_TONES = { running: "good", paused: "warm", io_error: "bad", shut_down: "calm", crashed: "bad", stopped: "calm", suspended: "calm", starting: "busy", arriving: "busy", leaving: "busy", unknown: "warm" };

const STANDBY_TONES = { current: "good", seeding: "busy", used: "busy", paused: "warm", waiting: "warm", promoted: "calm", behind: "bad", "no-recovery-point": "bad", diverged: "bad" };

// States in which a VM can move, with its memory or without.
const MOVABLE = new Set(["running", "paused", "stopped", "shut_down"]);
const VM_WORDS = { io_error: "I/O error", shut_down: "shut down" };

// The latest samples of each volume's requests per second.
const courses = new Map();
const totals = { requests: [], read: [], written: [] };

export const requests = ({ activity }) => activity && activity.reads_per_second + activity.writes_per_second + activity.flushes_per_second;

// Records the daemon's overview.
export function see(overview) {
  const present = new Set();
  for (const volume of overview.volumes) {
    present.add(volume.name);
    if (!courses.has(volume.name)) courses.set(volume.name, []);
    push(courses.get(volume.name), requests(volume));
  }
  for (const name of courses.keys()) if (!present.has(name)) courses.delete(name);
  const known = overview.volumes.filter(({ activity }) => activity);
  const sum = (value) => known.length || overview.volumes.length === 0 ? known.reduce((all, volume) => all + value(volume), 0) : null;
  push(totals.requests, sum(requests));
  push(totals.read, sum(({ activity }) => activity.bytes_read_per_second));
  push(totals.written, sum(({ activity }) => activity.bytes_written_per_second));
}

// Breaks the lines after a time without samples.
export function interrupt() {
  for (const course of [...courses.values(), ...Object.values(totals)]) if (course.at(-1) !== null) push(course, null);
}

function push(course, value) {
  course.push(value ?? null);
  if (course.length > POINTS) course.shift();
}

// The overview that is shown.
let latest = null;

export function show(overview) {
  showTiles(overview);
  latest = overview;
  showVolumes(overview.volumes);
  showVms(overview.vms);
  showStandbys(overview.standbys);
  showStores(overview.stores);
  showPeers(overview.peers);
}

function showTiles(overview) {
  const serving = overview.volumes.filter(({ state }) => state === "serving" || state === "forwarding").length;
  const clients = overview.volumes.reduce((sum, volume) => sum + volume.connections, 0);
  const running = overview.vms.filter(({ state }) => state === "running").length;
  const connected = overview.peers.filter(({ peer }) => peer.connected).length;
  const moving = overview.migrations.filter(({ migration }) => migration.state === "running");
  const bandwidth = moving.reduce((sum, { migration }) => sum + migration.bytes_per_second, 0);
  // Stores on one file system share its free space.
  const spaces = new Map(overview.stores.map((store) => [`${store.bytes_total} ${store.bytes_free}`, store.bytes_free]));
  const free = [...spaces.values()].reduce((sum, bytes) => sum + bytes, 0);
  const tiles = [
    { name: "Guests’ requests", value: units.each(totals.requests.at(-1)), detail: `${units.count(clients)} ${clients === 1 ? "connection" : "connections"}`, line: totals.requests, hue: "iops" },
    { name: "Read", value: units.rate(totals.read.at(-1)), detail: "by guests", line: totals.read, hue: "median" },
    { name: "Written", value: units.rate(totals.written.at(-1)), detail: "by guests", line: totals.written, hue: "p99" },
    { name: "Migrations", value: moving.length ? units.rate(bandwidth) : "none", detail: standings(overview.migrations) || "under way" },
    { name: "Volumes served", value: `${serving} of ${overview.volumes.length}`, detail: overview.vms.length ? `${running} of ${overview.vms.length} VMs run` : "no VMs" },
    { name: "Free", value: units.bytes(free), detail: overview.peers.length ? `${connected} of ${overview.peers.length} hosts connected` : `in ${overview.stores.length} ${overview.stores.length === 1 ? "store" : "stores"}` },
  ];
  keyed(byId("tiles"), tiles, ({ name }) => name, ({ name, line, hue }) => {
    const value = el("strong"), detail = el("small"), drawn = line && spark(POINTS, { width: 180, height: 34 });
    const node = el("div", { class: "tile " + (hue ?? "") }, el("p", {}, name), value, detail, drawn && drawn.node);
    return { node, update: (tile) => { text(value, tile.value); text(detail, tile.detail); drawn?.update(tile.line); } };
  });
}

// Returns the number of migrations by state, in words.
function standings(migrations) {
  const words = { running: "under way", paused: "paused", queued: "queued" };
  const counted = Object.entries(words).map(([state, word]) => [migrations.filter(({ migration }) => migration.state === state).length, word]);
  return counted.filter(([count]) => count).map(([count, word]) => `${count} ${word}`).join(", ");
}

// Describes the missing blocks of a volume that is already served here.
function missing(filling) {
  const waiting = filling.requests_waiting ? `, ${units.count(filling.requests_waiting)} requests wait` : "";
  const refused = filling.reads_refused ? `, ${units.count(filling.reads_refused)} reads were refused and stopped their VM` : "";
  return `${units.bytes(filling.bytes_missing)} have not come from ${filling.host}${waiting}${refused}${filling.waits_for ? ": waits for " + filling.waits_for : ""}`;
}

const where = (volume) => volume.host ? "at " + volume.host : volume.store ?? "in place";
let volumeTable = null;

function showVolumes(volumes) {
  volumeTable ??= mount("volume-table", table("Volumes", [
    { name: "Volume", head: true, class: "name", value: (volume) => volume.name, cell: (cell, volume) => { text(cell, volume.name); set(cell, "title", volume.image); } },
    { name: "State", value: (volume) => volume.state, cell: (cell, volume) => {
      const { pill, why } = within(cell, () => { const pill = el("span"), why = el("small", { class: "reason" }); return { pill, why, node: [pill, why] }; });
      const moving = volume.migration && volume.state === "serving";
      text(pill, moving ? "moving" : volume.state);
      set(pill, "class", "pill small " + (moving ? "busy" : VOLUME_TONES[volume.state] ?? "warm"));
      const created = volume.creation && volume.creation.bytes_total > 0 ? units.percent(volume.creation.bytes_done / volume.creation.bytes_total) : "";
      // The next column names the other host.
      text(why, volume.state === "forwarding" ? "" : volume.message ?? (volume.filling ? missing(volume.filling) : volume.errors > 0 ? `${units.count(volume.errors)} requests failed: ${volume.last_error ?? ""}` : created));
    } },
    { name: "Place", class: "place roomy", value: where, cell: (cell, volume) => text(cell, where(volume)) },
    { name: "Used", falling: true, title: "What its image takes of its size", class: "number wide", value: (volume) => volume.allocated_bytes,
      cell: (cell, volume) => {
        const used = within(cell, () => meter(false));
        used.update(volume.allocated_bytes, volume.size_bytes, `${units.bytes(volume.allocated_bytes)} of ${units.bytes(volume.size_bytes)}`);
      } },
    { name: "Clients", falling: true, class: "number wide", value: (volume) => volume.connections + volume.clients_elsewhere,
      cell: (cell, volume) => text(cell, volume.connections + (volume.clients_elsewhere ? ` + ${volume.clients_elsewhere}` : "")) },
    { name: "Requests/s", falling: true, class: "number", value: requests, cell: (cell, volume) => text(cell, units.count(requests(volume))) },
    { name: "Read", falling: true, class: "number wide", value: (volume) => volume.activity?.bytes_read_per_second, cell: (cell, volume) => text(cell, units.rate(volume.activity?.bytes_read_per_second)) },
    { name: "Written", falling: true, class: "number wide", value: (volume) => volume.activity?.bytes_written_per_second, cell: (cell, volume) => text(cell, units.rate(volume.activity?.bytes_written_per_second)) },
    { name: "Latency", falling: true, title: "What 99 of 100 requests did not exceed", class: "number roomy", value: (volume) => volume.activity?.p99_us, cell: (cell, volume) => text(cell, units.latency(volume.activity?.p99_us)) },
    { name: "Two minutes", class: "line wide", cell: (cell, volume) => within(cell, () => spark(POINTS, { width: 120, height: 22 })).update(courses.get(volume.name) ?? []) },
    // A volume of a VM moves with it, or alone to a store of this host.
    { name: "Order", class: "orders", cell: (cell, volume) => showMove(cell, volume.name, "volume", volume.state === "serving" && !volume.migration, latest) },
  ], (volume) => volume.name, { column: "Volume" }), "There are no volumes yet: sterna volume create NAME --size SIZE");
  const wanted = byId("filter").value.trim().toLowerCase();
  const shown = volumes.filter((volume) => [volume.name, volume.state, where(volume), volume.migration ? "moving" : ""].join(" ").toLowerCase().includes(wanted));
  text(byId("count-volumes"), volumes.length);
  volumeTable.update(shown, wanted && volumes.length ? `No volume has “${byId("filter").value.trim()}” in its name, state or place.` : undefined);
}

let vmTable = null;

// Describes a disk of a VM: its volume, with its place and, if it is not served, its state.
function disk(name) {
  const volume = latest.volumes.find((volume) => volume.name === name);
  if (!volume) return `${name} (not at this host)`;
  const state = volume.migration ? ", moving" : ["serving", "forwarding"].includes(volume.state) ? "" : ", " + volume.state;
  return `${name} (${where(volume)}${state})`;
}

function showVms(vms) {
  vmTable ??= mount("vm-table", table("Virtual machines", [
    { name: "VM", head: true, class: "name", value: (vm) => vm.name, cell: (cell, vm) => text(cell, vm.name) },
    { name: "State", value: (vm) => vm.state, cell: (cell, vm) => {
      const { pill, why } = within(cell, () => { const pill = el("span"), why = el("small", { class: "reason" }); return { pill, why, node: [pill, why] }; });
      text(pill, VM_WORDS[vm.state] ?? vm.state);
      set(pill, "class", "pill small " + (VM_TONES[vm.state] ?? "warm"));
      text(why, vm.message ?? "");
    } },
    { name: "Disks", value: (vm) => vm.volumes.join(", "), cell: (cell, vm) => text(cell, vm.volumes.map(disk).join(", ") || "–") },
    { name: "Hypervisor", class: "wide", value: (vm) => vm.hypervisor ?? "", cell: (cell, vm) => text(cell, vm.hypervisor ?? "–") },
    { name: "Process", class: "number wide", value: (vm) => vm.process, cell: (cell, vm) => text(cell, vm.process ?? "–") },
    { name: "Whole move", class: "wide", cell: (cell, vm) => text(cell, vm.whole_move ? vm.whole_move.obstacle ?? "possible" : "–") },
    { name: "Order", class: "orders", cell: (cell, vm) => showMove(cell, vm.name, "vm", MOVABLE.has(vm.state), latest) },
  ], (vm) => vm.name, { column: "VM" }), "There are no virtual machines here: sterna vm add, or sterna vm adopt");
  text(byId("count-vms"), vms.length);
  vmTable.update(vms);
}

let standbyTable = null;

const comparedWhen = ({ role, compared }) => {
  if (!compared) return role === "source" ? "never" : "–";
  const age = units.duration(Math.max(0, (Date.now() - compared.unix_ms) / 1000)) + " ago";
  return compared.bytes_differing ? age + ", " + units.bytes(compared.bytes_differing) + " differed" : age;
};
// Only the source of a standby knows some of its figures.
const lasting = (seconds) => seconds === undefined ? "–" : units.duration(seconds);

function showStandbys(standbys) {
  standbyTable ??= mount("standby-table", table("Standbys", [
    { name: "Standby", head: true, class: "name", value: (standby) => standby.name, cell: (cell, standby) => { text(cell, standby.name); set(cell, "title", standby.volumes.join(", ")); } },
    { name: "State", value: (standby) => standby.state, cell: (cell, standby) => {
      const { pill, why } = within(cell, () => { const pill = el("span"), why = el("small", { class: "reason" }); return { pill, why, node: [pill, why] }; });
      text(pill, standby.state.replaceAll("-", " "));
      set(pill, "class", "pill small " + (STANDBY_TONES[standby.state] ?? "warm"));
      text(why, standby.reason ?? standby.vms?.find((vm) => vm.problem)?.problem ?? "");
    } },
    { name: "Host", class: "place", value: (standby) => standby.host, cell: (cell, standby) => text(cell, (standby.role === "source" ? "kept at " : "kept for ") + standby.host) },
    { name: "Age", falling: true, title: "What a promotion would lose", class: "number", value: (standby) => standby.age_seconds, cell: (cell, standby) => text(cell, lasting(standby.age_seconds)) },
    { name: "Allowed", falling: true, title: "The age beyond which it is behind", class: "number wide", value: (standby) => standby.rpo_seconds, cell: (cell, standby) => text(cell, lasting(standby.rpo_seconds)) },
    { name: "Waiting", falling: true, title: "What it lacks", class: "number wide", value: (standby) => standby.bytes_waiting, cell: (cell, standby) => text(cell, units.bytes(standby.bytes_waiting)) },
    { name: "Sent", falling: true, class: "number wide", value: (standby) => standby.bytes_sent, cell: (cell, standby) => text(cell, units.bytes(standby.bytes_sent)) },
    { name: "Compared", title: "When every block was last compared with it", class: "number wide", value: (standby) => standby.compared?.unix_ms, cell: (cell, standby) => text(cell, comparedWhen(standby)) },
  ], (standby) => standby.id, { column: "Standby" }), "No volume has a standby: sterna standby add VOLUME --to HOST");
  text(byId("count-standbys"), standbys.length);
  standbyTable.update(standbys);
}

function showStores(stores) {
  text(byId("count-stores"), stores.length);
  keyed(byId("store-list"), stores, (store) => store.name, () => {
    const name = el("b"), about = el("small", { class: "quiet path" }), figures = el("span", { class: "figure" }), used = meter(true), why = el("p", { class: "why" });
    return {
      node: el("div", { class: "entry" }, el("div", { class: "line" }, name, about, figures), used.node, why),
      update(store) {
        text(name, store.name);
        text(about, (store.kind === "folder" ? "" : store.kind + " ") + store.path);
        const taken = store.bytes_total - store.bytes_free;
        const volumes = `${store.volumes} ${store.volumes === 1 ? "volume" : "volumes"}`;
        text(figures, store.bytes_total ? `${units.bytes(store.bytes_free)} free of ${units.bytes(store.bytes_total)} · ${volumes}` : volumes);
        used.node.hidden = store.bytes_total === 0;
        used.update(taken, store.bytes_total, "");
        const unknown = store.unknown_images?.length ? `${store.unknown_images.length} images that no volume has` : null;
        const reason = [store.problem, store.occupied, store.impairment, unknown].filter(Boolean).join("; ");
        why.hidden = !reason;
        text(why, reason);
        set(why, "class", "why" + (store.problem ? " bad" : ""));
      },
    };
  });
}

function showPeers(peers) {
  text(byId("count-hosts"), peers.length);
  const list = byId("peer-list");
  keyed(list, peers.length ? peers : [null], (entry) => entry ? "host " + entry.peer.name : "none", (entry) => entry ? makePeer() : {
    node: el("p", { class: "empty quiet" }, "No other host is paired with this one: ", el("code", {}, "sterna host invite")), update: () => {},
  });
}

function makePeer() {
  const name = el("b"), pill = el("span"), figures = el("span", { class: "figure" }), links = el("ul", { class: "links" }), why = el("p", { class: "why" });
  return {
    node: el("div", { class: "entry" }, el("div", { class: "line" }, name, pill, figures), links, why),
    update({ peer, connections }) {
      text(name, peer.name);
      text(pill, peer.connected ? "connected" : "not connected");
      set(pill, "class", "pill small " + (peer.connected ? "good" : "bad"));
      const waiting = peer.queued_bytes + peer.unacknowledged_bytes;
      text(figures, [peer.since_ms === null ? null : "for " + units.duration(peer.since_ms / 1000), waiting ? units.bytes(waiting) + " on the way" : null].filter(Boolean).join(" · "));
      keyed(links, connections, ({ connection }) => connection.local + connection.remote, () => {
        const dot = el("i"), ends = el("span", { class: "path" }), told = el("span", { class: "figure" });
        return {
          node: el("li", {}, dot, ends, told),
          update({ connection, bytes_sent_per_second: sent, bytes_received_per_second: received }) {
            set(dot, "class", connection.up ? "up" : "down");
            set(dot, "title", connection.up ? "up" : "down");
            text(ends, `${connection.local} ${connection.inbound ? "←" : "→"} ${connection.remote}`);
            set(told, "title", connection.up ? "round trip, sent, received" : null);
            text(told, connection.up
              ? [connection.round_trip_us === null ? null : units.latency(connection.round_trip_us),
                sent === null ? null : "↑ " + units.rate(sent), received === null ? null : "↓ " + units.rate(received)].filter(Boolean).join(" · ")
              : `down for ${units.duration(connection.since_ms / 1000)}${connection.last_error ? ": " + connection.last_error : ""}`);
          },
        };
      });
      const reason = peer.connected ? null : peer.last_error;
      why.hidden = !reason;
      text(why, reason ?? "");
    },
  };
}

// Draws how much of a whole is used; `isScarce`: a full one is marked.
function meter(isScarce) {
  const fill = el("i"), label = el("span");
  const bar = el("span", { class: "meter" }, fill);
  return {
    node: el("span", { class: "measured" }, label, bar),
    update(part, whole, words) {
      const share = part === null || !whole ? 0 : Math.min(1, part / whole);
      fill.style.width = share * 100 + "%";
      set(bar, "class", "meter" + (isScarce && share > 0.85 ? (share > 0.95 ? " full" : " high") : ""));
      text(label, words);
    },
  };
}

// Puts a table into its place, with a text for an empty one.
function mount(id, made, whenEmpty) {
  const empty = el("p", { class: "empty quiet" });
  byId(id).append(made.node, empty);
  return {
    update(items, instead) {
      made.node.hidden = items.length === 0;
      empty.hidden = items.length > 0;
      text(empty, instead ?? whenEmpty);
      made.update(items);
    },
  };
}
