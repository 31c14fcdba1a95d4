// The tokens of a trajectory, colored by one metric at a time; underlines repeat the color.

const BLOCK = 400;
const LAYERS = {
  mask: { name: "Loss mask", of: () => null, classes: [] },
  logprob: {
    name: "Log-probability",
    of: (sample, at) => sample.logprobs?.[at] ?? null,
    classes: [["s0", "p ≥ 0.9", (v) => v >= Math.log(0.9)], ["s1", "≥ 0.5", (v) => v >= Math.log(0.5)], ["s2", "≥ 0.1", (v) => v >= Math.log(0.1)], ["s3", "≥ 0.01", (v) => v >= Math.log(0.01)], ["s4", "rarer", () => true]],
  },
  advantage: {
    name: "Advantage",
    of: (sample, at) => sample.advantages?.[at] ?? null,
    classes: [["d0", "≤ −1", (v) => v <= -1], ["d1", "below 0", (v) => v < 0], ["d2", "0", (v) => v === 0], ["d3", "above 0", (v) => v < 1], ["d4", "≥ 1", () => true]],
  },
  ratio: {
    name: "Ratio",
    of: (sample, at) => sample.ratio?.[at] ?? null,
    classes: [["d0", "≤ 0.8", (v) => v <= 0.8], ["d1", "< 0.99", (v) => v < 0.99], ["d2", "about 1", (v) => v <= 1.01], ["d3", "> 1.01", (v) => v < 1.2], ["d4", "≥ 1.2", () => true]],
  },
  gap: {
    name: "Sampler gap",
    of: gapOf,
    classes: [["s0", "≤ 0.001", (v) => Math.abs(v) <= 0.001], ["s1", "≤ 0.01", (v) => Math.abs(v) <= 0.01], ["s2", "≤ 0.1", (v) => Math.abs(v) <= 0.1], ["s3", "≤ 1", (v) => Math.abs(v) <= 1], ["s4", "> 1", () => true]],
  },
};

// Log-probability in training minus the one at sampling.
function gapOf(sample, at) {
  const [old, sampled] = [sample.old?.[at] ?? null, sample.logprobs?.[at] ?? null];
  return old === null || sampled === null ? null : old - sampled;
}

const hasLayer = (samples, layer) => layer === "mask" || samples.some((sample) => sample.mask.some((_, at) => LAYERS[layer].of(sample, at) !== null));

function tokenSection(detail) {
  const { samples } = detail;
  if (!samples.length) return section("Tokens", "None were recorded: the model's server returns text only.");
  const layer = state.layer in LAYERS && hasLayer(samples, state.layer) ? state.layer : "mask";
  const total = sum(samples.map((sample) => sample.mask.length));
  const marked = sum(samples.map((sample) => sum(sample.mask)));
  const readout = el("p.token-readout", { "aria-live": "polite" }, "Point at a token, or click one and use ← and →.");
  const node = section("Tokens", `${grouped(marked)} of ${grouped(total)} ${markedAs(samples[0])} (${percent(marked / total)}).`, layerChoice(samples, layer), legend(layer, samples[0]), readout,
    samples.map((sample, index) => tokenText(sample, index, layer, readout)));
  if (samples.some((sample) => !sample.pieces)) node.append(el("p.note", { text: "Token ids only: no matching tokenizer was found." }));
  return node;
}

// Without training records, the mask shows what the policy sampled.
const markedAs = (sample) => (sample.old ? "trained" : "sampled");

function layerChoice(samples, layer) {
  const buttons = Object.entries(LAYERS).map(([name, { name: label }]) => {
    const there = hasLayer(samples, name);
    return el("button", { type: "button", "aria-pressed": String(name === layer), disabled: !there, title: there ? null : "not recorded", text: label, onclick: () => go({ layer: name === "mask" ? null : name }, { replace: true }) });
  });
  return el("div.segments", { role: "group", "aria-label": "Color tokens by" }, buttons);
}

function legend(layer, sample) {
  const keys = LAYERS[layer].classes.map(([name, text]) => el("span", { class: `token ${name}`, text }));
  if (layer === "mask") keys.push(el("span.token.trained", { text: markedAs(sample) }), el("span.token", { text: "context" }));
  else keys.push(el("span.token", { text: "no value" }));
  return el("p.legend-line", {}, keys);
}

function tokenClass(sample, at, layer) {
  if (layer === "mask") return sample.mask[at] ? "token trained" : "token";
  const value = LAYERS[layer].of(sample, at);
  return value === null ? "token" : `token ${LAYERS[layer].classes.find(([, , is]) => is(value))[0]}`;
}

const pieceOf = (sample, at) => (sample.pieces ? sample.pieces[at] : `${sample.ids?.[at] ?? "…"} `);

function tokenText(sample, index, layer, readout) {
  const box = el("div.token-text", { tabindex: "0", role: "group", "aria-label": `Tokens of sequence ${index + 1}; arrow keys move` });
  const { length } = sample.mask;
  const nodes = [];
  for (let start = 0; start < length; start += BLOCK) {
    const block = el("div.token-block", {});
    for (let at = start; at < Math.min(start + BLOCK, length); at += 1) {
      const node = outside(pieceOf(sample, at).replaceAll("\n", "⏎\n"), "span", { class: tokenClass(sample, at, layer) });
      node.at = at;
      nodes.push(node);
      block.append(node);
    }
    box.append(block);
  }
  let current = -1;
  const show = (at) => {
    nodes[current]?.classList.remove("current");
    current = at;
    nodes[at].classList.add("current");
    readout.replaceChildren(...tokenFacts(sample, at));
  };
  box.addEventListener("pointerover", (event) => event.target.at !== undefined && show(event.target.at));
  box.addEventListener("click", (event) => event.target.at !== undefined && show(event.target.at));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    show(Math.min(length - 1, Math.max(0, current + by)));
    nodes[current].scrollIntoView({ block: "nearest" });
  });
  return box;
}

function tokenFacts(sample, at) {
  const exact = (value) => sign(value !== 0 && Math.abs(value) < 0.001 ? value.toExponential() : String(value));
  const facts = [["token", String(at)], ["text", sample.pieces ? JSON.stringify(sample.pieces[at]) : null], ["id", sample.ids?.[at]], ["mask", sample.mask[at] ? markedAs(sample) : "context"]];
  const logprob = sample.logprobs?.[at] ?? null;
  if (logprob !== null) facts.push(["log-probability", `${exact(logprob)} (p ${number(Math.exp(logprob))})`]);
  for (const [name, field] of [["in training", "old"], ["advantage", "advantages"], ["ratio", "ratio"]]) {
    if (sample[field]?.[at] !== null && sample[field]?.[at] !== undefined) facts.push([name, exact(sample[field][at])]);
  }
  const gap = gapOf(sample, at);
  if (gap !== null) facts.push(["sampler gap", exact(Number(gap.toPrecision(3)))]);
  return facts.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => el("span.fact", {}, el("span.key", { text: name }), " ", outside(value)));
}
