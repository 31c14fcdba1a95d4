// The view state, kept in the address (#…), and the trajectories it selects.

const FILTERS = ["source", "step", "file", "verdict", "failure", "kind", "inbox", "stop", "trained", "q", "rmin", "rmax"];
const FIELDS = ["view", ...FILTERS, "sort", "t", "side", "layer", "rows", "from", "to", "by", "smooth", "order", "reverse"];
const DEFAULTS = { view: "overview", sort: "order" };
let state = {};

function readState() {
  const given = new URLSearchParams(location.hash.slice(1));
  state = { ...DEFAULTS };
  for (const name of FIELDS) if (given.has(name)) state[name] = given.get(name);
}

function address(changes) {
  const next = { ...state, ...changes };
  const given = new URLSearchParams();
  for (const name of FIELDS) {
    if (next[name] !== undefined && next[name] !== null && next[name] !== "" && next[name] !== DEFAULTS[name]) given.set(name, next[name]);
  }
  return `#${given}`;
}

// Filter changes replace the address; other navigation adds to the history.
function go(changes, { replace = false } = {}) {
  const target = address(changes);
  if (target === location.hash) return;
  history[replace ? "replaceState" : "pushState"](null, "", target);
  readState();
  render();
}

const noFilters = () => Object.fromEntries(FILTERS.map((name) => [name, null]));

const MATCHES = {
  step: (row, value) => row.step === Number(value),
  ...Object.fromEntries(["source", "file", "verdict", "failure", "kind", "inbox", "stop"].map((name) => [name, (row, value) => row[name] === value])),
  trained: (row, value) => (value === "no" ? Boolean(row.dropped) : !row.dropped && (row.advantage ?? null) !== null),
  q: (row) => searchable(row).includes(wanted()),
  rmin: (row, value) => row.reward >= Number(value),
  rmax: (row, value) => row.reward <= Number(value),
};

function selected(but = []) {
  const active = FILTERS.filter((name) => state[name] && !but.includes(name));
  return data.rows.filter((row) => active.every((name) => MATCHES[name](row, state[name])));
}

const ORDERS = {
  order: null,
  "newest first": (one, other) => data.index.get(keyOf(other)) - data.index.get(keyOf(one)),
  "reward, low first": (one, other) => one.reward - other.reward,
  "reward, high first": (one, other) => other.reward - one.reward,
  "tokens, most first": (one, other) => other.tokens - one.tokens,
  "turns, most first": (one, other) => other.turns - one.turns,
  "spread of its group, widest first": (one, other) => spread(other) - spread(one),
};

function sorted(rows) {
  const order = ORDERS[state.sort];
  return order ? [...rows].sort(order) : rows;
}

const groupOf = (row) => data.groups.get(`${row.file} ${row.group}`) || [row];

function spread(row) {
  const rewards = groupOf(row).map((each) => each.reward);
  return Math.max(...rewards) - Math.min(...rewards);
}

const fileOf = (row) => data.run.files.find((file) => file.name === row.file) || { label: row.file };
// The trajectory that is shown: of the address, or where list and trajectory stand side by side the first of the list.
const isWide = matchMedia("(min-width: 901px)");
const openKey = () => state.t ?? (isWide.matches && state.view === "list" && list.rows.length ? keyOf(list.rows[0]) : null);
const openRow = () => data.rows[data.index.get(openKey())] ?? null;
