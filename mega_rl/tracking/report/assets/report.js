// The page: heading, warnings, curves by theme, phases, settings, samples.

const SHOWN_NUMBERS = ["reward", "advantage_mean", "response_tokens", "finished", "end", "branch", "answer"];
const EXCERPT = 60; // characters of what a turn read, in the line that unfolds it

function toolbar(report) {
  const shown = element("output", {}, "0");
  const slider = element("input", { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: view.smoothing });
  const redraw = () => view.charts.forEach((draw) => draw());
  slider.addEventListener("input", () => {
    view.smoothing = Number(slider.value);
    shown.textContent = slider.value;
    redraw();
  });
  const keys = report.groups.map((runs, number) => {
    const box = element("input", { type: "checkbox", checked: "" });
    box.addEventListener("change", () => {
      view.hidden[box.checked ? "delete" : "add"](number);
      redraw();
    });
    return element("label", { class: `key ${lineClass(number)}` }, box, groupLabel(report, runs));
  });
  return element("div", { class: "toolbar" }, element("div", { class: "legend" }, ...keys),
    element("label", { class: "smoothing" }, "smoothing ", slider, " ", shown));
}

// Model, algorithm, engine, hosts, date and time of a run, and its first and best rewards.
function headline(report, number) {
  const run = report.runs[number];
  const setting = (key) => report.config[key]?.[number] ?? "";
  const values = (name) => report.curves[name]?.[number]?.mean ?? [];
  const parts = [setting("model.path").split("/").pop(), setting("algorithm.advantage"), setting("engine.backend")];
  const hosts = [...new Set(run.hosts)];
  if (hosts.length) parts.push(`${run.hosts.length} rank${run.hosts.length > 1 ? "s" : ""} on ${hosts[0]}${hosts.length > 1 ? ` and ${hosts.length - 1} more` : ""}`);
  parts.push(run.date);
  const seconds = sum(values("time/step_s")) * report.grid.width;
  if (seconds) parts.push(`${seconds < 90 ? `${short(Math.round(seconds))} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`} in steps`);
  const reward = values("reward/mean"), heldOut = values("val/reward_mean");
  if (reward.length) parts.push(`reward ${short(reward[0])} \u2192 ${short(reward.at(-1))}`);
  if (heldOut.length) parts.push(`validation ${short(heldOut[0])} \u2192 ${short(Math.max(...heldOut))} (best)`);
  return `${report.runs.length > 1 ? `${run.label}: ` : ""}${parts.filter(Boolean).join(" \u00b7 ")}`;
}

function heading(report) {
  const runs = report.runs.map((run) => `${run.label} (step ${run.last.toLocaleString("en-US")}${run.seed === null ? "" : `, seed ${run.seed}`})`);
  const { width } = report.grid;
  const note = width > 1 ? ` Each point of a curve is the mean over ${width} steps; the band around it holds all their values.` : "";
  const links = [["Warnings", "warnings"], ...(report.audits.some(Boolean) ? [["Audit", "audit"]] : []), ["Curves", "curves"], ["Time of a step", "phases"], ["Settings", "settings"], ["Samples", "samples"]];
  return element("header", {}, element("h1", {}, report.runs.length > 1 ? `${report.runs.length} runs` : report.runs[0].label),
    element("p", {}, `${runs.join(", ")}. mega_rl ${report.version}.${note} `),
    ...report.runs.map((_, run) => element("p", { class: "headline" }, headline(report, run))),
    element("nav", {}, ...links.map(([title, id]) => element("a", { href: `#${id}` }, title))));
}

function symptomCard(report, run, symptom) {
  const where = report.runs.length > 1 ? `${report.runs[run].label}, ` : "";
  const link = element("a", { href: "#curves" }, symptom.metric);
  link.addEventListener("click", (event) => {
    event.preventDefault();
    reveal(symptom.metric);
  });
  return element("article", { class: "symptom" }, element("h3", {}, symptom.rule),
    element("p", {}, link, ` ${symptom.seen} (${where}since step ${symptom.step}).`),
    element("p", {}, symptom.meaning), element("p", { class: "action" }, element("b", {}, "Try: "), symptom.action),
    element("p", { class: "page" }, symptom.page));
}

