"use strict";
// Shows the figures of the sample below the pointer, in all plots at once. Without it the page says the same, less exactly.
(() => {
  const samples = JSON.parse(document.getElementById("samples").textContent);
  const plots = document.getElementById("plots");
  const hover = document.getElementById("hover");
  if (!plots || samples.length === 0) return;
  plots.dataset.samples = samples.length;
  const charts = [...plots.querySelectorAll("svg.plot")];
  const number = (value) => Math.round(value).toLocaleString("en");
  const time = (micros) => micros === null ? "—"
    : micros < 1000 ? micros + " µs" : micros < 1e6 ? (micros / 1000).toPrecision(3) + " ms" : (micros / 1e6).toPrecision(3) + " s";
  const rate = (bytes) => (bytes / 1048576).toFixed(1) + " MiB/s";
  const hide = () => {
    hover.hidden = true;
    for (const chart of charts) chart.querySelector(".cursor").setAttribute("visibility", "hidden");
  };
  const show = (event) => {
    const frame = charts[0].getBoundingClientRect();
    const { left, right, first, last } = charts[0].dataset;
    const scale = charts[0].viewBox.baseVal.width / frame.width;
    const x = (event.clientX - frame.left) * scale;
    const at = +first + (x - left) / (right - left) * (last - first);
    const sample = samples.find(([begin, end]) => begin <= at && at < end);
    if (x < left || x > right || !sample) return hide();
    for (const chart of charts) {
      const cursor = chart.querySelector(".cursor");
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, x);
      cursor.setAttribute("visibility", "visible");
    }
    const [begin, , iops, median, p99, worst, copied, mirrored] = sample;
    const rows = [[(begin / 1000).toFixed(2) + " s", ""], ["IOPS", number(iops)], ["median", time(median)], ["99 of 100", time(p99)],
      ["longest", time(worst)], ["copied", rate(copied)], ["mirrored", rate(mirrored)]];
    hover.replaceChildren(...rows.map(([name, value]) => {
      const row = document.createElement("div");
      for (const text of [name, value]) row.append(Object.assign(document.createElement("span"), { textContent: text }));
      return row;
    }));
    hover.hidden = false;
    const place = event.clientX - frame.left;
    const width = hover.offsetWidth;
    hover.style.left = (place + width + 24 > frame.width ? place - width - 14 : place + 14) + "px";
  };
  plots.addEventListener("pointermove", show);
  plots.addEventListener("pointerleave", hide);
})();
