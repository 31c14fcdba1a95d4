// What scrolls is reached by keys, a button that copies is no landmark, and the search is read on a plain background.
const observer = new MutationObserver(() => mend());
const PLAIN = ".e { background: rgb(var(--color-background)) !important } li { color: rgb(var(--color-foreground)) !important; opacity: 1 !important }";

function mend() {
  for (const nav of document.querySelectorAll("nav.md-code__nav")) nav.role = "none";
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, article table, article p, math[display=block]")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
  for (const { shadowRoot: search } of document.querySelectorAll("body > div")) {
    if (!search) continue;
    for (const list of search.querySelectorAll(".k[tabindex='-1']")) list.tabIndex = 0;
    if (search.querySelector("#plain")) continue;
    search.append(Object.assign(document.createElement("style"), { id: "plain", textContent: PLAIN }));
    observer.observe(search, { childList: true, subtree: true });
  }
}

observer.observe(document.body, { childList: true, subtree: true });
// On a phone, the two halves of a wide figure stand below each other.
for (const figure of document.querySelectorAll("article img[src$='_curve.svg']")) {
  const top = figure.src.includes("quickstart") ? 17 : 0; // below a title over both
  const halves = [[0, 331], [331, 317]].map(([left, width]) => {
    const half = Object.assign(new Image(), { alt: "", className: "half", src: `${figure.src}#svgView(viewBox(${left},${top},${width},${259 - top}))` });
    half.style.aspectRatio = `${width} / ${259 - top}`;
    return half;
  });
  halves[0].alt = figure.alt;
  figure.classList.add("whole");
  figure.after(...halves);
}

// The page on the first screen takes the site's light or dark; opened as a file, it keeps the system's.
const embedded = document.querySelector(".window iframe");
function follow() {
  const root = embedded.contentDocument?.documentElement;
  if (root) root.dataset.theme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
}
if (embedded) {
  embedded.addEventListener("load", follow);
  new MutationObserver(follow).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
}

addEventListener("resize", mend);
mend();
for (const { tHead, tBodies } of document.querySelectorAll("article table")) {
  if (tHead?.rows[0].cells[0].textContent !== "setting" || tHead.rows[0].cells.length < 5) continue;
  for (const { cells } of tBodies[0].rows) [...cells].forEach((cell, column) => { cell.dataset.name = tHead.rows[0].cells[column].textContent; });
}
if (location.protocol === "file:") {
  Object.assign(document.querySelector(".md-search__button"), { disabled: true, textContent: "Needs a server", title: "The search needs a server: python3 -m http.server" });
}

// The theme's search wants every word in one section, as it is written there. Words that only string a question together
// are left out. If no section has the others, plurals become singular and foreign words ours; if that is not enough, those
// words are sought that one section has, the rare ones before the common.
const STOP = new Set("a an and are as at be can could do does for from get have how i if in into is it me my need not of on or should so that the their there they this to use using want was we what when where which while who why will with without work works would you your".split(" "));
const OURS = { against: "compare", delete: "forget", finetune: "sft", finetuning: "sft", huggingface: "hub", mac: "macos", multiple: "several", node: "host", oom: "memory", osx: "macos" };
const post = Worker.prototype.postMessage;
let sections = [];

const wordsOf = (text) => text.toLowerCase().split(/[^\p{L}\p{N}.+]+/u).map((word) => word.replace(/[.]+$/, "")).filter(Boolean);

function inOurWords(input) {
  const asked = wordsOf(input).filter((word) => !STOP.has(word));
  if (sections.some((section) => asked.every((word) => section.includes(` ${word}`)))) return asked.join(" ") || input;
  const words = asked.map((word) => OURS[word] ?? word.replace(/(?<=..)(ies|y|s)$/, ""));
  const holders = words.map((word) => new Set(sections.filter((section) => section.includes(` ${word}`))));
  const worth = (section) => holders.reduce((sum, those) => sum + (those.has(section) ? 1 + Math.log(sections.length / those.size) : 0), 0);
  const best = sections.reduce((one, other) => (worth(other) > worth(one) ? other : one), "");
  return words.filter((_, index) => holders[index].has(best)).join(" ") || input;
}

Worker.prototype.postMessage = function (message, ...rest) {
  const { items, input } = message?.data ?? {};
  if (items) sections = items.map(({ title, text, path }) => ` ${wordsOf([title, text.replace(/<[^>]*>/g, " "), ...(path ?? [])].join(" ")).join(" ")}`);
  if (typeof input === "string" && input.trim()) message = { ...message, data: { ...message.data, input: inOurWords(input) } };
  return post.call(this, message, ...rest);
};
