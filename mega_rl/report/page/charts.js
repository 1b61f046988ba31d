// Charts: curves of groups of runs over steps, and phases of a step on top of one another.

const WIDTH = 420, HEIGHT = 210, LEFT = 54, RIGHT = 10, TOP = 10, BOTTOM = 24;
const LINES = 8; // colours of groups, then the same with dashes
const view = { smoothing: 0, hidden: new Set(), charts: [] };

const stepOf = (grid, column) => grid.first + column * grid.width + (grid.width - 1) / 2;
const lineClass = (number) => `line-${number % LINES}${number >= LINES ? " dashed" : ""}`;

// Exponential moving average, divided by the weight it has seen, so that it does not begin at 0.
function smoothed(values, weight) {
  if (weight === 0) return values;
  let sum = 0, seen = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    seen = weight * seen + (1 - weight);
    return sum / seen;
  });
}

// Columns and values of one run: {at, raw, line, low, high}.
function points(curve, grid, weight) {
  const at = curve.at ?? Array.from({ length: grid.columns }, (_, column) => column);
  return { at, raw: curve.mean, line: smoothed(curve.mean, weight), low: curve.low ?? null, high: curve.high ?? null };
}

// The curve of a group: the mean over its runs where each has a value, and the band between the lowest and highest run.
function groupCurve(curves, grid, weight) {
  if (curves.length === 1) {
    const one = points(curves[0], grid, weight);
    return { ...one, low: one.low, high: one.high, count: 1 };
  }
  const columns = new Map();
  for (const curve of curves) {
    const one = points(curve, grid, weight);
    one.at.forEach((column, place) => {
      if (!columns.has(column)) columns.set(column, []);
      columns.get(column).push(one.line[place]);
    });
  }
  const at = [...columns.keys()].filter((column) => columns.get(column).length === curves.length).sort((a, b) => a - b);
  const line = at.map((column) => columns.get(column).reduce((sum, value) => sum + value, 0) / curves.length);
  return {
    at, line, raw: line, count: curves.length,
    low: at.map((column) => Math.min(...columns.get(column))), high: at.map((column) => Math.max(...columns.get(column))),
  };
}

function groupLabel(report, runs) {
  const labels = runs.map((run) => report.runs[run].label);
  if (labels.length === 1) return labels[0];
  const named = labels.length > 3 ? `${labels[0]} and ${labels.length - 1} more` : labels.join(", ");
  return `${named}: mean and range over seeds`;
}

// What is drawn for a metric: [{number, label, curve}], groups that are hidden left out.
function drawn(report, name) {
  return report.groups.flatMap((runs, number) => {
    const curves = runs.map((run) => report.curves[name][run]).filter((curve) => curve && curve.mean.length);
    if (!curves.length || view.hidden.has(number)) return [];
    return [{ number, label: groupLabel(report, runs), curve: groupCurve(curves, report.grid, view.smoothing) }];
  });
}

// The range of an axis; a share has no room below 0 and above 1.
function rangeOf(lists, isShare) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) {
    for (const value of list ?? []) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return [0, 1];
  if (low === 0 && high === 0) return [0, 1];
  const room = low === high ? Math.abs(low) * 0.1 : (high - low) * 0.05;
  return [low >= 0 && low < room ? 0 : low - room, isShare && high <= 1 ? Math.min(high + room, 1) : high + room];
}

