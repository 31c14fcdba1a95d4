// Several runs: a table to sort, and their curves over each other, colored by run or by a setting in which they differ.

const meanOver = (points) => {
  if (points.length < 2) return points[0]?.y ?? null;
  const areas = points.slice(1).map((point, index) => ((point.y + points[index].y) / 2) * (point.x - points[index].x));
  return sum(areas) / (points.at(-1).x - points[0].x);
};
const pointsOf = (records, field) => records.filter((each) => Number.isFinite(each[field])).map((each) => ({ x: each.step, y: each[field] }));
const seconds = (run) => sum(run.steps.map((step) => step.seconds?.total || 0)) || null;
const held = (run) => pointsOf(run.evaluations, "accuracy");
const under = (value, text) => [value, el("span.under.block", { text })];
const measured = (of) => [(run) => of(run)?.accuracy ?? null, (value, run) => (value === null ? "–" : under(percent(value), Number.isFinite(of(run).accuracy_low) ? interval(of(run)) : ""))];
// Of each its value in a run, by which the table sorts, and what it shows.
const RUN_COLUMNS = {
  state: [stateOf, (value, run) => (value === null ? "–" : el("span", { class: `live ${progress(run).kind}`, text: value }))],
  test: measured((run) => run.pair?.after),
  confirmed: measured((run) => run.confirmed),
  best: [(run) => (held(run).length ? bestOf(run.evaluations).accuracy : null), (value, run) => (value === null ? "–" : under(percent(value), `step ${bestOf(run.evaluations).step}`))],
  last: [(run) => held(run).at(-1)?.y ?? null, percent],
  mean: [(run) => meanOver(held(run)), percent],
  steps: [(run) => run.steps.at(-1)?.step ?? null, (value, run) => (run.status?.steps > value ? under(number(value), `of ${number(run.status.steps)}`) : number(value))],
  time: [seconds, (value) => (value === null ? "–" : duration(value))],
  tokens: [(run) => sum(run.steps.map((step) => step.total_tokens || 0)) || null, (value) => number(value, 0)],
};

const redrawOverview = (changes) => {
  go(changes, { replace: true });
  replaceKept(document.getElementById("main"), overview());
};

function runsOverview() {
  const { runs } = data.run;
  const settings = Object.keys(runs[0].given);
  const groupsBy = (setting) => groupedBy(runs, (run) => textOf(run.given[setting]));
  const natural = settings.find((name) => !["seed", "max_steps"].includes(name) && groupsBy(name).size < runs.length);
  const by = state.by === undefined ? natural : settings.find((name) => name === state.by);
  const names = runs.map((run) => (by ? textOf(run.given[by]) : distinct(run.title, runs)));
  const order = [...new Set(names)];
  const series = names.map((name) => order.indexOf(name) % 6);
  const lines = (of) => runs.map((run, index) => ({ name: names[index], own: by ? `${run.title}, ${names[index]}` : run.title, series: series[index], ...of(run) }));
  const steps = (field) => lines((run) => ({ points: pointsOf(run.steps, field) }));
  const smooth = state.smooth === "yes";
  const charts = [
    lineChart("Validation accuracy", lines((run) => ({ kind: "dots", points: held(run) })), { show: percent, zero: true }),
    lineChart("Training accuracy", steps("accuracy"), { show: percent, zero: true, smooth }),
    lineChart("Reward", steps("reward_mean"), { smooth }),
    lineChart("Loss", steps("loss"), { smooth }),
    lineChart("KL to the reference", steps("kl"), { zero: true, smooth }),
    lineChart("Entropy", steps("entropy"), { zero: true, smooth }),
    lineChart("Seconds a step", lines((run) => ({ points: run.steps.filter((step) => step.seconds?.total).map((step) => ({ x: step.step, y: step.seconds.total })) })), { show: (value) => number(value, 1), zero: true, smooth }),
  ].filter(Boolean);
  return el("div.overview", {}, el("div.heading", {}, outside(data.run.title, "h1.again"), el("p.lead", { text: settings.length ? `They differ in ${settings.join(", ").replaceAll("_", " ")}.` : "Their settings are the same." })), by ? groupTiles(by, groupsBy(by)) : null, leftOut(),
    section("Compared", runs.some((run) => run.evaluations.length) ? "Confirmed is on questions that selected nothing. Best, last and mean are of a run's validations; the best is the highest of several, so too high on average." : null, runTable(runs, settings, series)),
    charts.length ? section("Curves", by ? "Values are means over the runs of a color (lowest to highest)." : null, zoomControls(), runControls(settings, by, smooth), el("div.charts", {}, charts)) : null);
}

