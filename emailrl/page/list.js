// The list of trajectories: filters, a histogram of rewards that filters, and a virtualized list of rows, which may be
// collapsed into a row per question.

const ROW_HEIGHT = 66;
const BINS = 12;
const VERDICTS = { correct: "✓", wrong: "✗", "did not know": "?", "no answer": "–", crashed: "!", "not judged": "·" };
// rows: what the filters select; items: what the list shows of them, each with a key; cursor: the key of the item that
// the arrow keys have reached, if it is a question.
const list = { rows: [], items: [], box: null, canvas: null, drawn: new Map(), unfolded: new Set(), cursor: null, followed: null };

function listPane() {
  const pane = el("div.pane.list-pane", {}, el("h1.sr", { text: "Trajectories" }), filterBar(), el("div", { id: "rewards" }), el("div.counted", {}, el("p", { id: "counted" }), el("button", { type: "button", id: "by-question", class: "toggle", text: "By question", onclick: () => go({ rows: state.rows ? null : "question" }, { replace: true }) })));
  list.box = el("div.rows", { tabindex: "0", role: "listbox", "aria-label": "Trajectories", id: "rows" });
  list.canvas = el("div.canvas", { role: "presentation" });
  list.box.append(list.canvas);
  list.box.addEventListener("scroll", () => requestAnimationFrame(drawRows), { passive: true });
  list.box.addEventListener("keydown", listKeys);
  new ResizeObserver(() => drawRows(true)).observe(list.box);
  pane.append(list.box);
  return pane;
}

function updateList({ follow = true } = {}) {
  const byQuestion = state.rows === "question";
  const groups = [...groupedBy(sorted(selected()), (row) => (byQuestion ? row.scenario : ""))];
  list.rows = groups.flatMap(([, rows]) => rows);
  if (follow && openKey() !== list.followed) {
    [list.followed, list.cursor] = [openKey(), null];
    if (openRow()) list.unfolded.add(openRow().scenario);
  }
  const own = (rows) => rows.map((row) => ({ key: keyOf(row), row }));
  list.items = groups.flatMap(([scenario, rows]) => (byQuestion ? [{ key: `question ${scenario}`, scenario, rows }, ...(list.unfolded.has(scenario) ? own(rows) : [])] : own(rows)));
  list.places = new Map(list.items.map(({ key }, place) => [key, place]));
  list.limits = list.rows.reduce(([low, high], { reward }) => [Math.min(low, reward), Math.max(high, reward)], [0, 0]);
  list.box.setAttribute("role", byQuestion ? "tree" : "listbox");
  document.getElementById("by-question").setAttribute("aria-pressed", String(byQuestion));
  const total = data.rows.length;
  const text = (list.rows.length === total ? "" : `${grouped(list.rows.length)} of `) + plural(total, "trajectory") + (byQuestion ? ` of ${plural(groups.length, "question")}` : "");
  const counted = document.getElementById("counted");
  const nothing = total && !list.rows.length ? ": no trajectory matches the filters" : "";
  counted.textContent = text + nothing + (data.run.left_out.length ? " (some are left out: see Overview)" : "");
  if (counted.dataset.said !== text) announce(`${text} shown`);
  counted.dataset.said = text;
  const picked = state.rmin !== undefined ? [Number(state.rmin), Number(state.rmax)] : null;
  replaceKept(document.getElementById("rewards"), histogram(selected(["rmin", "rmax"]), picked, (low, high) => go({ rmin: low, rmax: high }, { replace: true })));
  list.canvas.style.height = `${list.items.length * ROW_HEIGHT}px`;
  if (follow) showOpenRow();
  drawRows(true);
}

// While a search reads the conversations, the list grows.
function tellRead(share) {
  if (state.view !== "list") return;
  updateList({ follow: false });
  if (share !== null) document.getElementById("counted").append(el("span", { id: "reading", text: `, ${percent(share)} searched` }));
}

const openPlace = () => list.places?.get(list.cursor ?? openKey()) ?? -1;