// Functions from steps and values to positions, and the grid lines with their labels.
function frame(report, low, high) {
  const { grid } = report;
  const first = grid.first - 0.5, last = grid.first + grid.columns * grid.width - 0.5;
  const x = (step) => LEFT + ((step - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const layer = shape("g", { class: "frame" });
  const heights = ticks(low, high, 4);
  const spacing = heights.length > 1 ? heights[1] - heights[0] : Math.abs(heights[0]) || 1;
  for (const value of heights) {
    layer.append(shape("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      shape("text", { x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, labelOf(value, spacing)));
  }
  for (const step of ticks(grid.first, last - 0.5, 5).filter(Number.isInteger)) {
    layer.append(shape("text", { x: x(step), y: HEIGHT - 8, "text-anchor": "middle" }, (step + 0).toLocaleString("en-US")));
  }
  return { x, y, layer };
}

function pathOf(at, values, x, y) {
  const few = (number) => number.toFixed(1);
  return at.map((step, place) => `${place ? "L" : "M"}${few(x(step))} ${few(y(values[place]))}`).join("");
}

function bandOf(at, low, high, x, y) {
  const back = at.map((_, place) => place).reverse();
  const there = pathOf(at, high, x, y);
  return `${there}${pathOf(back.map((p) => at[p]), back.map((p) => low[p]), x, y).replace("M", "L")}Z`;
}

function curvesOf(report, name) {
  const groups = drawn(report, name);
  const [low, high] = rangeOf(groups.flatMap(({ curve }) => [curve.raw, curve.low, curve.high]), report.metrics[name]?.unit === "share");
  const { x, y, layer } = frame(report, low, high);
  const marks = shape("g");
  for (const { number, curve } of groups) {
    const steps = curve.at.map((column) => stepOf(report.grid, column));
    if (curve.low) marks.append(shape("path", { class: `band ${lineClass(number)}`, d: bandOf(steps, curve.low, curve.high, x, y) }));
    if (view.smoothing && curve.count === 1) {
      marks.append(shape("path", { class: `raw ${lineClass(number)}`, d: pathOf(steps, curve.raw, x, y) }));
    }
    marks.append(shape("path", { class: `curve ${lineClass(number)}`, d: pathOf(steps, curve.line, x, y) }));
    if (steps.length <= 30) {
      steps.forEach((step, place) => marks.append(
        shape("circle", { class: `dot ${lineClass(number)}`, cx: x(step), cy: y(curve.line[place]), r: steps.length > 5 ? 2 : 3.5 })));
    }
  }
  for (const runs of report.groups) {
    for (const column of runs.flatMap((run) => report.curves[name][run]?.bad ?? [])) {
      marks.append(shape("text", { class: "bad", x: x(stepOf(report.grid, column)), y: TOP + 8, "text-anchor": "middle" }, "\u00d7"));
    }
  }
  return { x, layer, marks, groups };
}

// A figure with a cursor: the pointer or the arrow keys choose a column, `say` returns [class, text] lines for it.
function figure(report, title, about, attributes, draw, say) {
  const box = element("figure", attributes);
  const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: 0, "aria-label": title });
  const bubble = element("div", { class: "bubble", role: "status" });
  const cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  let state = null, column = null;
  const hide = () => { cursor.remove(); bubble.classList.remove("shown"); };
  const show = () => {
    const place = state.x(stepOf(report.grid, column));
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    picture.append(cursor);
    const { grid } = report;
    const first = grid.first + column * grid.width;
    const steps = grid.width > 1 ? `steps ${first} to ${first + grid.width - 1}` : `step ${first}`;
    bubble.replaceChildren(element("b", {}, steps), ...say(state, column).map(([kind, text]) => element("div", { class: kind }, text)));
    bubble.classList.add("shown");
    bubble.style.left = `${(place / WIDTH) * 100}%`;
    bubble.classList.toggle("left", place > WIDTH / 2);
  };
  const clamp = (value) => Math.max(0, Math.min(report.grid.columns - 1, value));
  picture.addEventListener("pointermove", (event) => {
    const bounds = picture.getBoundingClientRect();
    const share = ((event.clientX - bounds.left) / bounds.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    column = clamp(Math.floor(share * report.grid.columns));
    show();
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    column = clamp(column === null ? 0 : column + move);
    show();
  });
  const redraw = () => {
    state = draw();
    picture.replaceChildren(state.layer, state.marks);
    bubble.classList.remove("shown");
  };
  redraw();
  view.charts.push(redraw);
  box.append(element("figcaption", {}, element("span", { class: "name" }, title), ...about), picture, bubble);
  return box;
}

// The chart of one metric.
function chart(report, name) {
  const entry = report.metrics[name];
  const about = entry ? [element("span", { class: "unit" }, entry.unit === "1" ? "" : entry.unit)] : [];
  const say = (state, column) => state.groups.flatMap(({ number, label, curve }) => {
    const place = curve.at.indexOf(column);
    if (place < 0) return [];
    const range = curve.low ? ` (${short(curve.low[place])} to ${short(curve.high[place])})` : "";
    const shown = view.smoothing && curve.count === 1 ? `${short(curve.line[place])}, raw ${short(curve.raw[place])}` : short(curve.line[place]);
    return [[`key ${lineClass(number)}`, `${report.groups.length > 1 ? `${label}: ` : ""}${shown}${range}`]];
  });
  const box = figure(report, name, about, { class: "chart", "data-metric": name }, () => curvesOf(report, name), say);
  if (entry) {
    const expect = entry.expect === "-" ? "" : ` Expect: ${entry.expect}.`;
    box.append(element("p", { class: "meaning", title: `${entry.meaning}.${expect}` }, `${entry.meaning}.${expect}`));
  }
  return box;
}

// Phases of a step of one run: {names, steps, layers}; what no phase covers is the rest.
function phasesOf(report, run) {
  const whole = report.curves["time/step_s"]?.[run];
  if (!whole) return null;
  const outside = new Set(["time/step_s", "time/coverage", "time/reward_latency_s", "time/reward_call_max_s"]);
  const names = Object.keys(report.curves).filter((name) =>
    name.startsWith("time/") && name.endsWith("_s") && !outside.has(name) && report.curves[name][run]);
  const { at, raw } = points(whole, report.grid, 0);
  const rows = names.map((name) => {
    const one = points(report.curves[name][run], report.grid, 0);
    const by = new Map(one.at.map((column, place) => [column, one.raw[place]]));
    return { name: name.slice(5, -2), values: at.map((column) => by.get(column) ?? 0) };
  }).filter((row) => row.values.some((value) => value > 0));
  rows.sort((a, b) => b.values.reduce((s, v) => s + v, 0) - a.values.reduce((s, v) => s + v, 0));
  const rest = raw.map((value, place) => Math.max(0, value - rows.reduce((sum, row) => sum + row.values[place], 0)));
  return { at, rows: [...rows, { name: "outside of phases", values: rest }] };
}

// The stacked chart of a run's phases, with the share of each in the whole time as its legend.
function phaseChart(report, run) {
  const phases = phasesOf(report, run);
  if (!phases) return null;
  const { at, rows } = phases;
  const totals = at.map((_, place) => rows.reduce((sum, row) => sum + row.values[place], 0));
  const draw = () => {
    const { x, y, layer } = frame(report, 0, Math.max(...totals) * 1.05 || 1);
    const half = report.grid.width / 2;
    const edges = at.flatMap((column) => { const step = stepOf(report.grid, column); return [step - half, step + half]; });
    const twice = (values) => values.flatMap((value) => [value, value]);
    const marks = shape("g");
    let floor = at.map(() => 0);
    rows.forEach((row, number) => {
      const top = row.values.map((value, place) => floor[place] + value);
      marks.append(shape("path", { class: `phase phase-${Math.min(number, 11)}`, d: bandOf(edges, twice(floor), twice(top), x, y) }));
      floor = top;
    });
    return { x, layer, marks };
  };
  const say = (state, column) => {
    const place = at.indexOf(column);
    return place < 0 ? [] : rows.map((row, number) => [`key phase-${Math.min(number, 11)}`, `${row.name} ${short(row.values[place])} s`]);
  };
  const about = [element("span", { class: "unit" }, "seconds of a step, by phase")];
  const box = figure(report, report.runs[run].label, about, { class: "chart wide", "data-phases": run }, draw, say);
  const all = totals.reduce((sum, value) => sum + value, 0) || 1;
  box.append(element("div", { class: "legend" }, ...rows.map((row, number) => element("span", { class: `key phase-${Math.min(number, 11)}` },
    `${row.name} ${((row.values.reduce((s, v) => s + v, 0) / all) * 100).toFixed(1)} %`))));
  return box;
}
