// The run at a glance: headline numbers, curves, failure classes, changes between two evaluations.

function overview() {
  const { run } = data;
  linked.length = 0;
  if (run.kind === "runs") return runsOverview();
  const parts = [heading(), isWaiting(run) ? firstEvaluation() : hero(), leftOut()];
  const [charts, machines] = [curves(), machine()];
  if (charts.length) parts.push(section("Curves", data.rows.length ? "Click a point to see the trajectories of its step." : null, zoomControls(), el("div.charts", {}, charts), stepTable()));
  if (machines.length) parts.push(section("Machine", null, el("div.charts", {}, machines)));
  if (run.results.length > (run.pair ? 2 : 1)) parts.push(section("Results", "Accuracy with its 95% interval.", resultTable(), run.pair ? null : run.comparisons.map(comparison)));
  parts.push(failures(), accuracies(), changes(), rewardOverview(), metrics());
  return el("div.overview", {}, parts);
}

function section(title, lead, ...content) {
  return el("section", {}, el("h2", { text: title }), lead ? el("p.lead", { text: lead }) : null, content);
}

const policyName = (result) => plain(short(result.model));

// A benchmark is about its policies, a run about itself.
function title() {
  const { pair, run, title: name, kind } = data.run;
  if (kind !== "run" || !pair || run.run_id) return name;
  return pair.before ? `${policyName(pair.before)} → ${policyName(pair.after)}` : policyName(pair.after);
}

function heading(view = null) {
  const { run } = data;
  const folders = new Set(run.files.map((file) => file.name.split("/")[0]));
  const results = run.run.run_id ? [] : run.pair ? [run.pair.before, run.pair.after].filter(Boolean) : run.results;
  const each = (name, of) => { const told = [...new Set(results.map(of).filter(Boolean))]; return told.length && `${name} ${told.join(" → ")}`; };
  const facts = [view && title(), title() !== run.title && [...folders].join(", "), each("base model", (result) => result.base_model), each("checkpoint", (result) => result.checkpoint && `${result.checkpoint}${result.step === null ? "" : ` of step ${result.step}`}`), each("measured", (result) => result.measured_at?.slice(0, 16).replace("T", " ")), run.run.base_model, run.run.algorithm, run.run.mode && `mode ${run.run.mode}`, run.steps.length && plural(run.steps.length, "step"), data.rows.length && plural(data.rows.length, "trajectory")];
  return el("div.heading", {}, outside(view ?? title(), "h1.again"), brief(facts.filter(Boolean).join("  ·  "), "p.lead", {}));
}

function leftOut() {
  const { run } = data;
  const notes = [];
  if (run.folder && run.saved !== null && ["failed", "interrupted", "killed"].includes(run.status?.state)) notes.push(el("p", {}, `To continue after step ${run.saved}: `, outside(`emailrl ${run.run.mode === "sft" ? "sft" : "train"} --resume ${run.folder}`, "code")));
  if (run.left_out.length) notes.push(el("p", {}, el("strong", { text: "Left out of this page: " }), outside(run.left_out.join("; ")), "."));
  for (const note of run.notes) notes.push(outside(note, "p"));
  if (run.redacted) notes.push(el("p", {}, el("strong", { text: "Redacted: " }), run.redacted));
  return notes.length ? el("div.notice", { role: "note" }, notes) : null;
}

