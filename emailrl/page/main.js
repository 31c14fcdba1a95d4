// The frame: header, views, keys, theme, and polling of a live run.

const VIEWS = { overview: "Overview", list: "Trajectories", about: "Settings" };
const POLL_MILLISECONDS = 3000;
let shownView = "";
let singleKeys = true;

function render() {
  const view = state.view in VIEWS && data.run.kind !== "runs" ? state.view : "overview";
  for (const link of document.querySelectorAll("#top nav a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const main = document.getElementById("main");
  if (view === "list") showList(main);
  else if (shownView !== view) {
    main.replaceChildren(contentOf(view));
    scrollTo(0, 0);
  }
  document.body.dataset.view = view;
  markOpen(view);
  if (shownView) keepFocus(view, main);
  shownView = view;
}

// What had the focus may be gone or hidden now: then what came in its place gets it.
function keepFocus(view, main) {
  const { activeElement: active, body } = document;
  if (active !== body && active.checkVisibility()) return;
  (view !== "list" ? main : !isWide.matches && state.t ? document.getElementById("detail") : list.box).focus({ preventScroll: true });
}

const contentOf = (view) => (view === "about" ? about() : overview());

function showList(main) {
  if (shownView !== "list") main.replaceChildren(el("div.split", {}, listPane(), el("div.pane.detail-pane", { id: "detail", role: "region", "aria-label": "Trajectory", tabindex: "0" })));
  document.body.dataset.view = "list";
  markOpen("list");
  updateFilters();
  updateList();
  readTexts(tellRead).catch(unread);
  showDetail(document.getElementById("detail")).catch(failed);
}

function markOpen(view) {
  const isOpen = view === "list" && openRow() !== null;
  document.body.toggleAttribute("data-open", isOpen);
  document.body.toggleAttribute("data-side", isOpen && Boolean(state.side));
}

// Where a folder is served, each of its runs has an address of its own.
const served = new URLSearchParams(location.search);
const runAddress = (name) => `?${new URLSearchParams({ token: served.get("token"), ...name })}`;

const brand = () => outside(title(), "span", { id: "title" });

function drawTop() {
  const links = Object.entries(data.run.kind === "runs" ? {} : VIEWS).map(([view, name]) => el("a", { href: address({ view, t: null, side: null }), "data-view": view, text: name, onclick: (event) => { event.preventDefault(); go({ view, t: null, side: null }); } }));
  const parts = [
    served.has("run") ? el("a.up", { href: runAddress({}), text: "← All runs" }) : null,
    el("span.brand", {}, el("span.logo", { "aria-hidden": "true" }), brand()),
    config.served ? el("span.live", { id: "live" }) : null,
    el("span", { id: "bar" }),
    links.length ? el("nav", { "aria-label": "Views" }, links) : null,
    el("span.buttons", {}, el("button", { type: "button", class: "icon", id: "theme", "aria-label": "Light or dark", title: "Light or dark", onclick: switchTheme }, svg("svg", { viewBox: "0 0 16 16", width: "16", height: "16", "aria-hidden": "true" }, svg("circle", { cx: "8", cy: "8", r: "6.2", fill: "none", stroke: "currentColor", "stroke-width": "1.4" }), svg("path", { d: "M8 1.8a6.2 6.2 0 0 1 0 12.4z", fill: "currentColor" }))), el("button", { type: "button", class: "icon", "aria-label": "Keys and help", title: "Keys and help (?)", text: "?", onclick: showHelp })),
  ];
  document.getElementById("top").replaceChildren(...parts.filter(Boolean));
}

function switchTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

const KEYS = [["j / k, ↓ / ↑", "next and previous trajectory"], ["n / N", "next and previous failure"], ["→ / ←, Enter", "unfold and fold a question in the list"], ["[ / ]", "previous and next member of the group"], ["g", "the group side by side"], ["b", "the same question, before and after"], ["t, then ← / →", "the same question, one evaluation after the other"], ["+ / − / 0", "fewer, more and all steps in the curves"], ["/", "search"], ["1 / 2 / 3", "Overview, Trajectories, Settings"], ["Esc", "back"], ["?", "this help"]];

function showHelp() {
  const dialog = document.getElementById("help");
  const toggle = el("input", { type: "checkbox", id: "single-keys" });
  toggle.checked = singleKeys;
  toggle.addEventListener("change", () => { singleKeys = toggle.checked; });
  dialog.replaceChildren(el("h2", { id: "help-title", text: "Keys" }), el("table.pairs", {}, el("tbody", {}, KEYS.map(([keys, what]) => el("tr", {}, el("th", { scope: "row" }, el("kbd", { text: keys })), el("td", { text: what }))))),
    el("p", {}, toggle, el("label", { for: "single-keys", text: " Single-letter keys" })),
    el("p.note", { text: "The address after # keeps what you filter and open. Found, read, cited: how far a trajectory got with an email that holds the answer, which ★ marks. Characters that would not show, or would reorder text, stand as boxed code points." }),
    el("form", { method: "dialog" }, el("button", { text: "Close" })));
  dialog.showModal();
}

function moveInGroup(by) {
  const row = openRow();
  if (!row) return;
  const group = groupOf(row);
  const next = group[group.indexOf(row) + by];
  if (next) go({ t: keyOf(next) }, { replace: true });
}

function back() {
  if (state.side) go({ side: null });
  else if (state.t) go({ t: null });
  else if (state.view === "list" && FILTERS.some((name) => state[name] !== undefined)) go(noFilters(), { replace: true });
  else if (state.view !== "overview") go({ view: "overview" });
}

const COMMANDS = {
  j: () => step(1), k: () => step(-1), n: () => stepToFailure(1), N: () => stepToFailure(-1),
  "[": () => moveInGroup(-1), "]": () => moveInGroup(1),
  g: () => openRow() && go({ side: state.side === "group" ? null : "group" }),
  b: () => openRow() && go({ side: state.side === "question" ? null : "question" }),
  t: () => openRow() && go({ side: state.side === "through" ? null : "through" }),
  "/": () => { if (state.view !== "list") go({ view: "list" }); document.getElementById("search").focus(); },
  1: () => go({ view: "overview", t: null, side: null }), 2: () => go({ view: "list" }), 3: () => go({ view: "about", t: null, side: null }),
  "+": () => zoomBy(0.5), "-": () => zoomBy(2), 0: () => zoom(...allSteps()),
  "?": showHelp,
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape") return typing ? event.target.blur() : back();
  if (typing) return;
  if ((event.key === "ArrowDown" || event.key === "ArrowUp") && state.view === "list" && !event.target.closest("#detail, .scroller")) {
    event.preventDefault();
    return step(event.key === "ArrowDown" ? 1 : -1);
  }
  if (!singleKeys || !(event.key in COMMANDS) || ("+-0".includes(event.key) && shownView !== "overview")) return;
  if ("jknN".includes(event.key) && state.view !== "list") go({ view: "list" });
  event.preventDefault();
  COMMANDS[event.key]();
}

function failed(error) {
  document.getElementById("main").replaceChildren(el("p.loading", { role: "alert" }, outside(`This page could not be read: ${error.message}`)));
}

function redraw() {
  if (state.view !== "list") return replaceKept(document.getElementById("main"), contentOf(shownView));
  const filters = document.querySelector(".filters");
  if (!filters.contains(document.activeElement)) filters.replaceWith(filterBar());
  updateFilters();
  updateList({ follow: false });
  readTexts(tellRead).catch(unread);
}

const unread = (error) => announce(`Not all conversations could be searched: ${error.message}`);

const STATES = { finished: "Finished", interrupted: "Interrupted", failed: "Failed", killed: "Killed" };
const REASONS = { interrupted: "by Ctrl-C or SIGTERM", killed: "its process is gone" };
const reasonOf = ({ state, reason }) => REASONS[state] ?? (reason ? plain(reason) : null);

// Whether a run has written nothing for so many seconds, and so many times its longest step.
const isSilent = ({ steps, status }, seconds, times) => status.silent > Math.max(seconds, ...steps.map((step) => times * (step.seconds?.total || 0)));

// How far a run is: in a few words for the tab's title, and at length for the header; of several, their states.
function progress(run = data.run) {
  const { status, runs } = run;
  if (runs) {
    const states = groupedBy(runs.map(stateOf).filter(Boolean), (state) => state);
    return { brief: "", full: [...states].map(([state, those]) => `${those.length} ${state}`).join(", ") || "live", kind: states.has("running") || !states.size ? "" : [...states.keys()].join() === "finished" ? "done" : "warn" };
  }
  if (!status && run.live) return { brief: "", full: "live", kind: "" };
  if (!status) {
    const full = !run.results.length ? "Ended" : run.results.every((each) => each.complete) ? "Finished" : "Incomplete";
    return { brief: run.results.length ? full.toLowerCase() : "", full, kind: full === "Incomplete" ? "warn" : "done" };
  }
  const [, doing, when, step = status.step] = /^(.+) (of|after) step (\d+)$/.exec(plain(status.phase ?? "")) ?? [];
  const at = `step ${step}${status.steps ? ` of ${status.steps}` : ""}`;
  if (status.state !== "running") {
    const word = STATES[status.state] ?? plain(status.state);
    return { brief: word.toLowerCase(), full: [`${word} at ${at}`, reasonOf(status)].filter(Boolean).join(": "), kind: status.state === "finished" ? "done" : "bad" };
  }
  if (isSilent(run, 120, 3)) return { brief: "stalled", full: `Stalled at ${at}: nothing for ${duration(status.silent)}`, kind: "bad" };
  const isQuiet = isSilent(run, 30, 1);
  const left = status.end - status.at;
  const isLast = when === "after" && Number(step) === status.steps; // what follows is not counted
  const parts = [step === "0" ? "before the first step" : when === "after" ? `after ${at}` : at, doing && (status.rollouts ? `${doing} ${status.done} of ${status.rollouts}` : doing), left > 0 && !isLast && `about ${duration(left)} left`, isQuiet && `nothing new for ${duration(status.silent)}`];
  return { state: "running", brief: status.steps ? `${step}/${status.steps}` : String(step), full: parts.filter(Boolean).join(" · "), kind: isQuiet ? "warn" : "" };
}

function stateOf(run) {
  const { state, brief } = progress(run);
  return state ?? (brief || null);
}

const nameTab = (state) => { document.title = [state, plain(title()), "emailrl"].filter(Boolean).join(" · "); };

function showProgress(instead = null) {
  const live = document.getElementById("live");
  const { brief: few, full, kind } = instead ?? progress();
  if (live.textContent !== full) live.textContent = full;
  live.className = `live ${kind}`.trim();
  const { steps, step, state: now } = data.run.status ?? {};
  document.getElementById("bar").style.width = `${now === "finished" ? 100 : steps ? (100 * step) / steps : 0}%`;
  document.getElementById("title").replaceWith(brand());
  nameTab(few);
}

// A live run: redraws what is new and keeps the reader's position. Without a server, all that was read stays.
async function poll() {
  try {
    const isNew = await refresh((full) => showProgress({ brief: "", full, kind: "" }));
    showProgress();
    if (isNew) redraw();
  } catch (error) {
    showProgress({ brief: "not connected", full: `Not connected: ${error.message}`, kind: "bad" });
  }
  setTimeout(poll, POLL_MILLISECONDS);
}

async function start() {
  await load();
  readState();
  drawTop();
  nameTab("");
  addEventListener("popstate", () => { readState(); render(); });
  addEventListener("keydown", onKey);
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#"]');
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    if (link.id === "skip") return document.getElementById("main").focus();
    const target = link.getAttribute("href");
    if (target !== location.hash) history.pushState(null, "", target);
    readState();
    render();
  });
  render();
  document.documentElement.dataset.ready = "true";
  if (config.served) showProgress();
  if (config.served) setTimeout(poll, data.rows.length < data.run.total ? 0 : POLL_MILLISECONDS);
}

start().catch(failed);
