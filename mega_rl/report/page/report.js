// The page: heading, warnings, curves by theme, phases, settings, samples.

function toolbar(report) {
  const shown = element("output", {}, "0");
  const slider = element("input", { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: view.smoothing });
  const apply = () => {
    view.smoothing = Number(slider.value);
    shown.textContent = slider.value;
    view.charts.forEach((redraw) => redraw());
  };
  slider.addEventListener("input", apply);
  const keys = report.groups.map((runs, number) => {
    const box = element("input", { type: "checkbox", checked: "" });
    box.addEventListener("change", () => {
      if (box.checked) view.hidden.delete(number);
      else view.hidden.add(number);
      view.charts.forEach((redraw) => redraw());
    });
    return element("label", { class: `key ${lineClass(number)}` }, box, groupLabel(report, runs));
  });
  return element("div", { class: "toolbar" }, element("div", { class: "legend" }, ...keys),
    element("label", { class: "smoothing" }, "smoothing ", slider, " ", shown));
}

// Model, algorithm, engine, hosts, date and time of a run, and how its rewards went.
function headline(report, number) {
  const run = report.runs[number];
  const setting = (key) => report.config[key]?.[number] ?? "";
  const values = (name) => report.curves[name]?.[number]?.mean ?? [];
  const parts = [setting("model.path").split("/").pop(), setting("algorithm.advantage"), setting("engine.backend")];
  const hosts = [...new Set(run.hosts)];
  if (hosts.length) parts.push(`${run.hosts.length} rank${run.hosts.length > 1 ? "s" : ""} on ${hosts[0]}${hosts.length > 1 ? ` and ${hosts.length - 1} more` : ""}`);
  parts.push(run.date);
  const seconds = values("time/step_s").reduce((sum, value) => sum + value, 0) * report.grid.width;
  if (seconds) parts.push(`${seconds < 90 ? `${short(Math.round(seconds))} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`} in steps`);
  const reward = values("reward/mean"), held_out = values("val/reward_mean");
  if (reward.length) parts.push(`reward ${short(reward[0])} \u2192 ${short(reward[reward.length - 1])}`);
  if (held_out.length) parts.push(`validation ${short(held_out[0])} \u2192 ${short(Math.max(...held_out))} (best)`);
  return `${report.runs.length > 1 ? `${run.label}: ` : ""}${parts.filter(Boolean).join(" \u00b7 ")}`;
}