function showOpenRow() {
  const place = openPlace();
  const { box } = list;
  if (place < 0 || !box.clientHeight) return;
  const top = place * ROW_HEIGHT;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + ROW_HEIGHT > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW_HEIGHT - box.clientHeight;
}

// Reuses visible nodes, so that scrolling creates only the few new rows.
function drawRows(anew = false) {
  const { box, canvas, items, drawn } = list;
  const first = Math.max(0, Math.floor(box.scrollTop / ROW_HEIGHT) - 6);
  const last = Math.min(items.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW_HEIGHT) + 6);
  if (anew === true) {
    canvas.replaceChildren();
    drawn.clear();
  }
  for (const [place, node] of drawn) {
    if (place >= first && place < last) continue;
    node.remove();
    drawn.delete(place);
  }
  const added = [];
  for (let place = first; place < last; place += 1) {
    if (drawn.has(place)) continue;
    drawn.set(place, itemNode(items[place], place));
    added.push(drawn.get(place));
  }
  canvas.append(...added);
  const place = openPlace();
  if (drawn.has(place)) box.setAttribute("aria-activedescendant", `row-${place}`);
  else box.removeAttribute("aria-activedescendant");
}

function itemNode({ key, row, scenario, rows }, place) {
  const byQuestion = state.rows === "question";
  const isOpen = rows ? list.unfolded.has(scenario) : null;
  const node = el("div", { class: rows ? "row of-question" : byQuestion ? "row inner" : "row", role: byQuestion ? "treeitem" : "option", id: `row-${place}`, "aria-setsize": list.items.length, "aria-posinset": place + 1, "aria-level": byQuestion ? (rows ? 1 : 2) : null, "aria-expanded": isOpen === null ? null : String(isOpen), "aria-selected": String(key === (list.cursor ?? openKey())) }, rows ? questionParts(rows, isOpen) : rowParts(row));
  node.style.transform = `translateY(${place * ROW_HEIGHT}px)`;
  node.addEventListener("click", () => (rows ? unfold({ key, scenario }) : open(row)));
  return node;
}

function rowParts(row) {
  return [verdictMark(row),
    el("div.what", {},
      outside(row.question, "div.question", {}),
      el("div.under", {}, outside(shortLabel(row, fileOf(row))), foundIn(row) ?? (row.answer === undefined ? null : outside(row.answer === null ? "no answer" : `“${row.answer}”`, "span.answer", {})))),
    el("div.worth", {}, el("span.reward", { text: number(row.reward) }), evidenceMark(row))];
}

function questionParts(rows, isOpen) {
  const right = rows.filter((row) => row.verdict === "correct").length;
  return [el("span.chevron", { "aria-hidden": "true", text: isOpen ? "▾" : "▸" }),
    el("div.what", {}, outside(rows[0].question, "div.question", {}), rewardDots(rows)),
    el("div.worth", {}, el("span.reward", { text: `${right}/${rows.length}` }), el("span.under", { text: `mean ${number(mean(rows.map((row) => row.reward)))}` }))];
}

const MOST_DOTS = 30;

// A question's rewards from left to right in the order of the list, higher ones higher, full if the answer was correct.
function rewardDots(rows) {
  const size = Math.ceil(rows.length / MOST_DOTS);
  const shown = rows.filter((_, index) => index % size === 0);
  const height = scaleOf(...list.limits, 19, 5);
  const rewards = rows.map((row) => row.reward);
  const label = `${plural(rows.length, "reward")} from ${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}${size > 1 ? `, every ${size}th as a dot` : ""}`;
  const width = 9 * MOST_DOTS;
  return svg("svg.dots", { viewBox: `0 0 ${width} 24`, width, height: 24, role: "img", "aria-label": label },
    svg("title", { text: label }), svg("line.grid", { x1: 0, x2: 9 * shown.length, y1: height(0), y2: height(0) }),
    shown.map((row, index) => svg("circle", { class: row.verdict === "correct" ? "right" : "wrong", cx: 5 + 9 * index, cy: height(row.reward).toFixed(1), r: 3.2 })));
}

