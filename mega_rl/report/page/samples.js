// Samples: texts with their numbers, or tokens as a heat map of a value that a reader chooses.

const SHOWN_NUMBERS = ["reward", "advantage_mean", "response_tokens", "finished", "answer"];

// Largest size of a value over tokens; a few extreme tokens do not make all others pale.
function scaleOf(values) {
  const sizes = values.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor((sizes.length - 1) * 0.98)] || sizes[sizes.length - 1] || 1 : 1;
}

// Text of a token: white space that is the whole of it gets a sign.
function visible(text) {
  if (text === "") return "\u2205";
  return text.replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u21e5");
}

// Tokens with backgrounds by `name`: orange above 0, blue below, paler towards 0; prompts and tools have none.
function heatMap(sample, name, scale) {
  const column = sample.values[name];
  const tokens = sample.texts.map((text, place) => {
    const value = column[place];
    const token = element("span", { class: value === null ? "token given" : "token" }, visible(text));
    if (value !== null) {
      const strength = Math.round(Math.min(1, Math.abs(value) / scale) * 10);
      token.classList.add(value < 0 ? `cold-${strength}` : `warm-${strength}`);
      const lines = Object.entries(sample.values).filter(([, values]) => values[place] !== null).map(([key, values]) => `${key} ${short(values[place])}`);
      token.title = [`token ${place}`, ...lines].join("\n");
    }
    return token;
  });
  return element("div", { class: "text tokens" }, ...tokens);
}

// What the colours mean, for all samples of a run.
function colourKey(values, scale) {
  const signed = values.some((value) => value !== null && value < 0);
  const low = element("span", { class: "token cold-10" }, `-${short(scale)}`);
  return element("div", { class: "scale" }, ...(signed ? [low, " "] : []), element("span", { class: "token" }, "0"), " ",
    element("span", { class: "token warm-10" }, short(scale)), " Hover a token for its values. Tokens without colour were given, not sampled.");
}

function numbersOf(sample) {
  const known = SHOWN_NUMBERS.filter((key) => key in sample.numbers);
  const others = Object.keys(sample.numbers).filter((key) => !known.includes(key) && key.startsWith("reward"));
  return [...known, ...others].map((key) => element("span", { class: "number" }, `${key} `, element("b", {}, short(sample.numbers[key]))));
}

function sampleCard(sample, name, scale) {
  const head = element("div", { class: "head" }, element("span", { class: "source" }, sample.source), ...numbersOf(sample));
  const texts = [element("div", { class: "text prompt" }, sample.prompt), element("div", { class: "text response" }, sample.response)];
  const body = name in sample.values ? [heatMap(sample, name, scale)] : texts;
  return element("article", { class: name in sample.values ? "sample heat" : "sample" }, head, ...body);
}

function samplesOf(report, run) {
  const { rows, left_out: leftOut } = report.samples[run];
  if (!rows.length) return element("p", {}, "No samples: metrics.rollout_interval and metrics.rollout_samples say when a run dumps some.");
  const names = [...new Set(rows.flatMap((sample) => Object.keys(sample.values)))];
  const brief = rows.every((sample) => sample.prompt.length + sample.response.length < 160);
  const cards = element("div", { class: brief ? "brief" : "" });
  const key = element("div", {});
  const choose = element("select", { "aria-label": "value of tokens" },
    ...names.map((name) => element("option", { value: name }, name)), element("option", { value: "" }, "plain text"));
  const fill = () => {
    const values = rows.flatMap((sample) => sample.values[choose.value] ?? []);
    const scale = scaleOf(values);
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