function heading(report) {
  const runs = report.runs.map((run) => `${run.label} (step ${run.last.toLocaleString("en-US")}${run.seed === null ? "" : `, seed ${run.seed}`})`);
  const { grid } = report;
  const note = grid.width > 1 ? ` Each point of a curve is the mean over ${grid.width} steps; the band around it holds all their values.` : "";
  const links = [["Warnings", "warnings"], ["Curves", "curves"], ["Time of a step", "phases"], ["Settings", "settings"], ["Samples", "samples"]];
  return element("header", {}, element("h1", {}, report.runs.length > 1 ? `${report.runs.length} runs` : report.runs[0].label),
    element("p", {}, `${runs.join(", ")}. mega_rl ${report.version}.${note} `, element("span", { id: "status" })),
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
  return element("article", { class: symptom.until === null ? "symptom" : "symptom past" }, element("h3", {}, symptom.rule),
    element("p", {}, link, ` ${symptom.seen} (${where}since step ${symptom.step}${symptom.until === null ? "" : `, gone after step ${symptom.until}`}).`),
    element("p", {}, symptom.meaning), element("p", { class: "action" }, element("b", {}, "Try: "), symptom.action),
    element("p", { class: "page" }, symptom.page));
}

// Open the theme of a metric and bring its chart into view.
function reveal(name) {
  const charts = () => [...document.querySelectorAll(".chart")].filter((box) => box.dataset.metric === name);
  if (!charts().length) {
    const theme = document.querySelector(`details[data-theme="${CSS.escape(themeOf(name))}"]`);
    theme.open = true;
    theme.dispatchEvent(new Event("toggle"));
  }
  const [box] = charts();
  box.scrollIntoView({ block: "center" });
  box.querySelector("svg").focus();
}

function themeOf(name) {
  return current.themes.find(([, names]) => names.includes(name))[0];
}

function warnings(report) {
  const cards = report.symptoms.flatMap((symptoms, run) => symptoms.map((symptom) => symptomCard(report, run, symptom)));
  if (report.runs.every((run) => run.last === 0)) return null;
  const none = element("p", { class: "good" }, `${report.rules} rules of the page \u201cWhen a run goes wrong\u201d looked at the metrics and none fired. Read the samples as well.`);
  return section("Warnings", "warnings", ...(cards.length ? [element("div", { class: "symptoms" }, ...cards)] : [none]));
}

function curves(report) {
  const charts = (names) => element("div", { class: "charts" }, ...names.map((name) => chart(report, name)));
  const themes = report.themes.filter(([, names]) => names.length).map(([title, names]) => folded(
    `${title} (${names.length})`, () => charts(names), { "data-theme": title }));
  if (!themes.length) return section("Curves", "curves", element("p", {}, "No metrics yet: the first step goes on."));
  return section("Curves", "curves", toolbar(report), charts(report.overview), ...themes);
}

function phases(report) {
  const charts = report.runs.map((_, run) => phaseChart(report, run)).filter((box) => box !== null);
  const none = element("p", {}, "No times of steps yet.");
  return section("Time of a step", "phases", charts.length ? element("div", { class: "charts two" }, ...charts) : none);
}

function settings(report) {
  const labels = report.runs.map((run) => run.label);
  const rows = (keys) => keys.map((key) => [element("code", {}, key), ...report.config[key]]);
  const all = Object.keys(report.config);
  if (!all.length) return section("Settings", "settings", element("p", {}, "No config.yaml in the folder of the run."));
  const changed = Object.entries(report.changed).map(([key, usual]) => [element("code", {}, key), report.config[key][0], usual ?? "-"]);
  const difference = report.runs.length < 2 ? table(["not the default", ...labels, "default"], changed, { id: "changed" }) : report.differing.length
    ? table(["differs", ...labels], rows(report.differing), { id: "difference" })
    : element("p", {}, "The runs have the same settings.");
  return section("Settings", "settings", difference,
    folded(`all ${all.length} settings`, () => table(["setting", ...labels], rows(all))));
}

function samples(report) {
  const boxes = report.runs.map((run, number) => (report.runs.length === 1
    ? samplesOf(report, number) : folded(run.label, () => samplesOf(report, number), number ? {} : { open: "" })));
  return section("Samples", "samples", ...boxes);
}

// The table of ranks of a viewer; a file has none.
function ranks(report) {
  if (!report.ranks?.length) return null;
  return section("Ranks", "ranks", element("pre", { class: "scroll" }, report.ranks.join("\n")));
}

function show(report) {
  view.charts = [];
  const parts = [heading(report), ranks(report), warnings(report), curves(report), phases(report), settings(report), samples(report)];
  document.getElementById("report").replaceChildren(...parts.filter((part) => part !== null));
}

// New data in the page: what was open stays open, and the page stays where it is.
function update(report) {
  const summaries = () => [...document.querySelectorAll("details")];
  const open = summaries().map((box) => box.open);
  const place = window.scrollY;
  show(report);
  summaries().forEach((box, number) => {
    if (open[number] && !box.open) {
      box.open = true;
      box.dispatchEvent(new Event("toggle"));
    }
  });
  window.scrollTo(0, place);
}

// Ask the viewer for news, again and again; say so when it answers no more.
async function follow() {
  let status = "";
  try {
    const answer = await fetch(`data?number=${current.number}`);
    if (!answer.ok) throw new Error(String(answer.status));
    const news = await answer.json();
    if ("curves" in news) {
      current = { ...news, refresh_s: current.refresh_s };
      update(current);
    } else if (document.querySelector("#ranks pre")) {
      document.querySelector("#ranks pre").textContent = news.ranks.join("\n");
    }
    status = `live, looked at ${new Date().toLocaleTimeString("en-GB")}`;
  } catch {
    status = "the viewer answers no more; this is the last it said";
  }
  document.getElementById("status").textContent = status;
  window.setTimeout(follow, current.refresh_s * 1000);
}

let current = JSON.parse(document.getElementById("data").textContent);
show(current);
if (current.refresh_s) follow();
