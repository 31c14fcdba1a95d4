// Builds elements without markup: text of emails and models is only inserted as text nodes.

const SVG = "http://www.w3.org/2000/svg";
// Shown by code point: controls, zero width and bidirectional marks, surrogates, separators, private use and tags.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\ufff9-\ufffb\p{Cs}\p{Co}\u{e0000}-\u{e0fff}]/gu;

// An element by its name and classes, as in "p.note".
const el = (name, attributes = {}, ...children) => filled((tag) => document.createElement(tag), name, attributes, children);
const svg = (name, attributes = {}, ...children) => filled((tag) => document.createElementNS(SVG, tag), name, attributes, children);

function filled(make, name, attributes, children) {
  const [tag, ...classes] = name.split(".");
  const node = make(tag);
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Untrusted text, isolated from its surroundings; invisible and reordering characters become visible marks.
function outside(text, name = "span", attributes = {}) {
  const node = el(name, { dir: "auto", ...attributes });
  const value = String(text ?? "");
  let end = 0;
  for (const match of value.matchAll(HIDDEN)) {
    node.append(value.slice(end, match.index), mark(match[0]));
    end = match.index + match[0].length;
  }
  node.append(value.slice(end));
  return node;
}

function mark(character) {
  const code = character.codePointAt(0);
  const shown = code < 0x20 ? String.fromCodePoint(0x2400 + code) : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  return el("span.hidden-mark", { text: shown });
}

// An absolute path by its last two parts, a hash by its beginning.
function short(text) {
  const ending = (path) => path.split("/").filter(Boolean).slice(-2).join("/");
  text = text.replace(/\b([0-9a-f]{12})[0-9a-f]{20,}\b/g, "$1…");
  return text.startsWith("/") && text.split("/").length > 3 ? ending(text) : text.replace(/(?<![\w.:/])(?:\/[^/\s,;:]+){3,}/g, ending);
}

// Untrusted text with short paths; the tooltip has the whole.
function brief(text, name = "span", attributes = {}) {
  const value = String(text ?? "");
  const cut = short(value);
  return outside(cut, name, cut === value ? attributes : { title: plain(value), ...attributes });
}

const plain = (text) => outside(text).textContent;

// Not toLocaleString, which loads the browser's tables of languages, tens of milliseconds.
const grouped = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, ",");

function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value)) return sign(grouped(value));
  if (size < 0.001 && digits > 2) return sign(value.toExponential(1));
  return sign(size >= 1000 ? grouped(Math.round(value)) : value.toFixed(digits));
}

const sign = (text) => text.replace("-", "−").replace("e−", "e-");
const signed = (value, digits = 3) => (value > 0 ? `+${number(value, digits)}` : number(value, digits));
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)}%`);
const plural = (count, noun) => `${grouped(count)} ${count === 1 ? noun : `${noun}s`.replace(/rys$/, "ries").replace(/xs$/, "xes")}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => (values.length ? sum(values) / values.length : null);

function announce(text) {
  document.getElementById("announce").textContent = text;
}

// A bar between zero and a value, on a scale shared with its neighbors (low ≤ 0 ≤ high).
function bar(value, low, high) {
  const span = high - low || 1;
  const fillBar = el("span", { class: value < 0 ? "fill negative" : "fill" });
  fillBar.style.left = `${(100 * (Math.min(value, 0) - low)) / span}%`;
  fillBar.style.width = `${(100 * Math.abs(value)) / span}%`;
  const zero = el("span.zero", {});
  zero.style.left = `${(-100 * low) / span}%`;
  return el("span.bar", { "aria-hidden": "true" }, fillBar, zero);
}

// A fold's name, without the numbers that an update changes.
const foldName = (fold) => fold.closest(".change")?.className ?? fold.firstChild.textContent.replace(/ \(the last .*/, "");

// Replaces what a box shows, and keeps what its reader has done there: open folds, focus, scroll positions.
function replaceKept(box, content) {
  const { activeElement: active } = document;
  const focus = box.contains(active) && active !== box ? active : null;
  const open = new Set([...box.querySelectorAll("details[open]")].map(foldName));
  const scrolled = [box, ...box.querySelectorAll(".scroller")].map((node) => [node.scrollTop, node.scrollLeft]);
  const [left, top] = [scrollX, scrollY];
  box.replaceChildren(content);
  for (const fold of box.querySelectorAll("details")) {
    if (!open.has(foldName(fold))) continue;
    fold.open = true;
    fold.draw?.();
  }
  [box, ...box.querySelectorAll(".scroller")].forEach((node, index) => { [node.scrollTop, node.scrollLeft] = scrolled[index] ?? [0, 0]; });
  scrollTo(left, top);
  if (focus) (alike(box, focus) || box).focus({ preventScroll: true });
}

// The control that corresponds to the focused one before the redraw.
function alike(box, focus) {
  const name = (node) => `${node.className} ${node.getAttribute("aria-label") ?? node.textContent}`;
  return [...box.querySelectorAll(focus.tagName)].find((each) => name(each) === name(focus));
}
