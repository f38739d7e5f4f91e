// Elements are made and changed here, and texts are only ever texts: no string becomes markup, whatever it holds.

const SVG = "http://www.w3.org/2000/svg";

// Browsers change the direction of writing at these, or do not show them: a name could pass for another one.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

// An element with attributes and children; texts become text nodes. `null` and `false` are left out.
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) set(node, key, value);
  node.append(...children.flat().filter((child) => child !== null && child !== false && child !== undefined)
    .map((child) => child instanceof Node ? child : clean(child)));
  return node;
}

// A text of somebody's, with what cannot be seen made visible.
export function clean(value) {
  return String(value).replace(UNSEEN, "\ufffd");
}

// Sets an attribute if it is another one; `null` and `false` take it away.
export function set(node, key, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(key)) node.removeAttribute(key);
    return;
  }
  const written = value === true ? "" : clean(value);
  if (node.getAttribute(key) !== written) node.setAttribute(key, written);
}

// Sets the text of an element if it is another one: what has not changed keeps its selection.
export function text(node, value) {
  const written = clean(value);
  if (node.textContent !== written) node.textContent = written;
}

export function byId(id) {
  return document.getElementById(id);
}

// Brings the children of `parent` in line with `items`: what was there is updated, in the order of the items.
// `make(item)` returns { node, update(item) }; it is called once for each key.
export function keyed(parent, items, keyOf, make) {
  const known = parent.keyed ?? (parent.keyed = new Map());
  const gone = new Set(known.keys());
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    gone.delete(key);
    let row = known.get(key);
    if (!row) { row = make(item); known.set(key, row); }
    row.update(item);
    if (row.node === place) place = place.nextSibling;
    else parent.insertBefore(row.node, place);
  }
  for (const key of gone) { known.get(key).node.remove(); known.delete(key); }
}

// A table whose rows are kept. Columns: { name, title, value(item) for sorting, cell(td, item), class }.
export function table(caption, columns, keyOf, order) {
  const body = el("tbody");
  const state = { column: order.column, falling: order.falling ?? false, items: [] };
  const heads = columns.map((column) => {
    const head = el("th", { scope: "col", class: column.class });
    if (!column.value) { head.append(column.name); return head; }
    const button = el("button", { type: "button", title: column.title }, column.name);
    button.addEventListener("click", () => {
      state.falling = state.column === column.name ? !state.falling : Boolean(column.falling);
      state.column = column.name;
      draw();
    });
    head.append(button);
    return head;
  });
  const node = el("table", {}, el("caption", { class: "hidden" }, caption), el("thead", {}, el("tr", {}, heads)), body);
  function draw() {
    const sorted = columns.find((column) => column.name === state.column);
    const items = [...state.items];
    if (sorted) items.sort((a, b) => compare(sorted.value(a), sorted.value(b)) * (state.falling ? -1 : 1));
    columns.forEach((column, index) => {
      const direction = state.falling ? "descending" : "ascending";
      if (column.value) set(heads[index], "aria-sort", column === sorted ? direction : "none");
    });
    keyed(body, items, keyOf, () => {
      const cells = columns.map((column) => el(column.head ? "th" : "td", { class: column.class, scope: column.head ? "row" : null }));
      return {
        node: el("tr", {}, cells),
        update: (item) => columns.forEach((column, index) => column.cell(cells[index], item)),
      };
    });
  }
  return { node: el("div", { class: "scroll" }, node), update(items) { state.items = items; draw(); } };
}

function compare(a, b) {
  if (typeof a === "string" || typeof b === "string") return String(a).localeCompare(String(b), "en", { numeric: true });
  return (a ?? -1) - (b ?? -1);
}

// What is in a cell, made once: an element, or whatever has it as `node`.
export function within(cell, make) {
  if (!cell.within) { cell.within = make(); cell.replaceChildren(...[cell.within.node ?? cell.within].flat()); }
  return cell.within;
}