// Opens or closes a question's rows, and puts the cursor on it.
function unfold({ key, scenario }, isOpen = !list.unfolded.has(scenario)) {
  list.unfolded[isOpen ? "add" : "delete"](scenario);
  list.cursor = key;
  updateList({ follow: false });
  showOpenRow();
}

function shortLabel(row, file) {
  if (row.source === "step") return `step ${row.step}`;
  if (row.source === "eval") return `eval ${row.step}`;
  if (row.source === "confirm") return `confirm ${row.step}`;
  return policyOf(file);
}

const classOf = ({ verdict }) => verdict.replaceAll(" ", "-");
const verdictMark = (row) => el(`span.verdict.${classOf(row)}`, { title: row.verdict, role: "img", "aria-label": row.verdict, text: VERDICTS[row.verdict] });
const badge = (row) => el(`span.badge.${classOf(row)}`, { text: `${VERDICTS[row.verdict]} ${row.verdict}` });

// How far it got with an email that holds the answer.
function evidenceMark(row) {
  if (row.found === null || row.found === undefined) return null;
  const names = ["cited", "read", "found"];
  const reached = names.find((name) => row[name]) ?? "not found";
  return el("span", { class: reached === "cited" ? "reached cited" : "reached", title: `The email with the answer: ${names.toReversed().map((name) => (row[name] ? name : `not ${name}`)).join(", ")}`, text: `email ${reached}` });
}

const open = (row) => go({ view: "list", t: keyOf(row) });

function step(by) {
  const place = openPlace();
  const next = list.items[place < 0 ? 0 : Math.min(list.items.length - 1, Math.max(0, place + by))];
  if (!next) return;
  list.cursor = next.row ? null : next.key;
  if (next.row) go({ view: "list", t: next.key }, { replace: place >= 0 });
  showOpenRow();
  drawRows(true);
}

function stepToFailure(by) {
  for (let place = list.rows.findIndex((row) => keyOf(row) === openKey()) + by; place >= 0 && place < list.rows.length; place += by) {
    if (list.rows[place].failure) return go({ t: keyOf(list.rows[place]) }, { replace: true });
  }
  announce("No further failure in this direction");
}

