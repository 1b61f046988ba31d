// Samples: texts with their numbers, or tokens as a heat map of a value that a reader chooses.

const SHOWN_NUMBERS = ["reward", "advantage_mean", "response_tokens", "finished", "answer"];

// Largest size of a value over the tokens of a sample; a few extreme tokens do not make all others pale.
function scaleOf(values) {
  const sizes = values.filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes.length ? sizes[Math.floor((sizes.length - 1) * 0.98)] || sizes[sizes.length - 1] || 1 : 1;
}

// Text of a token: white space that is the whole of it gets a sign.
function visible(text) {
  if (text === "") return "\u2205";
  return text.replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u21e5");
}

// Tokens with backgrounds by `name`: orange above 0, blue below, paler towards 0; prompts and tools without any.
function heatMap(sample, name) {
  const column = sample.values[name];
  const scale = scaleOf(column);
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
  const low = element("span", { class: "token cold-10" }, `-${short(scale)}`);
  const high = element("span", { class: "token warm-10" }, short(scale));
  const signed = column.some((value) => value !== null && value < 0);
  const key = element("div", { class: "scale" }, ...(signed ? [low, " "] : []), element("span", { class: "token" }, "0"), " ", high,
    " of this sample; hover a token for its values; tokens without colour were given, not sampled");
  return element("div", {}, element("div", { class: "text tokens" }, ...tokens), key);
}

function numbersOf(sample) {
  const known = SHOWN_NUMBERS.filter((key) => key in sample.numbers);
  const others = Object.keys(sample.numbers).filter((key) => !known.includes(key) && key.startsWith("reward"));
  return [...known, ...others].map((key) => element("span", { class: "number" }, `${key} `, element("b", {}, short(sample.numbers[key]))));
}

function sampleCard(sample, place) {
  const head = element("div", { class: "head" }, element("span", { class: "source" }, sample.source), ...numbersOf(sample));
  const names = Object.keys(sample.values);
  const body = element("div", {});
  const asText = () => body.replaceChildren(
    element("div", { class: "text prompt" }, sample.prompt), element("div", { class: "text response" }, sample.response));
  if (!names.length) {
    asText();
    return element("article", { class: "sample" }, head, body);
  }
  const choose = element("select", { "aria-label": `value of tokens of sample ${place + 1}` },
    ...names.map((name) => element("option", { value: name }, name)), element("option", { value: "" }, "plain text"));
  const fill = () => (choose.value ? body.replaceChildren(heatMap(sample, choose.value)) : asText());
  choose.addEventListener("change", fill);
  head.append(choose);
  fill();
  return element("article", { class: "sample heat" }, head, body);
}

function samplesOf(report, run) {
  const { rows, left_out: leftOut } = report.samples[run];
  if (!rows.length) return element("p", {}, "No samples: metrics.rollout_interval and metrics.rollout_samples say when a run dumps some.");
  const note = leftOut ? element("p", { class: "note" }, `${leftOut} more samples of the newest dumps had no room in this page.`) : null;
  return element("div", {}, ...rows.slice(0, 60).map(sampleCard), note);
}
