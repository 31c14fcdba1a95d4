// One trajectory: outcome, evidence, its group, the same question elsewhere, conversation, reward, tokens.

let asked = 0;

// Draws the selected trajectory in the pane; a later request overrides one still unpacking.
async function showDetail(pane) {
  const row = openRow();
  const request = (asked += 1);
  if (!row) {
    pane.replaceChildren(el("div.empty", {}, state.t ? missing() : data.rows.length
      ? [el("p.large", { text: "No trajectory matches the filters" })]
      : [el("p.large", { text: "No trajectories" }), el("p.note", { text: "This run kept none. The overview shows its metrics." })]));
    return;
  }
  if (state.side === "through") return showThrough(pane, row).catch((error) => pane.replaceChildren(unreadable(error)));
  const members = state.side === "group" ? groupOf(row) : state.side === "question" ? sameQuestion(row) : null;
  let found;
  try {
    found = await Promise.all((members || [row]).map(detailOf));
  } catch (error) {
    if (request === asked) pane.replaceChildren(unreadable(error));
    return;
  }
  if (request !== asked) return;
  const content = members ? sideBySide(row, members, found) : trajectory(row, found[0]);
  const shown = `${keyOf(row)} ${state.side}`;
  const same = pane.dataset.shown === shown;
  pane.dataset.shown = shown;
  showFound(content);
  if (same) return replaceKept(pane, content);
  const hadFocus = pane.contains(document.activeElement);
  pane.replaceChildren(content);
  pane.scrollTop = 0;
  if (hadFocus) pane.focus({ preventScroll: true });
}

// The address names a trajectory that is not in this page.
const missing = () => [el("p.large", { text: "This trajectory is not here" }), el("p.note", {}, "The address names ", outside(state.t, "code"), data.rows.length < data.run.total ? ", which may still be loading." : data.run.left_out.length ? ", which may be left out of this page (see Overview)." : ", which this page does not hold.")];

const unreadable = (error) => el("p.loading", { role: "alert" }, outside(`This trajectory could not be read: ${error.message}`));

// A question's evaluations, or all its trajectories if it is of training or has only one, by step.
function occurrences(row) {
  const all = data.questions.get(row.scenario) || [row];
  const measured = all.filter((each) => each.source !== "step");
  return measured.length > 1 && row.source !== "step" ? measured : all;
}

// As many of them as stand side by side.
function sameQuestion(row) {
  const chosen = occurrences(row);
  if (chosen.length <= MOST_COLUMNS) return chosen;
  const near = chosen.indexOf(row);
  return [...new Set([chosen[0], ...chosen.slice(Math.max(1, near - 2), near + 3), chosen.at(-1)])];
}

const MOST_COLUMNS = 8;

function trajectory(row, detail) {
  return el("article.trajectory", { "aria-labelledby": "question" },
    backLink(), outcome(row, detail), relatives(row), evidenceSection(detail),
    section("Conversation", null, conversation(detail)), rewardSection(row, detail), tokenSection(detail), factSection(row, detail));
}

const backLink = () => el("a.back", { href: address({ t: null, side: null }), text: "← All trajectories" });

function outcome(row, detail) {
  const facts = [`reward ${number(row.reward)}`];
  if (detail.advantage !== null) facts.push(`advantage ${signed(detail.advantage)}`);
  if (detail.dropped) facts.push(`not trained: ${detail.dropped.replaceAll("_", " ")}`);
  facts.push((row.stop || "no stop reason").replaceAll("_", " "), plural(row.turns, "turn"), plural(row.tokens, "token"), `${number(row.seconds, 1)} s`);
  return el("div.outcome", {},
    el("p.crumbs", {}, brief(fileOf(row).label), " · ", outside(row.id, "code")),
    outside(detail.question, "h1", { id: "question" }),
    el("p.facts", {}, badge(row), facts.map((fact) => outside(fact, "span"))),
    row.failure ? outside(row.failure, "p.failure", {}) : null,
    el("dl.answers", {}, el("div", {}, el("dt", { text: "Answer" }), detail.answer === null ? el("dd.none", { text: "none given" }) : outside(detail.answer, "dd")), el("div", {}, el("dt", { text: "Expected" }), outside(detail.gold || "no answer in the mailbox", "dd"))),
    detail.exception ? outside(detail.exception, "p.problem", {}) : null);
}

function relatives(row) {
  const parts = [];
  const group = groupOf(row);
  if (group.length > 1) parts.push(strip("Its group", group, row, "group", (each, index) => String(index + 1)));
  const others = data.questions.get(row.scenario) || [];
  const elsewhere = groupedBy(others, (each) => each.file);
  if (elsewhere.size > 1) {
    const picked = [...elsewhere.values()].map((rows) => rows.find((each) => each === row) || rows[0]);
    parts.push(strip("The same question", picked, row, "question", (each) => shortLabel(each, fileOf(each))));
  }
  return parts.length ? el("div.relatives", {}, parts) : null;
}

const MOST_IN_STRIP = 16;

function strip(title, rows, current, side, nameOf) {
  const place = rows.indexOf(current);
  const from = Math.max(0, Math.min(place - MOST_IN_STRIP / 2, rows.length - MOST_IN_STRIP));
  const shown = rows.slice(from, from + MOST_IN_STRIP);
  const links = shown.map((row, index) => el("a.member", { href: address({ t: keyOf(row), side: null }), "aria-current": row === current ? "true" : null }, verdictMark(row), el("span.under", { text: nameOf(row, from + index) }), el("span.reward", { text: number(row.reward) })));
  const rest = rows.length > shown.length ? el("span.note", { text: `${shown.length} of ${rows.length}` }) : null;
  return el("div.strip", {}, el("span.who", { text: title }), el("div.members", {}, links), rest, el("a.side-link", { href: address({ t: keyOf(current), side }), "aria-label": `${title}, side by side`, text: "Side by side" }), side === "question" ? el("a.side-link", { href: address({ t: keyOf(current), side: "through" }), text: "One by one" }) : null);
}