// A run's title without the words that all have.
function distinct(title, runs) {
  const words = (text) => text.split(/[-_ ]/);
  return words(title).filter((word) => !runs.every((run) => words(run.title).includes(word))).join("-") || title;
}

// The runs of each value of a setting together: what tests say of them, else their last validation accuracy.
function groupTiles(by, groups) {
  const [name, of] = Object.entries({ "test accuracy": RUN_COLUMNS.test[0], "confirmed accuracy": RUN_COLUMNS.confirmed[0], "last validation accuracy": RUN_COLUMNS.last[0] }).find(([, each]) => data.run.runs.every((run) => each(run) !== null)) ?? [];
  if (!name) return null;
  return el("dl.tiles", {}, [...groups].map(([value, runs], index) => {
    const found = runs.map(of);
    const idle = runs.map((run) => held(run).length > 0 && !bestOf(run.evaluations).step);
    const all = idle.every(Boolean) ? "; no step was better than step 0, so this is the untrained model" : "";
    const each = found.map((value, at) => percent(value) + (idle[at] && !all ? " (untrained)" : "")).join(", ");
    return el("div.tile", {}, el("dt", {}, el("span", { class: `key series-${index % 6}` }, outside(`${by.replaceAll("_", " ")} ${value}`))), el("dd", {}, el("span.value", { text: percent(mean(found)) }), el("span.under", { text: runs.length > 1 ? `${name}, mean of ${plural(runs.length, "run")}: ${each}${all}` : name + all })));
  }));
}

function runControls(settings, by, smooth) {
  const select = el("select", { id: "by" }, el("option", { value: "run", text: "run" }), settings.map((name) => el("option", { value: name, selected: name === by, text: name.replaceAll("_", " ") })));
  select.addEventListener("change", () => redrawOverview({ by: select.value }));
  const toggle = el("input", { type: "checkbox", id: "smooth" });
  toggle.checked = smooth;
  toggle.addEventListener("change", () => redrawOverview({ smooth: toggle.checked ? "yes" : null }));
  return el("p.controls", {}, el("label", {}, "Color by ", select), el("label", {}, toggle, " Smooth; the raw line stays"));
}

function runTable(runs, settings, series) {
  const given = (value) => (value === null || value === undefined ? "–" : textOf(value));
  const columns = [...Object.entries(RUN_COLUMNS).filter(([, [of]]) => runs.some((run) => of(run) !== null)), ...settings.map((name) => [name, [(run) => run.given[name], given]])];
  const order = runs.map((_, index) => index);
  const chosen = columns.find(([name]) => name === state.order);
  if (chosen) {
    const [, [of]] = chosen;
    const rank = (value) => (typeof value === "number" ? value : value === null || value === undefined ? -Infinity : NaN);
    const compare = (one, other) => rank(of(runs[other])) - rank(of(runs[one])) || String(of(runs[one])).localeCompare(String(of(runs[other])));
    order.sort((one, other) => (state.reverse ? -1 : 1) * compare(one, other));
  }
  const head = columns.map(([name]) => {
    const isOn = state.order === name;
    return el("th", { scope: "col", "aria-sort": isOn ? (state.reverse ? "ascending" : "descending") : null }, el("button", { type: "button", text: name.replaceAll("_", " "), onclick: () => redrawOverview({ order: name, reverse: isOn && !state.reverse ? "yes" : null }) }));
  });
  const name = ({ title }) => (config.served ? el("a", { href: runAddress({ run: title }) }, outside(title)) : outside(title));
  const cell = (run, [, [of, show]]) => {
    const shown = show(of(run), run);
    return typeof shown === "string" ? outside(shown, "td") : el("td", {}, shown);
  };
  const body = order.map((index) => el("tr", {}, el("th", { scope: "row", class: `key series-${series[index]}` }, name(runs[index])), columns.map((column) => cell(runs[index], column))));
  return numbersTable("Runs", ["run", ...head], body);
}
