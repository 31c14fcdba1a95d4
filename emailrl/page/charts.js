// Small inline SVG charts: lines with intervals, stacked bars. A table next to them has the values.

const CHART = { width: 360, height: 150, left: 40, right: 8, top: 8, bottom: 20 };
const MOST_POINTS = 300;

const bucketSize = (points) => Math.ceil(points.length / MOST_POINTS);

function buckets(points) {
  const size = bucketSize(points);
  return Array.from({ length: Math.ceil(points.length / size) }, (_, index) => points.slice(index * size, (index + 1) * size));
}

// Averages neighboring steps if there are more than a chart can show; intervals are merged.
function thinned(points) {
  if (bucketSize(points) <= 1) return points;
  return buckets(points).map((part) => ({
    x: part.at(-1).x,
    y: mean(part.map((each) => each.y)),
    low: Math.min(...part.map((each) => each.low ?? each.y)),
    high: Math.max(...part.map((each) => each.high ?? each.y)),
  }));
}

function thinnedColumns(columns) {
  if (bucketSize(columns) <= 1) return columns;
  const names = [...new Set(columns.flatMap((column) => Object.keys(column.parts)))];
  const meanOf = (part, name) => mean(part.map((column) => column.parts[name] || 0));
  return buckets(columns).map((part) => ({ x: part.at(-1).x, parts: Object.fromEntries(names.map((name) => [name, meanOf(part, name)])) }));
}

// The note under a chart, with the number of steps averaged per point.
function noteNode(note, points) {
  const size = bucketSize(points);
  const text = size > 1 ? `${note} Each point: ${size} steps.`.trim() : note;
  return text ? el("p.note", { text }) : null;
}

function scaleOf(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

// Round values from the one at or below the lowest to the one at or above the highest.
function niceTicks(low, high) {
  const rough = (high - low || Math.abs(high) || 1) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const [first, last] = [Math.floor(low / step + 1e-6), Math.ceil(high / step - 1e-6)];
  return Array.from({ length: Math.max(last - first, 1) + 1 }, (_, index) => (first + index) * step);
}

// All digits of a round value, so that no two ticks read the same, and none of its error.
function tickText(value, show) {
  const round = Number((show === percent ? 100 * value : value).toPrecision(6));
  if (show === percent) return `${round}%`;
  return sign(value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e5) ? round.toExponential() : String(round));
}

// lines: [{name, points: [{x, y, low?, high?}], kind: "line" | "dots"}]; show: formats a value.
function lineChart(title, lines, { show = number, note = "", zero = false, smooth = false } = {}) {
  const recorded = lines.map((line) => ({ ...line, points: line.points.filter((point) => point.y !== null && point.y !== undefined) }));
  if (!recorded.some((line) => line.points.length)) return null;
  const chosen = recorded.map((line) => ({ ...line, points: within(line.points) }));
  const drawn = chosen.map((line) => ({ ...line, points: thinned(line.points) }));
  const points = drawn.flatMap((line) => line.points);
  if (!points.length) return outOfZoom(title);
  const xs = points.map((point) => point.x);
  const [first, last] = shownSteps();
  const lows = points.map((point) => point.low ?? point.y);
  const highs = points.map((point) => point.high ?? point.y);
  const frame = makeFrame(first, last, Math.min(...lows, zero ? 0 : Infinity), Math.max(...highs));
  const picture = framePicture(frame, `${title}: ${summary(drawn, show)}`, show);
  drawn.forEach((line, index) => drawLine(picture, frame, line, line.series ?? index, smooth));
  const { caption, keys, tell } = keysOf(title, [...groupedBy(drawn.filter((line) => line.points.length), (line) => line.name)].map(([name, same]) => ({ name, series: same[0].series ?? drawn.indexOf(same[0]), value: (step) => valueAt(same, step, show) })));
  follow(picture, frame, [...new Set(xs)].sort((one, other) => one - other), tell);
  return el("figure.chart", {}, caption, picture, keys, noteNode(note, chosen.map((line) => line.points).reduce((one, other) => (other.length > one.length ? other : one))));
}