function evidenceSection(detail) {
  const { gold, others } = detail.evidence;
  if (!gold.length && !others.length) return section("Evidence", "This question has no answer in the mailbox, and nothing was cited.");
  const stage = (done, yes, no) => el("li", { class: done ? "yes" : "no" }, el("span.tick", { "aria-hidden": "true", text: done ? "✓" : "✗" }), done ? yes : no);
  const items = gold.map((each) => el("li", {}, messageId(each.id, new Set([each.id])), el("ol.stages", {},
    stage(each.found, `found in turn ${each.found}`, "never found"), stage(each.read, `read in turn ${each.read}`, "never read"), stage(each.cited, "cited", "not cited"))));
  const rest = others.length ? el("p.note", {}, "Also cited, without the answer: ", others.map((id) => messageId(id, new Set()))) : null;
  return section("Evidence", null, gold.length ? el("ul.evidence", {}, items) : null, rest);
}

// Each term with its reason, where the reward is one whose terms have reasons; else only those that count.
function rewardSection(row, detail) {
  const { reasons } = detail;
  const terms = Object.entries(detail.terms).filter(([name, value]) => value || name === "outcome" || reasons[name]);
  if (!terms.length) return null;
  const low = Math.min(0, ...terms.map(([, value]) => value));
  const high = Math.max(0, ...terms.map(([, value]) => value));
  const lines = terms.map(([name, value]) => el("tr", { class: value ? null : "zero-term" }, el("th", { scope: "row" }, outside(name.replaceAll("_", " ")), reasons[name] ? outside(reasons[name], "span.under.block", {}) : null), el("td", {}, bar(value, low, high)), el("td.amount", { text: signed(value) })));
  lines.push(el("tr.total", {}, el("th", { scope: "row", text: "reward" }), el("td"), el("td.amount", { text: number(row.reward) })));
  return section("Reward", null, el("table.terms", {}, el("tbody", {}, lines)));
}

function factSection(row, detail) {
  const pairs = { trajectory: row.id, group: row.group, question: row.scenario, inbox: detail.inbox, "as of": detail.date, ...detail.facts, file: row.file };
  const box = fold("Rubric and identity", "", () => el("div.two", {}, pairTable(detail.rubric), pairTable(pairs)));
  return el("section", {}, box);
}

const inWords = (value) => (typeof value === "boolean" ? (value ? "yes" : "no") : value === null ? "none" : textOf(value));

function pairTable(pairs) {
  const shown = Object.entries(pairs).filter(([, value]) => value !== null && value !== "" && value !== undefined);
  return el("table.pairs", {}, el("tbody", {}, shown.map(([name, value]) => el("tr", {}, outside(name, "th", { scope: "row" }), brief(inWords(value), "td")))));
}

// Where a rollout leaves another: the first token that differs, with a few before it.
function firstDifference(one, other, name = "this trajectory") {
  const [mine, theirs] = [one, other].map((detail) => detail.samples[0]);
  if (!mine?.ids || !theirs?.ids) return el("p.note", {});
  const at = theirs.ids.findIndex((id, index) => id !== mine.ids[index]);
  if (at < 0 || !theirs.mask[at]) return el("p.note", { text: at < 0 ? `The same tokens as ${name}.` : `Another prompt than ${name} had.` });
  const before = Array.from({ length: Math.min(4, at) }, (_, index) => pieceOf(theirs, at - Math.min(4, at) + index)).join("");
  return el("p.note", {}, `Leaves ${name} at token ${at}: `, outside(before), outside(pieceOf(theirs, at), "mark"), " instead of ", mine.ids[at] === undefined ? "its end" : outside(pieceOf(mine, at), "code"));
}

function sideBySide(row, members, found) {
  const many = state.side === "group";
  const rewards = members.map((each) => each.reward);
  const lead = many ? `${plural(members.length, "rollout")} of one question; rewards from ${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}, mean ${number(mean(rewards))}.` : `The same question in ${members.length} places, in the order they were recorded.`;
  const columns = members.map((each, index) => el("section.column", { "aria-label": many ? `Rollout ${index + 1}` : policyOf(fileOf(each)), "aria-current": each === row ? "true" : null },
    el("h2", {}, el("a", { href: address({ t: keyOf(each), side: null }) }, many ? `Rollout ${index + 1}` : brief(fileOf(each).label))),
    el("p.facts", {}, badge(each), el("span", { text: `reward ${number(each.reward)}` }), found[index].advantage === null ? null : el("span", { text: `advantage ${signed(found[index].advantage, 2)}` })),
    evidenceMark(each), each === row ? el("p.note", { text: "This trajectory." }) : firstDifference(found[members.indexOf(row)], found[index]), conversation(found[index], { compact: true })));
  const grid = el("div.columns", {}, columns);
  const rows = 4 + Math.max(...columns.map((column) => column.querySelector(".talk").children.length)); // turns in line
  grid.style.gridTemplateRows = `repeat(${rows}, auto)`;
  for (const column of columns) column.style.gridRow = `span ${rows}`;
  return el("article.trajectory.wide", {}, el("a.back.always", { href: address({ side: null }), text: "← This trajectory" }), outside(found[0].question, "h1"), el("p.lead", {}, "Expected: ", outside(found[0].gold || "no answer in the mailbox"), `. ${lead}`), scroller("Side by side", grid));
}