function listKeys(event) {
  const page = Math.max(1, Math.floor(list.box.clientHeight / ROW_HEIGHT) - 1);
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const item = state.rows === "question" ? list.items[openPlace()] : null;
  const folds = { Enter: undefined, " ": undefined, ArrowRight: true, ArrowLeft: false };
  if (item && event.key in folds) {
    if (item.rows) unfold(item, folds[event.key]);
    else if (event.key === "ArrowLeft") unfold({ key: `question ${item.row.scenario}`, scenario: item.row.scenario }, false);
    else return;
  } else if (event.key in moves) step(moves[event.key]);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function filterBar() {
  const bar = el("form.filters", { role: "search", "aria-label": "Filter trajectories" });
  bar.addEventListener("submit", (event) => event.preventDefault());
  const search = el("input", { type: "search", id: "search", placeholder: "Search questions, calls, mail, answers", "aria-label": "Search questions, calls, mail, answers and ids", value: state.q || "" });
  search.addEventListener("input", () => go({ q: search.value || null }, { replace: true }));
  bar.append(search, el("div.choices.scroller", {},
    choice("file", "Source", data.run.files.filter((file) => file.count && !file.left_out).map((file) => [file.name, policyOf(file)])),
    choice("verdict", "Verdict", values("verdict")),
    choice("failure", "Failure", values("failure")),
    choice("stop", "Stop", values("stop")),
    data.run.steps.length ? choice("trained", "Training", [["yes", "trained on"], ["no", "dropped"]]) : null,
    choice("sort", "Sort", Object.keys(ORDERS).filter((name) => name !== "order").map((name) => [name, name]), "recorded")),
    el("p.active", { id: "active" }));
  return bar;
}

const values = (name) => [...new Set(data.rows.map((row) => row[name]).filter(Boolean))].sort().map((value) => [value, plain(value).replaceAll("_", " ")]);

function choice(name, label, options, none = "any") {
  const select = el("select", { name, "aria-label": label }, el("option", { value: "", text: `${label}: ${none}` }), options.map(([value, text]) => el("option", { value, text })));
  select.addEventListener("change", () => go({ [name]: select.value || (name === "sort" ? "order" : null) }, { replace: true }));
  return select;
}

// Controls follow the address, which a link or the back button may have changed.
function updateFilters() {
  for (const select of document.querySelectorAll(".filters select")) {
    const value = state[select.name];
    select.value = value && value !== "order" ? value : "";
    select.classList.toggle("set", Boolean(select.value));
  }
  const search = document.getElementById("search");
  if (document.activeElement !== search) search.value = state.q || "";
  const chips = [];
  if (state.step !== undefined) chips.push(chip(`step ${state.step}`, { step: null, source: null }));
  if (state.source !== undefined && state.step === undefined) chips.push(chip(state.source, { source: null }));
  for (const name of ["kind", "inbox"]) if (state[name] !== undefined) chips.push(chip(`${name} ${plain(state[name])}`, { [name]: null }));
  if (state.rmin !== undefined) chips.push(chip(`reward ${number(Number(state.rmin), 2)} to ${number(Number(state.rmax), 2)}`, { rmin: null, rmax: null }));
  if (FILTERS.some((name) => state[name] !== undefined)) chips.push(el("button", { type: "button", class: "link", text: "Clear all", onclick: () => go(noFilters(), { replace: true }) }));
  document.getElementById("active").replaceChildren(...chips);
}

function chip(text, changes) {
  return el("button", { type: "button", class: "chip", "aria-label": `Remove the filter ${text}`, onclick: () => go(changes, { replace: true }) }, text, el("span", { "aria-hidden": "true", text: " ×" }));
}

// How many rows have which reward, in bins of the range of ``all``; heights grow with the square root, so that few show.
function histogram(rows, picked, pick, all = rows) {
  if (rows.length < 2) return el("div");
  let low = Infinity;
  let high = -Infinity;
  for (const { reward } of all) {
    low = Math.min(low, reward);
    high = Math.max(high, reward);
  }
  if (low === high) return el("p.note", { text: `Every reward is ${number(low, 2)}.` });
  const width = (high - low) / BINS;
  const bins = Array.from({ length: BINS }, () => ({ count: 0, right: 0 }));
  for (const row of rows) {
    const bin = bins[Math.min(BINS - 1, Math.floor((row.reward - low) / width))];
    bin.count += 1;
    if (row.verdict === "correct") bin.right += 1;
  }
  const most = Math.max(...bins.map((bin) => bin.count));
  const edge = (index) => Number((low + index * width).toPrecision(9));
  const buttons = bins.map((bin, index) => {
    const [from, to] = [edge(index), edge(index + 1)];
    const on = picked !== null && from >= picked[0] - width / 1e3 && to <= picked[1] + width / 1e3;
    const label = `Reward ${number(from, 2)} to ${number(to, 2)}: ${bin.count}, of which correct ${bin.right}`;
    const button = el("button", { type: "button", class: "bin", title: label, "aria-label": label, "aria-pressed": String(on), disabled: !bin.count }, el("span.wrong", {}), el("span.right", {}));
    const height = 100 * Math.sqrt(bin.count / most);
    button.children[0].style.height = `${(height * (bin.count - bin.right)) / bin.count || 0}%`;
    button.children[1].style.height = `${(height * bin.right) / bin.count || 0}%`;
    button.addEventListener("click", () => (on ? go({ rmin: null, rmax: null }, { replace: true }) : pick(from, to)));
    return button;
  });
  return el("div.histogram", { role: "group", "aria-label": "Rewards" }, el("div.bins", { "data-most": `up to ${plural(most, "trajectory")} · square-root scale` }, buttons), el("div.edges", { "aria-hidden": "true" }, el("span", { text: `reward ${number(low, 2)}` }), el("span.legend", {}, el("span.swatch.right", {}), "correct ", el("span.swatch.wrong", {}), "other"), el("span", { text: number(high, 2) })));
}