const interval = (each) => `${percent(each.accuracy_low).replace("%", "")} to ${percent(each.accuracy_high)}`;
const duration = (seconds) => (seconds < 120 ? `${Math.round(seconds)} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);

// How a policy differs from the one before it, and how sure that is.
const difference = ({ difference: by, difference_low: low, difference_high: high, p_value: p, num_units: units, unit }) => {
  const [change, least, most] = [by, low, high].map((value) => signed(100 * value, 1));
  const sure = `p ${p < 0.0001 ? "< 0.0001" : `= ${Number(p.toPrecision(2))}`} in an exact paired test`;
  const within = low === null ? "" : ` (95% interval ${least} to ${most})`;
  return units ? `${change} points${within}, ${sure} over ${plural(units, unit)}` : sure;
};

const betterOn = (pair) => `better on ${pair.better_second}, worse on ${pair.better_first}`;

// An evaluation that was chosen as the highest of several tells too much of the model that it chose.
const highestOf = ({ length }) => (length > 1 ? `the highest of ${length} evaluations, so too high on average` : "the only evaluation");
const bestOf = (evaluations) => evaluations.reduce((one, other) => (other.accuracy > one.accuracy ? other : one));

// What the page is shown around for: an accuracy before and after, and what is known about that claim.
function headline() {
  const { run } = data;
  const trained = Boolean(run.run.run_id);
  if (run.pair) {
    const { before, after, compared } = run.pair;
    const asked = `${plural(after.num_questions, "question")}${trained ? " that no step has seen" : ""}`;
    const notes = compared?.num_questions ? [difference(compared), `${asked}: ${betterOn(compared)}`] : [asked];
    return { name: trained ? "Test accuracy" : "Accuracy on test questions", before, after, notes };
  }
  const { confirmed } = run;
  const [start] = run.evaluations;
  if (confirmed) return { name: "Validation accuracy", after: confirmed, notes: [`${plural(confirmed.num_questions, "question")} that did not select the model`, start && `at step ${start.step}: ${percent(start.accuracy)} of the ${start.num_questions} that did`] };
  if (run.evaluations.length) {
    const best = bestOf(run.evaluations);
    const [first, last] = [run.evaluations[0], run.evaluations.at(-1)];
    const asked = plural(best.num_questions, "validation question");
    const [shown, name, note] = run.status?.state === "running"
      ? [last, `Validation accuracy at step ${last.step}`, last === best ? `the ${first === best ? "first" : "best so far"}, on ${asked} that select the model` : `the best so far is ${percent(best.accuracy)} at step ${best.step}: on ${asked}, ${highestOf(run.evaluations)}`]
      : [best, `Validation accuracy that selected the model, at step ${best.step}`, `${asked}; ${highestOf(run.evaluations)}`];
    return { name, before: first === shown ? null : first, after: shown, notes: [note] };
  }
  const judged = data.rows.filter((row) => row.verdict !== "not judged");
  if (!judged.length || run.results.length) return null;
  const right = judged.filter((row) => row.verdict === "correct").length;
  return { name: "Correct", before: null, after: { accuracy: right / judged.length }, notes: [`${grouped(right)} of ${grouped(judged.length)} judged`] };
}

// Before a run has measured anything: how far it is with that, and what it said of itself.
const isWaiting = ({ status, steps, evaluations }) => status?.state === "running" && !steps.length && !evaluations.length;

function firstEvaluation() {
  const { status, settings } = data.run;
  const known = status.rollouts > 0;
  const whole = known ? el("span.range.whole", {}, el("span.span", {})) : null;
  if (known) whole.firstChild.style.width = `${(100 * status.done) / status.rollouts}%`;
  return el("div.hero", {},
    el("div.claim", {}, el("h2", { text: "Before the first step" }),
      el("p.figures", {}, el("span.is", { text: known ? `${status.done} of ${status.rollouts}` : "Starting" })),
      known ? el("div.ranges", { "aria-hidden": "true" }, whole) : null,
      el("p.note", { text: `${known ? "Questions answered by the policy as it is now: the accuracy that training starts from. " : ""}Curves, rewards and trajectories stand here as they come.` })),
    settings.run ? el("div.claim", {}, pairTable(settings.run)) : null);
}

function hero() {
  const claim = headline();
  const facts = heroFacts();
  if (!claim) return facts.length ? el("dl.tiles", {}, facts) : null;
  const { name, before, after, notes } = claim;
  const figure = (each, kind) => el("span", { class: kind, text: percent(each.accuracy) });
  const measured = [before, after].filter((each) => each && Number.isFinite(each.accuracy_low));
  const intervals = measured.length ? [`95% interval ${measured.map(interval).join(" → ")}`] : [];
  return el("div.hero", {},
    el("div.claim", {}, el("h2", { text: name }),
      el("p.figures", {}, before ? [figure(before, "was"), el("span.to", { text: " → " })] : null, figure(after, before?.accuracy > after.accuracy ? "is fell" : "is")),
      measured.length ? el("div.ranges", { "aria-hidden": "true" }, measured.map(range)) : null,
      [...intervals, ...notes].filter(Boolean).map((text) => el("p.note", { text }))),
    el("dl.tiles", {}, facts));
}

function range(each) {
  const node = el("span.range", {}, el("span.span", {}), el("span.point", {}));
  node.children[0].style.left = `${100 * each.accuracy_low}%`;
  node.children[0].style.width = `${100 * (each.accuracy_high - each.accuracy_low)}%`;
  node.children[1].style.left = `${100 * each.accuracy}%`;
  return node;
}

function heroFacts() {
  const { run } = data;
  const facts = [];
  const add = (name, value, note) => facts.push(el("div.tile", {}, el("dt", { text: name }), el("dd", {}, el("span.value", { text: value }), note ? outside(note, "span.under", {}) : null)));
  const { evaluations, steps, confirmed, pair, status } = run;
  if (evaluations.length && !pair && status?.state !== "running") add("Test accuracy", "–", "not measured yet: emailrl benchmark, or the end of quickstart, adds it");
  if (confirmed && pair) add("Confirmed", percent(confirmed.accuracy), `${plural(confirmed.num_questions, "validation question")} that did not select the model, ${interval(confirmed)}`);
  if (evaluations.length && (pair || confirmed)) {
    const best = bestOf(evaluations);
    add("Selected the model", percent(best.accuracy), best.step ? `step ${best.step}: ${highestOf(evaluations)}` : `step 0, untrained: ${evaluations.length > 1 ? "no later evaluation was better" : highestOf(evaluations)}`);
  }
  const now = status?.state === "running" && steps.at(-1);
  if (now && Number.isFinite(now.reward_mean)) {
    add("Steps", status.steps ? `${now.step} of ${status.steps}` : number(now.step), now.seconds?.total ? `the last took ${duration(now.seconds.total)}` : null);
    add("Training accuracy", percent(now.accuracy), `step ${now.step}, on questions that it trains on`);
    add("Training reward", number(now.reward_mean), `step ${now.step}, mean`);
  }
  if (evaluations.length > 1) add("Evaluation reward", `${number(evaluations[0].reward)} → ${number(evaluations.at(-1).reward)}`, "mean, first to last");
  else if (pair && !evaluations.length) {
    add("Questions", grouped(pair.after.num_questions), pair.after.num_inboxes ? `of the test split, from ${plural(pair.after.num_inboxes, "inbox")}` : "of the test split");
    const change = (name, field, show, note = "mean per question") => typeof pair.after[field] === "number" && add(name, [pair.before, pair.after].filter(Boolean).map((each) => show(each[field])).join(" → "), note);
    change("Reward", "reward", number);
    change("Cited right emails", "sources_correct", percent);
    change("Turns", "num_turns", (value) => number(value, 1));
    change("Tokens of a conversation", "tokens", (value) => number(value, 0));
    change("Seconds of an answer", "latency_seconds", (value) => number(value, 1), "mean; longer where many are played at once");
    change("US dollars", "cost", number, "of all answers");
  } else if (!steps.length && data.rows.length && status?.state !== "running") add("Reward", number(mean(data.rows.map((row) => row.reward))), "mean");
  const losses = steps.filter((step) => Number.isFinite(step.loss));
  if (!evaluations.length && losses.length) add("Loss", losses.length > 1 ? `${number(losses[0].loss)} → ${number(losses.at(-1).loss)}` : number(losses[0].loss), `first to last of ${plural(steps.length, "step")}`);
  const validated = steps.filter((step) => Number.isFinite(step.val_loss));
  if (validated.length) add("Validation loss", number(validated.at(-1).val_loss), `step ${validated.at(-1).step}, lowest ${number(Math.min(...validated.map((step) => step.val_loss)))}`);
  const timed = steps.filter((step) => step.seconds?.total);
  if (timed.length) {
    const total = sum(timed.map((step) => step.seconds.total));
    const worked = sum(timed.map(working));
    add("Time", duration(total), plural(timed.length, "step") + (total - worked > 1 ? `, of which evaluations took ${duration(total - worked)}` : "") + (evaluations[0]?.step === 0 ? "; the evaluation at step 0 not counted" : ""));
    const speed = sum(timed.map((step) => step.total_tokens || 0)) / worked;
    if (speed) add("Tokens a second", number(speed, 0), "trained on, evaluations aside");
  }
  if (status && status.state !== "running") add("Ended", STATES[status.state] ?? plain(status.state), reasonOf(status));
  const crashed = data.rows.filter((row) => row.verdict === "crashed").length;
  if (crashed) add("Crashed", String(crashed), `of ${plural(data.rows.length, "trajectory")}`);
  return facts;
}

// Half the 95% interval of each step's mean over its groups: rollouts of one question are not independent.
function byStep(valueOf, source = "step") {
  const steps = groupedBy(data.rows.filter((row) => row.source === source && row.verdict !== "crashed"), (row) => row.step);
  const found = new Map();
  for (const [step, rows] of steps) {
    const groups = [...groupedBy(rows, (row) => row.group).values()];
    const means = groups.map((group) => mean(group.map(valueOf).filter((value) => value !== null))).filter((value) => value !== null);
    if (means.length < 2) continue;
    const middle = mean(means);
    const error = Math.sqrt(sum(means.map((value) => (value - middle) ** 2)) / (means.length - 1) / means.length);
    found.set(step, 1.96 * error);
  }
  return found;
}

function stepLine(name, field, half = null, limits = [-Infinity, Infinity]) {
  const points = data.run.steps.map((step) => {
    const y = step[field];
    return { x: step.step, y, ...around(y, half?.get(step.step), limits) };
  });
  return { name, points };
}

function around(y, error, limits = [-Infinity, Infinity]) {
  if (y === null || y === undefined || error === undefined) return {};
  return { low: Math.max(limits[0], y - error), high: Math.min(limits[1], y + error) };
}

const BANDS = "Bars and band: 95% intervals, clustered by question.";

function curves() {
  const { steps, evaluations } = data.run;
  const right = (row) => (row.verdict === "not judged" ? null : Number(row.verdict === "correct"));
  const heldRewards = byStep((row) => row.reward, "eval");
  const held = { name: "validation", kind: "dots", points: evaluations.map((each) => ({ x: each.step, y: each.accuracy, low: each.accuracy_low, high: each.accuracy_high })) };
  const charts = [
    lineChart("Accuracy", [held, stepLine("training", "accuracy", byStep(right), [0, 1])], { show: percent, zero: true, note: BANDS }),
    lineChart("Reward", [{ name: "validation", kind: "dots", points: evaluations.map((each) => ({ x: each.step, y: each.reward, ...around(each.reward, heldRewards.get(each.step)) })) }, stepLine("training", "reward_mean", byStep((row) => row.reward))], { note: BANDS }),
    lineChart("Loss", [stepLine("loss", "loss"), steps.some((step) => step.policy_loss !== step.loss) ? stepLine("policy", "policy_loss") : { points: [] }, { ...stepLine("validation", "val_loss"), kind: "dots" }]),
    lineChart("KL to the reference", [stepLine("KL", "kl")], { zero: true }),
    lineChart("Entropy", [stepLine("entropy", "entropy")], { zero: true }),
    lineChart("Trainable share of tokens", [stepLine("share", "trainable_share")], { show: percent, zero: true }),
    lineChart("Turns per trajectory", [{ name: "validation", kind: "dots", points: evaluations.map((each) => ({ x: each.step, y: each.num_turns })) }, stepLine("training", "num_turns")], { show: (value) => value.toFixed(2), zero: true }),
    lineChart("Tokens per trajectory", [lengths("tokens", (row) => row.tokens), lengths("sampled", (row) => row.trained)], { show: (value) => number(value, 1), zero: true, note: "Of the trajectories in this page." }),
    stackChart("Dropped, by reason", steps.filter((step) => step.dropped).map((step) => ({ x: step.step, parts: renamed(step.dropped) })), { show: (value) => number(value, 1) }),
    lineChart("Gradient norm", [stepLine("norm", "grad_norm")], { zero: true }),
    lineChart("Sampler gap, largest", [stepLine("gap", "sampler_gap_max")], { zero: true, note: "|log-probability in training − at sampling|" }),
  ];
  return charts.filter(Boolean);
}

// Rollouts that run beside the updates take the whole step; the trainer's wait for them is then its "rollout" phase.
const WAITS = ["trainer_wait", "sampler_wait"];
const BESIDE = ["total", "handover", "adapter_load", ...WAITS];
const working = ({ seconds }) => seconds.total - (seconds.evaluation || 0);
const playing = (step) => (WAITS[0] in step.seconds ? working(step) : step.seconds.rollout);

function machine() {
  const { steps } = data.run;
  const line = (name, of) => [{ name, points: timed(steps, of) }];
  return [
    stackChart("Seconds by phase", steps.filter((step) => step.seconds).map((step) => ({ x: step.step, parts: Object.fromEntries(Object.entries(step.seconds).filter(([name]) => !BESIDE.includes(name))) })), { show: (value) => `${number(value, 1)} s`, least: 0.05 }),
    lineChart("Tokens a second", line("tokens", (step) => step.total_tokens / working(step)), { zero: true, show: (value) => number(value, 0), note: "Trained on, per second of rollouts and update." }),
    lineChart("Rollouts a second", line("rollouts", (step) => step.num_trajectories / playing(step)), { zero: true }),
    lineChart("Rollouts in flight", line("rollouts", (step) => ((step.num_trajectories - step.exceptions) * step.duration) / playing(step)), { zero: true, show: (value) => number(value, 1), note: "Mean while rollouts run." }),
    lineChart("Waiting, seconds", WAITS.map((name) => line(IN_WORDS[name], ({ seconds }) => seconds[name])[0]), { zero: true }),
    lineChart("GPU memory, GiB", [stepLine("peak of the update", "peak_memory_gib"), stepLine("all processes, after it", "gpu_memory_gib")], { zero: true, show: (value) => number(value, 1) }),
    lineChart("Servers in use", [stepLine("servers", "servers_up")], { zero: true, show: (value) => number(value, 0) }),
  ].filter(Boolean);
}

const timed = (steps, of) => steps.filter((step) => step.seconds?.total && Number.isFinite(of(step))).map((step) => ({ x: step.step, y: of(step) }));

function lengths(name, valueOf) {
  const steps = groupedBy(data.rows.filter((row) => row.source === "step"), (row) => row.step);
  return { name, points: [...steps].map(([x, rows]) => ({ x, y: mean(rows.map(valueOf)) })).sort((one, other) => one.x - other.x) };
}

const renamed = (parts) => Object.fromEntries(Object.entries(parts).map(([name, value]) => [IN_WORDS[name] ?? name.replaceAll("_", " "), value]));
const IN_WORDS = { groups_unscored: "groups without a verdict or reward", groups_low_std: "groups with nearly equal rewards", groups_below_range: "groups too hard", groups_above_range: "groups too easy", trajectories_exception: "trajectories failed", trajectories_truncated: "trajectories cut off", samples_nothing_trainable: "samples without trainable tokens", trainer_wait: "trainer, for rollouts", sampler_wait: "samplers, for the trainer" };

const STEP_COLUMNS = [
  ["reward_mean", "reward", number], ["accuracy", "accuracy", percent], ["loss", "loss", number], ["kl", "KL", number], ["entropy", "entropy", number],
  ["trainable_share", "trainable", percent], ["num_turns", "turns", number], ["groups_kept", "groups kept", number], ["exceptions", "exceptions", number], ["grad_norm", "grad norm", number],
];
const MOST_TABLE_ROWS = 500;

function stepTable() {
  const { steps } = data.run;
  if (!steps.length) return null;
  const shown = steps.slice(-MOST_TABLE_ROWS);
  const note = shown.length < steps.length ? ` (the last ${MOST_TABLE_ROWS} of ${steps.length})` : "";
  return fold(`All values by step${note}`, "", () => {
    const body = shown.map((step) => el("tr", {}, el("th", { scope: "row" }, el("a", { href: stepAddress(step.step), text: String(step.step) })), STEP_COLUMNS.map(([field, , show]) => el("td", { text: show(step[field]) }))));
    return numbersTable("Values by step", ["step", ...STEP_COLUMNS.map(([, name]) => name)], body);
  });
}

// The list, of all trajectories but for these filters.
const listOf = (filters) => ({ ...noFilters(), view: "list", t: null, side: null, ...filters });
const stepAddress = (step) => address(listOf({ source: "step", step }));
const scroller = (label, content) => el("div.scroller", { role: "region", tabindex: "0", "aria-label": label }, content);

// A table of numbers; on a phone each row stands as a block, its cells under their names.
function numbersTable(label, names, rows, name = "numbers.stacked") {
  const head = names.map((name) => (name.nodeType ? name : el("th", { scope: "col", text: name })));
  for (const row of rows) [...row.cells].forEach((cell, column) => { cell.dataset.name = head[column].firstChild.textContent; });
  return scroller(label, el(`table.${name}`, {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}

const comparison = (each) => brief(`${each.first} → ${each.second}: ${difference(each)}; ${betterOn(each)} of ${plural(each.num_questions, "question")}`, "p.note");

function resultTable() {
  const best = bestOf(data.run.results).accuracy;
  const rows = data.run.results.map((each) => el("tr", {}, brief(each.model, "th", { scope: "row" }), el(each.accuracy === best ? "td.best" : "td", { text: percent(each.accuracy) }), el("td", { text: interval(each) }), el("td", { "aria-hidden": "true" }, range(each)), el("td", { text: number(each.reward) }), el("td", { text: number(each.num_turns, 1) }), el("td", { text: String(each.num_questions) })));
  return numbersTable("Results", ["model", "accuracy", "95% interval", "0 to 100%", "reward", "turns", "questions"], rows);
}

// Numbers of a result that are no measurements, and those that are shares.
const CONDITIONS = /^(step|seed|samples|temperature|answer_correct|max_.*)$|_(low|high)$/;
const SHARES = /accuracy|correct|capitals|pass_at|majority|obeyed|^(ever|attempted|returned|ran|cant|bad)_/;

const METRICS = { cant_parse_tool_call: "tool call not readable", returned_i_dont_know: "did not know", num_turns: "turns", num_sources: "sources cited", num_questions: "questions", num_inboxes: "inboxes" };

// Everything that the tests measured, a row each: accuracy first, the fields of the rubric last.
function metrics() {
  const { pair, results } = data.run;
  const shown = pair ? [pair.before, pair.after].filter(Boolean) : results;
  const names = [...new Set(shown.flatMap(Object.keys))].filter((name) => !CONDITIONS.test(name) && shown.some((each) => typeof each[name] === "number" && each[name]));
  const first = names.indexOf("accuracy");
  if (first < 0) return null;
  const rows = [...names.slice(first), ...names.slice(0, first)].map((name) => el("tr", {}, el("th", { scope: "row", text: METRICS[name] ?? name.replaceAll("_", " ") }), shown.map((each) => el("td", { text: SHARES.test(name) ? percent(each[name]) : number(each[name], 2) }))));
  return section("All metrics", "Means over the test questions; what is 0 everywhere is left out.", numbersTable("All metrics", ["metric", ...shown.map(policyName)], rows, "numbers.few"));
}

// The files whose failures are compared: the two tests of the headline, else the first and last evaluation, else each
// benchmark, else everything.
function compared() {
  const held = (source) => data.run.files.filter((file) => file.source === source && file.count && !file.left_out);
  const evaluations = held("eval");
  const places = data.run.results.map((each) => String(each.trajectories).split("/").at(-1));
  const place = (file) => places.indexOf(file.name.split("/").at(-1));
  const benchmarks = held("benchmark").sort((one, other) => place(one) - place(other));
  if (evaluations.length && benchmarks.length < 2) return evaluations.length > 1 ? [evaluations[0], evaluations.at(-1)] : evaluations;
  return (benchmarks.length ? benchmarks : data.run.files.filter((file) => file.count)).slice(0, 4);
}

// A row per class, a column per file: how many of its trajectories are in the class, which open, as a bar and a share.
function shareTable(name, columns, classes, most, partOf) {
  const cell = ({ file, rows }, each) => {
    const { found, of, text, filters } = partOf(rows, each);
    const link = el("a", { href: address(listOf({ file: file.name, ...filters })), "aria-label": `${text ? `${text} correct` : plural(found, "trajectory")}: ${each}, ${policyOf(file)}`, text: text ?? grouped(found) });
    return el("td", {}, el("span.share", {}, filters && (text || found) ? link : link.textContent, filters ? bar(found / of || 0, 0, most) : el("span"), el("span.under", { text: of ? percent(found / of) : "–" })));
  };
  const rows = [...classes, null].map((each) => el(each === null ? "tr.total" : "tr", {}, outside(each ?? "all", "th", { scope: "row" }), columns.map((column) => cell(column, each))));
  const head = columns.map(({ file, rows: { length } }) => el("th", { scope: "col" }, outside(policyOf(file)), el("span.under.block", { text: plural(length, "trajectory") })));
  return numbersTable(`By ${name}`, [name, ...head], rows, "classes.stacked");
}

const comparedRows = () => compared().map((file) => ({ file, rows: data.rows.filter((row) => row.file === file.name) }));

function failures() {
  const columns = comparedRows();
  const classes = [...new Set(columns.flatMap(({ rows }) => rows.map((row) => row.failure)))].filter(Boolean);
  if (!classes.length) return null;
  const count = (rows, name) => rows.filter((row) => (name === null ? row.failure : row.failure === name)).length;
  classes.sort((one, other) => sum(columns.map(({ rows }) => count(rows, other) - count(rows, one))));
  const most = Math.max(...columns.flatMap(({ rows }) => classes.map((name) => count(rows, name) / rows.length || 0)));
  const table = shareTable("class", columns, classes, most, (rows, name) => ({ found: count(rows, name), of: rows.length, filters: name && { failure: name } }));
  return section("Why answers fail", "How far the search for the email with the answer got. The longest bar is the commonest failure; each number opens its trajectories.", table);
}

// How many answers to each kind of question, and of each inbox, are correct; where the last policy is worst comes first.
function accuracies() {
  const columns = comparedRows();
  const tables = ["kind", "inbox"].map((field) => {
    const classes = [...new Set(columns.flatMap(({ rows }) => rows.map((row) => row[field])))].filter(Boolean);
    if (classes.length < 2) return null;
    const partOf = (rows, name) => {
      const judged = rows.filter((row) => row.verdict !== "not judged" && (name === null || row[field] === name));
      const found = judged.filter((row) => row.verdict === "correct").length;
      return { found, of: judged.length, text: `${grouped(found)} of ${grouped(judged.length)}`, filters: name && { [field]: name } };
    };
    const share = new Map(classes.map((name) => { const { found, of } = partOf(columns.at(-1).rows, name); return [name, found / of || 0]; }));
    classes.sort((one, other) => share.get(one) - share.get(other));
    const table = () => shareTable(field, columns, classes, 1, partOf);
    return field === "kind" ? table() : fold(`By inbox (${classes.length})`, "", table);
  });
  return tables.some(Boolean) ? section("Where answers are correct", "Where the last policy is weakest comes first; each number opens its trajectories.", tables) : null;
}

const CHANGES = [["fixed", (one, other) => !one && other], ["broken", (one, other) => one && !other], ["same", (one, other) => !one && !other]];
const IN_TIME = { fixed: "Wrong before, correct after", broken: "Correct before, wrong after", same: "Wrong before and after" };
const MOST_QUESTIONS = 8;

const inTime = () => Boolean(data.run.run.run_id || data.run.evaluations.length);
const changeTitles = (before, after) => (inTime() ? IN_TIME : { fixed: `Only ${policyOf(after)} was correct`, broken: `Only ${policyOf(before)} was correct`, same: "Both were wrong" });
const policyOf = (file) => plain(short(file.label)).replace("benchmark of ", "");

// Questions of the first evaluation against the same ones of the last, or of one benchmark against another.
function changes() {
  const files = compared();
  if (files.length !== 2) return null;
  const [before, after] = files.map((file) => new Map(data.rows.filter((row) => row.file === file.name).map((row) => [row.scenario, row])));
  const right = (row) => row.verdict === "correct";
  const pairs = [...before].filter(([scenario]) => after.has(scenario)).map(([scenario, row]) => [row, after.get(scenario)]);
  if (!pairs.length) return null;
  const titles = changeTitles(...files);
  const item = ([, other]) => el("li", {}, el("a", { href: address({ ...noFilters(), view: "list", t: keyOf(other), side: "question" }) }, outside(other.question)));
  const columns = CHANGES.map(([name, is]) => {
    const found = pairs.filter(([one, other]) => is(right(one), right(other)));
    const rest = found.slice(MOST_QUESTIONS);
    return el("div", { class: `change ${name}` }, el("h3", {}, `${titles[name]} `, el("span.count", { text: String(found.length) })), el("ul", {}, found.slice(0, MOST_QUESTIONS).map(item)), rest.length ? fold(`${rest.length} more`, "", () => el("ul", {}, rest.map(item))) : null);
  });
  return section(inTime() ? "The same questions, before and after" : "The same questions, compared", `${pairs.length} questions: ${policyOf(files[0])} → ${policyOf(files[1])}. Each opens side by side.`, el("div.changes", {}, columns));
}

function rewardOverview() {
  const held = data.run.files.filter((file) => file.count && !file.left_out);
  if (!held.length && isWaiting(data.run)) return null;
  if (!held.length) return section("Rewards", null, el("p.note", { text: data.run.status?.state === "running" ? "They stand here once trajectories are scored." : "This run kept no trajectories, only metrics." }));
  const last = held.findLast((file) => file.source === "step");
  const shown = [...compared(), last].filter(Boolean).map((file) => ({ file, rows: data.rows.filter((row) => row.file === file.name) }));
  const all = shown.flatMap(({ rows }) => rows);
  const histograms = shown.map(({ file, rows }) => el("div", {}, outside(policyOf(file), "h3"), histogram(rows, null, (low, high) => go(listOf({ file: file.name, rmin: low, rmax: high })), all)));
  return section("Rewards", "Click a bar to see its trajectories.", el("div.charts", {}, histograms));
}
