// One question through all its evaluations, or else its rollouts: a slider goes through them, and the reader stays at the
// place in the conversation.

const through = { all: [], stage: null, slider: null };
const inBrief = (row) => `${plain(fileOf(row).label)}: ${row.verdict}, reward ${number(row.reward)}`;

function showThrough(pane, row) {
  const subject = `through ${row.scenario}`;
  if (pane.dataset.shown !== subject) {
    pane.dataset.shown = subject;
    pane.replaceChildren(throughFrame(row));
    pane.scrollTop = 0;
    through.slider.focus({ preventScroll: true });
  }
  return drawStage(pane, row);
}

function throughFrame(row) {
  const all = occurrences(row);
  const go = (place) => {
    history.replaceState(null, "", address({ t: keyOf(all[place]) }));
    readState();
    drawStage(document.getElementById("detail"), all[place]).catch(failed);
  };
  const slider = el("input", { type: "range", min: "0", max: String(all.length - 1), step: "1", value: String(all.indexOf(row)), "aria-label": "Evaluation" });
  slider.addEventListener("input", () => go(Number(slider.value)));
  const ticks = all.map((each, place) => el("button", { type: "button", tabindex: "-1", title: inBrief(each), "aria-label": inBrief(each), onclick: () => { slider.value = String(place); go(place); } }, verdictMark(each)));
  Object.assign(through, { all, slider, stage: el("div.stage", {}) });
  return el("article.trajectory", { "aria-labelledby": "question" }, el("a.back.always", { href: address({ side: null }), text: "← This trajectory" }),
    outside(row.question, "h1", { id: "question" }), el("p.lead", {}, "Expected: ", outside(row.gold || "no answer in the mailbox"), `. ${all.length} in the order they were recorded.`),
    el("div.scrubber", {}, slider, el("div.ticks", {}, ticks)), through.stage);
}

async function drawStage(pane, row) {
  const request = (asked += 1);
  const place = through.all.indexOf(row);
  const [detail, before] = await Promise.all([row, through.all[place - 1]].map((each) => each && detailOf(each)));
  if (request !== asked) return;
  through.slider.value = String(place);
  through.slider.setAttribute("aria-valuetext", inBrief(row));
  const top = pane.scrollTop;
  replaceKept(through.stage, el("section", {}, el("h2", {}, brief(fileOf(row).label)), el("p.facts", {}, badge(row), el("span", { text: `reward ${number(row.reward)}` }), evidenceMark(row)),
    before ? firstDifference(before, detail, "the one before") : el("p.note", { text: "The first." }), conversation(detail)));
  pane.scrollTop = top;
}
