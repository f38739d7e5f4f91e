// Makes and changes elements. Strings only become text nodes: no string becomes markup, whatever it holds.

const SVG = "http://www.w3.org/2000/svg";

// Browsers hide these characters, or change the direction of writing at them: one name could look like another.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

// Returns an element with attributes and children; strings become text nodes. `null` and `false` are left out.
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

// Makes the invisible characters of a foreign text visible.
export function clean(value) {
  return String(value).replace(UNSEEN, "\ufffd");
}

// Sets an attribute if it differs; `null` and `false` remove it.
export function set(node, key, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(key)) node.removeAttribute(key);
    return;
  }
  const written = value === true ? "" : clean(value);
  if (node.getAttribute(key) !== written) node.setAttribute(key, written);
}

// Sets the text of an element if it differs: an unchanged text keeps its selection.
export function text(node, value) {
  const written = clean(value);
  if (node.textContent !== written) node.textContent = written;
}

export function byId(id) {
  return document.getElementById(id);
}

// Adapts the children of `parent` to `items`: known ones are updated, in the order of the items.
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

// Returns a table that keeps its rows between updates. Columns: { name, title, value(item) for sorting, cell(td, item), class }.
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

// Returns the content of a cell, which is made once: an element, or an object with an element as `node`.
export function within(cell, make) {
  if (!cell.within) { cell.within = make(); cell.replaceChildren(...[cell.within.node ?? cell.within].flat()); }
  return cell.within;
}