// Open the theme of a metric and bring its chart into view.
function reveal(name) {
  const find = () => [...document.querySelectorAll(".chart")].find((box) => box.dataset.metric === name);
  if (!find()) {
    const [title] = current.themes.find(([, names]) => names.includes(name));
    unfold(document.querySelector(`details[data-theme="${CSS.escape(title)}"]`));
  }
  find().scrollIntoView({ block: "center" });
  find().querySelector("svg").focus();
}

function unfold(box) {
  box.open = true;
  box.dispatchEvent(new Event("toggle"));
}

function warnings(report) {
  if (report.runs.every((run) => run.last === 0)) return null;
  const cards = report.symptoms.flatMap((symptoms, run) => symptoms.map((symptom) => symptomCard(report, run, symptom)));
  const none = `${report.rules} rules of the page \u201cWhen a run goes wrong\u201d looked at the metrics and none fired. Read the samples as well.`;
  return section("Warnings", "warnings", cards.length ? element("div", { class: "symptoms" }, ...cards) : element("p", { class: "good" }, none));
}

// Pages of `mega-rl audit`, of runs that have one.
function audits(report) {
  const pages = report.audits.flatMap((text, run) => (text ? [element("h3", {}, report.runs[run].label), element("pre", { class: "audit" }, text)] : []));
  return pages.length ? section("Audit", "audit", ...pages) : null;
}

function curves(report) {
  const charts = (names) => element("div", { class: "charts" }, ...names.map((name) => metricChart(report, name)));
  const themes = report.themes.filter(([, names]) => names.length).map(([title, names]) =>
    folded(`${title} (${names.length})`, () => charts(names), { "data-theme": title }));
  if (!themes.length) return section("Curves", "curves", element("p", {}, "No metrics yet: the first step is in progress."));
  return section("Curves", "curves", toolbar(report), charts(report.overview), ...themes);
}

function phases(report) {
  const charts = report.runs.map((_, run) => phaseChart(report, run)).filter((box) => box !== null);
  return section("Time of a step", "phases", charts.length ? element("div", { class: "charts two" }, ...charts) : element("p", {}, "No times of steps yet."));
}

function settings(report) {
  const labels = report.runs.map((run) => run.label), all = Object.keys(report.config);
  const rows = (keys) => keys.map((key) => [element("code", {}, key), ...report.config[key]]);
  if (!all.length) return section("Settings", "settings", element("p", {}, "No config.yaml in the folder of the run."));
  const changed = Object.entries(report.changed).map(([key, usual]) => [element("code", {}, key), report.config[key][0], usual]);
  const difference = report.runs.length < 2 ? table(["not the default", ...labels, "default"], changed, { id: "changed" })
    : report.differing.length ? table(["differs", ...labels], rows(report.differing), { id: "difference" })
      : element("p", {}, "The runs have the same settings.");
  return section("Settings", "settings", difference, folded(`all ${all.length} settings`, () => table(["setting", ...labels], rows(all))));
}

// Largest size of a value over tokens; a few extreme tokens do not make all others pale.
function scaleOf(values) {
  const sizes = values.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor((sizes.length - 1) * 0.98)] || sizes.at(-1) || 1 : 1;
}

// Parts of a conversation, neighbours of one turn each; what a turn read is folded, but for the prompt.
function conversation(parts, kind) {
  return element("div", { class: kind }, ...parts.map(({ turn, label, text, content }, place) => {
    if (turn) return element("div", { class: "turn" }, element("span", { class: "label" }, label), ...content());
    if (!place) return element("div", { class: "prompt" }, ...content());
    const line = text.replace(/\s+/g, " ");
    const excerpt = line.length > EXCERPT ? `${line.slice(0, EXCERPT)}\u2026` : line;
    return folded(`read: ${excerpt}`, () => element("div", {}, ...content()), { class: "read" });
  }));
}

