// Elements of the page, and its one chart: areas and lines over steps. Texts become text nodes, never HTML.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 420, HEIGHT = 210, LEFT = 54, RIGHT = 10, TOP = 10, BOTTOM = 24;
const view = { smoothing: 0, hidden: new Set(), charts: [] };

const element = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
const shape = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const stepOf = (grid, column) => grid.first + column * grid.width + (grid.width - 1) / 2;
const columnsOf = (curve, grid) => curve.at ?? Array.from({ length: grid.columns }, (_, column) => column);
const lineClass = (number) => `line-${number % 8}${number >= 8 ? " dashed" : ""}`; // eight colours, then with dashes

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function section(title, id, ...children) {
  return element("section", { id }, element("h2", {}, title), ...children.filter((child) => child !== null));
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
  const open = () => { if (box.open && box.childElementCount === 1) box.append(fill()); };
  box.addEventListener("toggle", open);
  open();
  return box;
}

// A number as people read it: 0.0123, 1.23e-5, 12,300.
function short(value) {
  if (typeof value !== "number") return String(value ?? "-");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return Number.isInteger(value) ? value.toLocaleString("en-US") : Number(value.toPrecision(4)).toString();
}

// Round positions between two numbers, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((candidate) => candidate >= rough * 0.999);
  const positions = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number += 1) positions.push(number * step);
  return positions;
}

// Labels of ticks share their digits.
function labelOf(position, spacing) {
  if (position === 0) return "0";
  if (Math.abs(position) >= 1e5 || spacing < 1e-4) return Number(position.toPrecision(3)).toExponential().replace("e+", "e");
  return position.toFixed(Math.max(0, Math.min(6, -Math.floor(Math.log10(spacing) + 1e-9))));
}

// Exponential moving average, divided by the weight it has seen, so that it does not begin at 0.
function smoothed(values, weight) {
  let total = 0, seen = 0;
  return weight === 0 ? values : values.map((value) => {
    total = weight * total + (1 - weight) * value;
    seen = weight * seen + (1 - weight);
    return total / seen;
  });
}

// The range of an axis; a share has no room below 0 and above 1.
function rangeOf(lists, isShare) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high || (low === 0 && high === 0)) return [0, 1];
  const room = low === high ? Math.abs(low) * 0.1 : (high - low) * 0.05;
  return [low >= 0 && low < room ? 0 : low - room, isShare && high <= 1 ? Math.min(high + room, 1) : high + room];
}

function pathOf(at, values, x, y) {
  return at.map((step, place) => `${place ? "L" : "M"}${x(step).toFixed(1)} ${y(values[place]).toFixed(1)}`).join("");
}

