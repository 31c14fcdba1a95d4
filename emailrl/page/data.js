// Loads the data: from blocks in this file, and what is new from the server of the page.

const config = JSON.parse(document.getElementById("page").textContent);
const PAGE_OF_ROWS = 2000;
const data = { run: null, rows: [], index: new Map() };

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

// The chunks follow the script, so that the overview stands before a large file has been read to its end.
const readToItsEnd = new Promise((resolve) => addEventListener("DOMContentLoaded", resolve));

async function unpack(name) {
  if (!document.getElementById(name)) await readToItsEnd;
  const bytes = bytesOf(document.getElementById(name).textContent.slice(1, -1));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const STOPPED = "emailrl view has stopped; start it again, and open its new address";

// Every request carries the token of the page's own address, and of a folder the run.
async function ask(path) {
  const response = await fetch(`${path}${path.includes("?") ? "&" : "?"}${location.search.slice(1)}`).catch(() => { throw new Error(STOPPED); });
  if (!response.ok) throw new Error(`The server answered ${response.status} to ${path}.`);
  return response.json();
}

const keyOf = (row) => `${row.file}@${row.offset}`;

function setRows(rows) {
  data.rows = rows;
  data.index = new Map(rows.map((row, number) => [keyOf(row), number]));
  data.groups = groupedBy(rows, (row) => `${row.file} ${row.group}`);
  data.questions = groupedBy(rows, (row) => row.scenario);
}

function groupedBy(items, nameOf) {
  const groups = new Map();
  for (const item of items) {
    const name = nameOf(item);
    const group = groups.get(name);
    if (group) group.push(item);
    else groups.set(name, [item]);
  }
  return groups;
}

async function load() {
  if (!document.getElementById("run")) await readToItsEnd;
  if (!document.getElementById("run")) return refresh(); // the server could not read them, and says why
  [data.run, data.rows] = await Promise.all([unpack("run"), unpack("rows")]);
  setRows(data.rows);
}

// Polls the server; rows of unchanged files are kept. Returns whether anything is new.
async function refresh(tell = () => {}) {
  const run = await ask("/data/run.json");
  const before = data.run ? data.run.files : [];
  let same = 0;
  while (same < before.length && same < run.files.length && sameFile(before[same], run.files[same])) same += 1;
  const isSame = data.run && same === run.files.length && same === before.length && extent(run) === extent(data.run);
  if (isSame && data.rows.length === run.total) {
    Object.assign(data.run, { status: run.status, live: run.live });
    return false;
  }
  const kept = before.slice(0, same).reduce((sum, file) => sum + file.count, 0);
  const rows = data.rows.slice(0, kept);
  while (rows.length < run.total) {
    const part = await ask(`/data/trajectories?from=${rows.length}&to=${Math.min(rows.length + PAGE_OF_ROWS, run.total)}`);
    if (!part.length) break;
    rows.push(...part);
    tell(`reading ${grouped(rows.length)} of ${grouped(run.total)}`);
  }
  data.run = run;
  setRows(rows);
  return true;
}

const extent = (run) => [run, ...(run.runs ?? [])].map((each) => [each.steps.length, each.evaluations.length, each.results?.length, each.status?.state, each.pair?.after.trajectories, isWaiting(each) && each.status.done]).join();
const sameFile = (one, other) => one.name === other.name && one.count === other.count && one.bytes === other.bytes;

const details = new Map();
const MOST_DETAILS = 24;

function remembered(name, make) {
  const promise = details.get(name) || make();
  details.delete(name);
  details.set(name, promise);
  if (details.size > MOST_DETAILS) details.delete(details.keys().next().value);
  return promise;
}

// One trajectory in full; if embedded, its chunk is unpacked once.
async function detailOf(row) {
  if (config.served) {
    const path = `/data/trajectory?file=${encodeURIComponent(row.file)}&offset=${row.offset}`;
    return remembered(path, () => ask(path));
  }
  const number = data.index.get(keyOf(row));
  let chunk = 0;
  while (config.starts[chunk + 1] <= number) chunk += 1;
  const trajectories = await remembered(`chunk-${chunk}`, () => unpack(`chunk-${chunk}`));
  return trajectories[number - config.starts[chunk]];
}