// Tokens with backgrounds by `name`: orange above 0, blue below, paler towards 0; prompts and tools have none.
function heatMap(sample, name, scale) {
  const token = (text, place) => {
    const value = sample.values[name][place];
    const visible = text === "" ? "\u2205" : text.replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u21e5");
    if (value === null) return element("span", { class: "token given" }, visible);
    const strength = Math.round(Math.min(1, Math.abs(value) / scale) * 10);
    const lines = Object.entries(sample.values).filter(([, values]) => values[place] !== null).map(([key, values]) => `${key} ${short(values[place])}`);
    const title = [`token ${place}`, ...lines].join("\n");
    return element("span", { class: `token ${value < 0 ? "cold" : "warm"}-${strength}`, title }, visible);
  };
  const starts = sample.of_turns.flatMap((turn, place) => (place && turn === sample.of_turns[place - 1] ? [] : [place]));
  if (starts.length < 3) return element("div", { class: "text tokens" }, ...sample.texts.map(token));
  return conversation(starts.map((start, number) => {
    const turn = sample.of_turns[start], texts = sample.texts.slice(start, starts[number + 1]);
    const trains = sample.values[name][start] !== null;
    return { turn, label: `turn ${turn}${trains ? "" : ", trained in another row"}`, text: texts.join(""),
      content: () => texts.map((text, place) => token(text, start + place)) };
  }), "text tokens");
}

// Legend of the colours, for all samples of a run.
function colourKey(values, scale) {
  const signed = values.some((value) => value !== null && value < 0);
  return element("div", { class: "scale" }, signed ? element("span", { class: "token cold-10" }, `-${short(scale)}`) : null, " ",
    element("span", { class: "token" }, "0"), " ", element("span", { class: "token warm-10" }, short(scale)),
    " Hover a token for its values. Tokens without colour were given, not sampled.");
}

function sampleCard(sample, name, scale) {
  const known = SHOWN_NUMBERS.filter((key) => key in sample.numbers);
  const others = Object.keys(sample.numbers).filter((key) => !known.includes(key) && key.startsWith("reward"));
  const numbers = [...known, ...others].map((key) => element("span", { class: "number" }, `${key} `, element("b", {}, short(sample.numbers[key]))));
  const head = element("div", { class: "head" }, element("span", { class: "source" }, sample.source), ...numbers);
  if (name in sample.values) return element("article", { class: "sample heat" }, head, heatMap(sample, name, scale));
  const parts = sample.turns.map(([turn, text]) => ({ turn, label: `turn ${turn}`, text, content: () => [text] }));
  return element("article", { class: "sample" }, head, element("div", { class: "text prompt" }, sample.prompt),
    parts.length > 1 ? conversation([{ turn: 0, text: "", content: () => [] }, ...parts], "text response")
      : element("div", { class: "text response" }, sample.response));
}

function samplesOf(report, run) {
  const { rows, left_out: leftOut } = report.samples[run];
  if (!rows.length) return element("p", {}, "No samples: metrics.rollout_interval and metrics.rollout_samples say when a run dumps some.");
  const names = [...new Set(rows.flatMap((sample) => Object.keys(sample.values)))];
  const brief = rows.every((sample) => sample.prompt.length + sample.response.length < 160);
  const cards = element("div", { class: brief ? "brief" : "" }), key = element("div");
  const choose = element("select", { "aria-label": "value of tokens" },
    ...names.map((name) => element("option", { value: name }, name)), element("option", { value: "" }, "plain text"));
  const fill = () => {
    const values = rows.flatMap((sample) => sample.values[choose.value] ?? []), scale = scaleOf(values);
    key.replaceChildren(...(choose.value ? [colourKey(values, scale)] : []));
    cards.replaceChildren(...rows.map((sample) => sampleCard(sample, choose.value, scale)));
  };
  choose.addEventListener("change", fill);
  fill();
  return element("div", { class: "samples" },
    element("p", { class: "note" }, "The newest records of steps and dumps of rollouts, the first samples of each."),
    names.length ? element("label", {}, "tokens by ", choose) : null, key, cards,
    leftOut ? element("p", { class: "note" }, `${leftOut} more samples had no room in this page.`) : null);
}

function samples(report) {
  return section("Samples", "samples", ...report.runs.map((run, number) => (report.runs.length === 1
    ? samplesOf(report, number) : folded(run.label, () => samplesOf(report, number), number ? {} : { open: "" }))));
}

function show(report) {
  view.charts = [];
  const parts = [heading, warnings, audits, curves, phases, settings, samples].map((part) => part(report));
  document.getElementById("report").replaceChildren(...parts.filter((part) => part !== null));
}

const current = JSON.parse(document.getElementById("data").textContent);
show(current);
