// Elements of the page. Texts become text nodes, never HTML: what a model wrote stays what it wrote.

const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// A number as people read it: 0.0123, 1.23e-5, 12,300.
function short(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Number(value.toPrecision(4)).toString();
}

// Round positions between two numbers, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((candidate) => candidate >= rough * 0.999);
  const positions = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number += 1) {
    positions.push(number * step);
  }
  return positions;
}

// Labels of ticks share their digits.
function labelOf(position, spacing) {
  if (position === 0) return "0";
  if (Math.abs(position) >= 1e5 || spacing < 1e-4) return Number(position.toPrecision(3)).toExponential().replace("e+", "e");
  return position.toFixed(Math.max(0, Math.min(6, -Math.floor(Math.log10(spacing) + 1e-9))));
}

function section(title, id, ...children) {
  return element("section", { id }, element("h2", {}, title), ...children);
}

function table(headings, rows, attributes = {}) {
  const head = element("tr", {}, ...headings.map((heading) => element("th", { scope: "col" }, heading)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell ?? "-"))));
  return element("div", { class: "scroll" },
    element("table", attributes, element("thead", {}, head), element("tbody", {}, ...body)));
}

// A <details> whose content is made when it is first opened.
function folded(summary, fill, attributes = {}) {
  const box = element("details", attributes, element("summary", {}, summary));
  let empty = true;
  const open = () => {
    if (box.open && empty) {
      empty = false;
      box.append(fill());
    }
  };
  box.addEventListener("toggle", open);
  if (attributes.open !== undefined) open();
  return box;
}
