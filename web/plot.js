// Plots over time, as SVG in its displayed size. The legend shows the latest figures, or those below the pointer.
//
//   300 MiB/s ┤   ▂▄▆▆▆▆│▆▆▇        bands: phases that are not copying
//           0 ┼─────────────── time

import { el, set, svg, text } from "./dom.js";
import { duration } from "./units.js";

const HEIGHT = 136, TOP = 8, BOTTOM = 20, LEFT = 70, RIGHT = 10;
// Limit of a line's points: about one for two pixels, so that the eye can follow it.
const POINTS_MAX = 160;
// The shortest interval in a plot of more than twenty, in seconds: a slow copy only completes a chunk now and then.
const STRETCH_S = 0.5;

// Returns plots of the same time, which share a cursor. Series: { name, class, value(sample), format }; an area plot stacks
// each series on the one before. Scale: "linear" or "log".
export function plots(definitions) {
  const group = { charts: [], hovered: null };
  const node = el("div", { class: "plots" });
  for (const definition of definitions) {
    const chart = one(definition, group);
    group.charts.push(chart);
    node.append(chart.node);
  }
  return {
    node,
    // `samples`: by time, { at, length } in seconds and the values of the series; `bands`: { from, to, name }.
    update(samples, time, bands) {
      const shown = thin(time[1] - time[0] > STRETCH_S * 20 ? stretch(samples, STRETCH_S) : samples, POINTS_MAX);
      for (const chart of group.charts) chart.update(shown, time, bands);
    },
  };
}

function one(definition, group) {
  const legend = definition.series.map((series) => {
    const value = el("b", {}, "–");
    return { value, node: el("span", { class: "key " + series.class }, el("i"), series.name + " ", value) };
  });
  const grid = svg("g"), bandLayer = svg("g"), lines = svg("g"), axis = svg("g");
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  const paths = definition.series.map((series) => {
    const area = svg("path", { class: "area " + series.class }), line = svg("path", { class: "line " + series.class });
    if (definition.stacked) lines.prepend(area, line); else lines.append(line);
    return { area, line };
  });
  const canvas = svg("svg", { class: "plot", role: "img", "aria-label": definition.title + " over time", height: HEIGHT },
    bandLayer, grid, lines, cursor, axis);
  const node = el("figure", {}, el("figcaption", {}, el("h4", {}, definition.title), legend.map((key) => key.node)), canvas);
  let width = 0, samples = [], time = [0, 1], bands = [];

  const x = (at) => LEFT + (at - time[0]) / (time[1] - time[0]) * (width - LEFT - RIGHT);

  function draw() {
    if (width < LEFT + RIGHT + 40) return;
    set(canvas, "viewBox", `0 0 ${width} ${HEIGHT}`);
    set(canvas, "width", width);
    const values = samples.map((sample) => {
      let sum = 0;
      return definition.series.map((series) => {
        const value = series.value(sample);
        if (!definition.stacked || value === null) return value;
        return sum += value;
      });
    });
    const scale = definition.scale === "log" ? logarithmic(values.flat()) : linear(values.flat(), definition.binary);
    const y = (value) => HEIGHT - BOTTOM - scale.place(value) * (HEIGHT - BOTTOM - TOP);
    grid.replaceChildren(...scale.ticks.flatMap((tick) => [
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: LEFT - 8, y: y(tick) + 4 }, definition.format(tick).replace(/\.0+(?= )/, "")),
    ]));
    axis.replaceChildren(...timeTicks(time, width).map((tick) =>
      svg("text", { class: "time", x: x(tick), y: HEIGHT - 4 }, tick === 0 ? "0" : clock(tick))));
    bandLayer.replaceChildren(...bands.map(({ from, to, name }) =>
      svg("rect", { class: "band " + name, x: x(Math.max(from, time[0])), y: TOP, height: HEIGHT - TOP - BOTTOM,
        width: Math.max(1.5, x(Math.min(to, time[1])) - x(Math.max(from, time[0]))) }, svg("title", {}, name))));
    // The samples before show the guest without the migration.
    if (time[0] < 0) bandLayer.append(svg("line", { class: "begin", x1: x(0), x2: x(0), y1: TOP, y2: HEIGHT - BOTTOM }, svg("title", {}, "begins")));
    paths.forEach((path, index) => {
      const line = [];
      let pieces = [], area = "";
      const close = () => {
        if (pieces.length && definition.stacked) {
          area += `M${pieces[0][0]} ${y(scale.least)}` + pieces.map(([px, py]) => `L${px} ${py}`).join("")
            + `L${pieces[pieces.length - 1][0]} ${y(scale.least)}Z`;
        }
        pieces = [];
      };
      samples.forEach((sample, at) => {
        const value = values[at][index];
        if (value === null || value === undefined) return close();
        const before = samples[at - 1];
        if (before && sample.at - (before.at + before.length) > 3 * Math.max(before.length, 1)) close();
        const point = [round(x(sample.at + sample.length / 2)), round(y(value))];
        line.push((pieces.length ? "L" : "M") + point[0] + " " + point[1]);
        pieces.push(point);
      });
      close();
      set(path.line, "d", line.join(""));
      set(path.area, "d", definition.stacked ? area : "");
    });
    tell();
  }

  // Updates the legend's figures: those of the sample below the pointer, or of the latest one with figures.
  function tell() {
    const at = group.hovered === null ? null : time[0] + group.hovered * (time[1] - time[0]);
    const under = at === null ? null : samples.find((sample) => sample.at <= at && at < sample.at + sample.length);
    definition.series.forEach((series, index) => {
      const shown = under ?? (at === null ? samples.findLast((sample) => series.value(sample) !== null) : null);
      const value = shown ? series.value(shown) : null;
      text(legend[index].value, value === null ? "–" : series.format ? series.format(value) : definition.format(value));
    });
    set(cursor, "visibility", at === null ? "hidden" : "visible");
    if (at !== null) for (const end of ["x1", "x2"]) set(cursor, end, round(x(at)));
  }

  const hover = (event) => {
    const box = canvas.getBoundingClientRect();
    const part = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    group.hovered = part >= 0 && part <= 1 ? part : null;
    for (const chart of group.charts) chart.tell();
  };
  canvas.addEventListener("pointermove", hover);
  canvas.addEventListener("pointerleave", () => { group.hovered = null; for (const chart of group.charts) chart.tell(); });
  new ResizeObserver(([entry]) => {
    const measured = Math.floor(entry.contentRect.width);
    if (measured !== width) { width = measured; draw(); }
  }).observe(node);
  return { node, tell, update(newSamples, newTime, newBands) { [samples, time, bands] = [newSamples, newTime, newBands]; draw(); } };
}

