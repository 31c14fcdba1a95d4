// Full-text search: the calls, mails and answers of every trajectory are read once, when something is first searched
// for, part by part, so that the page goes on; what is read already is searched at once.

const TEXTS_AT_ONCE = 100;
const REDRAW_MILLISECONDS = 300;
let isReading = false;

// Trajectories from a number on: a chunk of this file, or a part of what the server has.
async function textsFrom(number) {
  if (config.served) return ask(`/data/texts?from=${number}&to=${number + TEXTS_AT_ONCE}`);
  const found = await unpack(`chunk-${config.starts.findLastIndex((start) => start <= number)}`);
  return found.map((detail, index) => ({ ...data.rows[number + index], conversation: detail.conversation }));
}

// What is read of a conversation, without markup and the system prompt, which all have.
function textOfConversation(items) {
  const texts = items.filter((item) => item.role !== "system").map((item) => {
    if (item.role === "assistant") return [item.said, item.error, ...item.calls.flatMap((call) => [call.name, ...stringsIn(call.arguments)])];
    try {
      return stringsIn(JSON.parse(item.text));
    } catch {
      return item.text;
    }
  });
  return texts.flat().filter(Boolean).join(" · ").replace(/<\/?b>/g, "").replace(/\s+/g, " ");
}

function stringsIn(value) {
  if (value && typeof value === "object") return Object.values(value).flatMap(stringsIn);
  return value === null || value === undefined ? [] : [String(value)];
}

// Starts to read, if something is searched for and not all is read; tell gets the share that is, null at the end.
async function readTexts(tell) {
  if (isReading || !state.q || data.rows.every((row) => row.said !== undefined)) return;
  isReading = true;
  let told = performance.now();
  try {
    for (let number; (number = data.rows.findIndex((row) => row.said === undefined)) >= 0;) {
      const found = await textsFrom(number);
      const places = found.map((each) => data.index.get(keyOf(each))).filter((place) => place !== undefined);
      places.forEach((place, index) => { data.rows[place].said = textOfConversation(found[index].conversation); data.rows[place].text = null; });
      if (!places.includes(number)) break; // the run goes on, and its rows are others now
      if (performance.now() - told < REDRAW_MILLISECONDS) continue;
      told = performance.now();
      tell((number + found.length) / data.rows.length);
    }
  } finally {
    isReading = false;
    tell(null);
  }
}

const wanted = () => (state.q || "").trim().replace(/\s+/g, " ").toLowerCase();

// Everything known of a trajectory, in small letters.
function searchable(row) {
  row.text ??= [row.question, row.answer, row.gold, row.id, row.scenario, row.group, row.said].join("\n").toLowerCase();
  return row.text;
}

// The place of a conversation in which the searched words stand, if the list does not show them anyhow.
function foundIn(row) {
  const words = wanted();
  if (!words || !row.said || [row.question, row.answer].some((text) => text?.toLowerCase().includes(words))) return null;
  const at = row.said.toLowerCase().indexOf(words);
  if (at < 0) return null;
  const end = at + words.length;
  return el("span.answer", {}, outside(`…${row.said.slice(Math.max(0, at - 14), at)}`), outside(row.said.slice(at, end), "mark"), outside(row.said.slice(end, end + 60)));
}

// Opens the folds that hold the searched words, and marks these where the browser can, without changing the text.
function showFound(node) {
  const words = wanted();
  globalThis.CSS?.highlights?.delete("found");
  if (!words) return;
  for (const fold of node.querySelectorAll(".message:not(.system) details")) {
    fold.draw?.();
    if (fold.textContent.replace(/\s+/g, " ").toLowerCase().includes(words)) fold.open = true;
  }
  if (!globalThis.CSS?.highlights) return;
  const ranges = [];
  const walker = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.toLowerCase();
    for (let at = text.indexOf(words); at >= 0; at = text.indexOf(words, at + words.length)) {
      ranges.push(new StaticRange({ startContainer: walker.currentNode, startOffset: at, endContainer: walker.currentNode, endOffset: at + words.length }));
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}