// The picture of a chart: grid lines with labels, areas {kind, at, low, high}, lines {kind, dot, at, values}, crosses.
function pictureOf(report, { areas, lines, bad = [] }, isShare) {
  const { grid } = report;
  const [low, high] = rangeOf([...areas.flatMap((area) => [area.low, area.high]), ...lines.map((line) => line.values)], isShare);
  const first = grid.first - 0.5, last = grid.first + grid.columns * grid.width - 0.5;
  const x = (step) => LEFT + ((step - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const frame = shape("g", { class: "frame" }), heights = ticks(low, high, 4);
  const spacing = heights.length > 1 ? heights[1] - heights[0] : Math.abs(heights[0]) || 1;
  for (const value of heights) {
    frame.append(shape("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      shape("text", { x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, labelOf(value, spacing)));
  }
  for (const step of ticks(grid.first, last - 0.5, 5).filter(Number.isInteger)) {
    frame.append(shape("text", { x: x(step), y: HEIGHT - 8, "text-anchor": "middle" }, (step + 0).toLocaleString("en-US")));
  }
  const marks = shape("g");
  for (const { kind, at, low: floor, high: top } of areas) {
    const back = pathOf([...at].reverse(), [...floor].reverse(), x, y).replace("M", "L");
    marks.append(shape("path", { class: kind, d: `${pathOf(at, top, x, y)}${back}Z` }));
  }
  for (const { kind, dot, at, values } of lines) {
    marks.append(shape("path", { class: kind, d: pathOf(at, values, x, y) }));
    if (!dot || at.length > 30) continue;
    marks.append(...at.map((step, place) => shape("circle", { class: dot, cx: x(step), cy: y(values[place]), r: at.length > 5 ? 2 : 3.5 })));
  }
  marks.append(...bad.map((column) => shape("text", { class: "bad", x: x(stepOf(grid, column)), y: TOP + 8, "text-anchor": "middle" }, "\u00d7")));
  return { x, parts: [frame, marks] };
}

// A chart with a cursor: the pointer or the arrow keys choose a column. `draw` returns areas and lines, and `say`, which
// returns [class, text] lines for a column.
function chart(report, { title, unit, attributes, isShare = false, draw }) {
  const box = element("figure", attributes), { grid } = report;
  const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": title });
  const bubble = element("div", { class: "bubble", role: "status" });
  const cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  let drawn = null, at = null, column = null;
  const hide = () => { cursor.remove(); bubble.classList.remove("shown"); };
  const show = (wanted) => {
    column = Math.max(0, Math.min(grid.columns - 1, wanted));
    const place = at.x(stepOf(grid, column)), first = grid.first + column * grid.width;
    filled(cursor, { x1: place, x2: place }, []);
    picture.append(cursor);
    const steps = grid.width > 1 ? `steps ${first} to ${first + grid.width - 1}` : `step ${first}`;
    bubble.replaceChildren(element("b", {}, steps), ...drawn.say(column).map(([kind, text]) => element("div", { class: kind }, text)));
    bubble.classList.add("shown");
    bubble.style.left = `${(place / WIDTH) * 100}%`;
    bubble.classList.toggle("left", place > WIDTH / 2);
  };
  picture.addEventListener("pointermove", (event) => {
    const bounds = picture.getBoundingClientRect();
    const share = ((event.clientX - bounds.left) / bounds.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    show(Math.floor(share * grid.columns));
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    show(column === null ? 0 : column + move);
  });
  const redraw = () => {
    drawn = draw();
    at = pictureOf(report, drawn, isShare);
    picture.replaceChildren(...at.parts);
    bubble.classList.remove("shown");
  };
  redraw();
  view.charts.push(redraw);
  const caption = element("figcaption", {}, element("span", { class: "name" }, title), element("span", { class: "unit" }, unit));
  return filled(box, {}, [caption, picture, bubble]);
}

// The curve of a group of runs: the mean over its runs at columns where each has a value, and the band between them.
function groupCurve(curves, grid) {
  const columns = new Map();
  for (const curve of curves) {
    const line = smoothed(curve.mean, view.smoothing);
    columnsOf(curve, grid).forEach((column, place) => columns.set(column, [...(columns.get(column) ?? []), line[place]]));
  }
  const at = [...columns.keys()].filter((column) => columns.get(column).length === curves.length).sort((a, b) => a - b);
  const [one] = curves;
  const band = curves.length > 1 ? { low: at.map((column) => Math.min(...columns.get(column))), high: at.map((column) => Math.max(...columns.get(column))) }
    : { low: one.low, high: one.high, raw: view.smoothing ? one.mean : null };
  return { at, line: at.map((column) => sum(columns.get(column)) / curves.length), ...band };
}

function groupLabel(report, runs) {
  const labels = runs.map((run) => report.runs[run].label);
  if (labels.length === 1) return labels[0];
  const named = labels.length > 3 ? `${labels[0]} and ${labels.length - 1} more` : labels.join(", ");
  return `${named}: mean and range over seeds`;
}

// The chart of one metric: a line for each group of runs that is not hidden.
function metricChart(report, name) {
  const entry = report.metrics[name], { grid } = report;
  const draw = () => {
    const groups = report.groups.flatMap((runs, number) => {
      const curves = runs.map((run) => report.curves[name][run]).filter((curve) => curve && curve.mean.length);
      if (!curves.length || view.hidden.has(number)) return [];
      const curve = groupCurve(curves, grid);
      return [{ label: groupLabel(report, runs), colour: lineClass(number), curve, steps: curve.at.map((column) => stepOf(grid, column)) }];
    });
    return {
      areas: groups.filter(({ curve }) => curve.low).map(({ colour, curve, steps }) => ({ kind: `band ${colour}`, at: steps, low: curve.low, high: curve.high })),
      lines: groups.flatMap(({ colour, curve, steps }) => [
        ...(curve.raw ? [{ kind: `raw ${colour}`, at: steps, values: curve.raw }] : []),
        { kind: `curve ${colour}`, dot: `dot ${colour}`, at: steps, values: curve.line }]),
      bad: report.curves[name].flatMap((curve) => curve?.bad ?? []),
      say: (column) => groups.flatMap(({ label, colour, curve }) => {
        const place = curve.at.indexOf(column);
        if (place < 0) return [];
        const range = curve.low ? ` (${short(curve.low[place])} to ${short(curve.high[place])})` : "";
        const raw = curve.raw ? `, raw ${short(curve.raw[place])}` : "";
        return [[`key ${colour}`, `${report.groups.length > 1 ? `${label}: ` : ""}${short(curve.line[place])}${raw}${range}`]];
      }),
    };
  };
  const unit = !entry || entry.unit === "1" ? "" : entry.unit;
  const box = chart(report, { title: name, unit, attributes: { class: "chart", "data-metric": name }, isShare: unit === "share", draw });
  if (entry) {
    const text = `${entry.meaning}.${entry.expect === "-" ? "" : ` Expect: ${entry.expect}.`}`;
    box.append(element("p", { class: "meaning", title: text }, text));
  }
  return box;
}

// The chart of a run's phases on top of one another, with the share of each in the whole time as its legend.
function phaseChart(report, run) {
  const { grid } = report, whole = report.curves["time/step_s"]?.[run];
  if (!whole) return null;
  const outside = new Set(["time/step_s", "time/coverage", "time/reward_latency_s"]);
  const names = Object.keys(report.curves).filter((name) =>
    name.startsWith("time/") && name.endsWith("_s") && !outside.has(name) && report.curves[name][run]);
  const at = columnsOf(whole, grid);
  const rows = names.map((name) => {
    const curve = report.curves[name][run], columns = columnsOf(curve, grid);
    const by = new Map(columns.map((column, place) => [column, curve.mean[place]]));
    return { name: name.slice(5, -2), values: at.map((column) => by.get(column) ?? 0) };
  }).filter((row) => sum(row.values) > 0).sort((a, b) => sum(b.values) - sum(a.values));
  rows.push({ name: "outside of phases", values: whole.mean.map((value, place) => Math.max(0, value - sum(rows.map((row) => row.values[place])))) });
  const colour = (number) => `phase-${Math.min(number, 11)}`;
  const edges = at.flatMap((column) => [stepOf(grid, column) - grid.width / 2, stepOf(grid, column) + grid.width / 2]);
  const twice = (values) => values.flatMap((value) => [value, value]);
  let floor = at.map(() => 0);
  const areas = rows.map((row, number) => {
    const low = floor;
    floor = row.values.map((value, place) => low[place] + value);
    return { kind: `phase ${colour(number)}`, at: edges, low: twice(low), high: twice(floor) };
  });
  const say = (column) => (at.includes(column) ? rows.map((row, number) => [`key ${colour(number)}`, `${row.name} ${short(row.values[at.indexOf(column)])} s`]) : []);
  const attributes = { class: "chart wide", "data-phases": run };
  const box = chart(report, { title: report.runs[run].label, unit: "seconds of a step, by phase", attributes, draw: () => ({ areas, lines: [], say }) });
  const all = sum(floor) || 1;
  box.append(element("div", { class: "legend" }, ...rows.map((row, number) =>
    element("span", { class: `key ${colour(number)}` }, `${row.name} ${(sum(row.values) / all * 100).toFixed(1)} %`))));
  return box;
}