// Returns a line without axes, for a tile or a row.
export function spark(points, { width, height }) {
  const line = svg("path", { class: "line" }), area = svg("path", { class: "area" });
  const node = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" }, area, line);
  return {
    node,
    update(values) {
      const most = Math.max(...values.filter((value) => value !== null), 1e-9);
      const step = width / (points - 1), first = points - values.length;
      let path = "", open = false, begun = 0, last = 0, filled = "";
      values.forEach((value, index) => {
        // A sample between two gaps would be a stray tick.
        if (value === null || ((values[index - 1] ?? null) === null && (values[index + 1] ?? null) === null)) { open = false; return; }
        const px = round((first + index) * step), py = round(height - 1 - value / most * (height - 3));
        if (!open) { begun = px; path += `M${px} ${py}`; filled += `M${px} ${height}L${px} ${py}`; }
        else { path += `L${px} ${py}`; filled += `L${px} ${py}`; }
        open = true; last = px;
        if (index + 1 === values.length || values[index + 1] === null) filled += `L${last} ${height}L${begun} ${height}Z`;
      });
      set(line, "d", path);
      set(area, "d", filled);
    },
  };
}

// Joins neighbours until each lasts at least `least` seconds.
function stretch(samples, least) {
  const joined = [];
  for (const sample of samples) {
    const last = joined[joined.length - 1];
    const follows = last && sample.at - (last.at + last.length) < least;
    if (follows && last.length < least) joined[joined.length - 1] = last.join(sample);
    else joined.push(sample);
  }
  return joined;
}

// Joins neighbours until at most `most` are left.
function thin(samples, most) {
  let thinned = samples;
  while (thinned.length > most) {
    const joined = [];
    for (let index = 0; index < thinned.length; index += 2) {
      joined.push(index + 1 < thinned.length ? thinned[index].join(thinned[index + 1]) : thinned[index]);
    }
    thinned = joined;
  }
  return thinned;
}

function linear(values, isBinary) {
  // An empty plot has a scale too: for bytes, one KiB.
  const most = Math.max(...values.filter(Number.isFinite), isBinary ? 1024 : 1);
  const base = isBinary ? 1024 ** Math.floor(Math.log(most) / Math.log(1024)) : 1;
  const rough = most / base / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough) * base;
  const top = Math.ceil(most / step) * step;
  const ticks = [];
  for (let tick = 0; tick <= top * 1.0001; tick += step) ticks.push(tick);
  return { least: 0, ticks, place: (value) => Math.min(1, Math.max(0, value / top)) };
}

function logarithmic(values) {
  const found = values.filter((value) => value > 0);
  const least = 10 ** Math.floor(Math.log10(Math.min(...found, 1000)));
  const top = 10 ** Math.ceil(Math.log10(Math.max(...found, least * 10)));
  const ticks = [];
  for (let tick = least; tick <= top * 1.0001; tick *= 10) ticks.push(tick);
  const place = (value) => Math.min(1, Math.max(0, Math.log(Math.max(value, least) / least) / Math.log(top / least)));
  return { least, ticks: ticks.length > 5 ? ticks.filter((_, index) => index % 2 === 0) : ticks, place };
}

function timeTicks([from, to], width) {
  const wanted = (to - from) / Math.max(2, Math.floor((width - LEFT) / 64));
  const step = [0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400].find((step) => step >= wanted) ?? 86400 * 7;
  const ticks = [];
  for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) ticks.push(tick === 0 ? 0 : tick);
  return ticks;
}

function clock(seconds) {
  if (Math.abs(seconds) < 60) return seconds.toFixed(Number.isInteger(seconds) ? 0 : 1).replace("-", "−") + " s";
  return duration(seconds).replace(" 00 s", "").replace(" 00 min", "");
}

function round(value) {
  return Math.round(value * 10) / 10;
}