const outOfZoom = (title) => el("figure.chart", {}, el("figcaption", {}, el("strong", { text: title })), el("p.note", { text: "No value in these steps." }));

function makeFrame(xLow, xHigh, yLow, yHigh) {
  const ticks = niceTicks(yLow, yHigh);
  return { ticks, xLow, xHigh, x: scaleOf(xLow, xHigh, CHART.left, CHART.width - CHART.right), y: scaleOf(ticks[0], ticks.at(-1), CHART.height - CHART.bottom, CHART.top) };
}

function framePicture(frame, label, show) {
  const picture = svg("svg", { viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", "aria-label": label });
  for (const tick of frame.ticks) {
    const y = frame.y(tick);
    picture.append(svg("line.grid", { x1: CHART.left, x2: CHART.width - CHART.right, y1: y, y2: y }));
    picture.append(svg("text.tick", { x: CHART.left - 6, y: y + 3.5, "text-anchor": "end", text: tickText(tick, show) }));
  }
  const ends = frame.xLow === frame.xHigh ? [frame.xLow] : [frame.xLow, frame.xHigh];
  ends.forEach((x, index) => {
    const anchor = index ? "end" : "start";
    const text = index ? String(x) : `step ${x}`;
    picture.append(svg("text.tick", { x: frame.x(x), y: CHART.height - 5, "text-anchor": anchor, text }));
  });
  return picture;
}

// The running mean of a line, each point weighing 0.6 of the mean before it.
function smoothed(points) {
  let middle = null;
  return points.map((point) => ({ ...point, y: (middle = middle === null ? point.y : 0.6 * middle + 0.4 * point.y) }));
}

function drawLine(picture, frame, line, index, smooth) {
  const at = (point, name = "y") => `${frame.x(point.x).toFixed(1)},${frame.y(point[name] ?? point.y).toFixed(1)}`;
  const banded = line.points.filter((point) => point.low !== undefined && point.low !== null);
  if (line.kind === "dots") {
    for (const point of banded) {
      picture.append(svg("line", { class: `whisker series-${index}`, x1: frame.x(point.x), x2: frame.x(point.x), y1: frame.y(point.low), y2: frame.y(point.high) }));
    }
  } else if (banded.length > 1) {
    const outline = [...banded.map((point) => at(point, "high")), ...banded.toReversed().map((point) => at(point, "low"))];
    picture.append(svg("polygon", { class: `band series-${index}`, points: outline.join(" ") }));
  }
  const path = (points, name) => picture.append(svg("polyline", { class: `${name} series-${index}`, points: points.map((point) => at(point)).join(" ") }));
  path(line.points, smooth ? "line raw" : "line");
  if (smooth) path(smoothed(line.points), "line");
  if (line.kind === "dots" || line.points.length === 1) {
    for (const point of line.points) picture.append(svg("circle", { class: `dot series-${index}`, cx: frame.x(point.x), cy: frame.y(point.y), r: 3 }));
  }
}

const withInterval = (point, show) => show(point.y) + (point.low !== undefined && point.low !== null ? ` (${show(point.low).replace("%", "")} to ${show(point.high).replace("%", "")})` : "");

// The value of lines of one name at a step, or at their ends: of several the mean, lowest and highest.
function valueAt(lines, step, show) {
  const found = lines.map((line) => (step === null ? line.points.at(-1) : line.points.find((point) => point.x === step))).filter(Boolean);
  const ys = found.map((point) => point.y);
  return found.length > 1 ? withInterval({ y: mean(ys), low: Math.min(...ys), high: Math.max(...ys) }, show) : found.length ? withInterval(found[0], show) : "–";
}

// A chart's caption and its keys, with the values at the step under the cursor, else the last; a line alone needs no key.
function keysOf(title, entries, alone = entries.length === 1) {
  const readout = el("output", { class: "readout" });
  const values = entries.map(() => el("span.value", {}));
  const tell = (step) => {
    entries.forEach(({ value }, index) => { values[index].textContent = value(step); });
    readout.textContent = [step !== null && `step ${step}`, alone && values[0].textContent].filter(Boolean).join(": ");
  };
  tell(null);
  const keys = entries.map(({ name, series }, index) => el("span", { class: `key series-${series % 6}` }, outside(name), " ", values[index]));
  return { tell, caption: el("figcaption", {}, el("strong", { text: title }), readout), keys: alone ? null : el("p.keys", {}, keys) };
}

function summary(lines, show) {
  return lines
    .filter((line) => line.points.length)
    .map((line) => `${line.own ?? line.name} from ${show(line.points[0].y)} at step ${line.points[0].x} to ${show(line.points.at(-1).y)} at step ${line.points.at(-1).x}`)
    .join("; ");
}

// Moves a cursor along the steps in all charts at once; a click opens that step's trajectories. On a touch screen, the
// first touch of a step reads it, the second opens it.
const linked = [];

function follow(picture, frame, steps, tell) {
  const cursor = svg("line.cursor", { y1: CHART.top, y2: CHART.height - CHART.bottom, visibility: "hidden" });
  picture.append(cursor);
  const nearestTo = (x) => steps.reduce((best, step) => (Math.abs(step - x) < Math.abs(best - x) ? step : best));
  const stepAt = (event) => {
    const box = picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * CHART.width;
    return steps.reduce((best, step) => (Math.abs(frame.x(step) - x) < Math.abs(frame.x(best) - x) ? step : best));
  };
  let read = null;
  linked.push((x) => {
    const step = x === null || x < steps[0] || x > steps.at(-1) ? null : nearestTo(x);
    cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) for (const end of ["x1", "x2"]) cursor.setAttribute(end, frame.x(step));
    tell(step);
  });
  const show = (step) => linked.forEach((each) => each(step));
  picture.addEventListener("pointermove", (event) => show(stepAt(event)));
  picture.addEventListener("pointerleave", (event) => event.pointerType === "touch" || show(null));
  const isDrag = dragToZoom(picture, frame, stepAt);
  if (!data.rows.length) return;
  picture.classList.add("opens");
  picture.addEventListener("click", (event) => {
    if (isDrag()) return;
    const step = stepAt(event);
    show(step);
    if (event.pointerType === "touch" && read !== step) read = step;
    else go(listOf({ step }));
  });
}

// columns: [{x, parts: {name: value}}]
function stackChart(title, all, { show = number, note = "", least = 0 } = {}) {
  if (!all.length) return null;
  const columns = thinnedColumns(within(all));
  if (!columns.length) return outOfZoom(title);
  const names = [...new Set(columns.flatMap((column) => Object.keys(column.parts).filter((name) => column.parts[name] > least)))];
  if (!names.length) return null;
  const totals = columns.map((column) => sum(names.map((name) => column.parts[name] || 0)));
  const [first, last] = shownSteps();
  const frame = makeFrame(first - 0.5, last + 0.5, 0, Math.max(...totals));
  const shown = { ...frame, xLow: first, xHigh: last };
  const picture = framePicture(shown, `${title}: ${names.map((name) => `${name} ${show(sum(columns.map((column) => column.parts[name] || 0)))} in all`).join("; ")}`);
  const width = Math.max(0.5, (CHART.width - CHART.left - CHART.right) / (last - first + 1) - 1);
  for (const column of columns) {
    let below = 0;
    names.forEach((name, index) => {
      const value = column.parts[name] || 0;
      if (!value) return;
      const top = frame.y(below + value);
      picture.append(svg("rect", { class: `stack series-${index % 6}`, x: frame.x(column.x) - width / 2, y: top, width, height: Math.max(0, frame.y(below) - top) }));
      below += value;
    });
  }
  const at = (step) => (columns.find((each) => each.x === step) || columns.at(-1)).parts;
  const { caption, keys, tell } = keysOf(title, names.map((name, series) => ({ name, series, value: (step) => show(at(step)[name] || 0) })), false);
  follow(picture, frame, columns.map((column) => column.x), tell);
  return el("figure.chart", {}, caption, picture, keys, noteNode(note, within(all)));
}
