// The steps that all charts of the page show: chosen by dragging over a chart, by number or with + − 0, and kept in the
// address.

const zoomed = () => state.from !== undefined || state.to !== undefined;
const shownSteps = () => [state.from, state.to].map((end, index) => Number(end ?? allSteps()[index]));
const within = (items, [from, to] = shownSteps()) => items.filter(({ x }) => x >= from && x <= to);

// First and last step that there is.
let ends = {};
function allSteps() {
  if (ends.of === data.run) return ends.found;
  const recorded = [data.run, ...(data.run.runs ?? [])].flatMap((run) => [...run.steps, ...run.evaluations]).map((each) => each.step);
  ends = { of: data.run, found: [Math.min(...recorded), Math.max(...recorded)] };
  return ends.found;
}

// Shows the steps from one to another, or all.
function zoom(from, to) {
  const [first, last] = allSteps();
  const isAll = from <= first && to >= last;
  redrawOverview({ from: isAll ? null : String(Math.max(first, from)), to: isAll ? null : String(Math.min(last, to)) });
  announce(isAll ? "All steps" : `Steps ${state.from} to ${state.to}`);
}

// Half as many steps, or twice as many, about the middle of those that are shown.
function zoomBy(factor) {
  const [first, last] = allSteps();
  const [from, to] = [Number(state.from ?? first), Number(state.to ?? last)];
  const reach = Math.max(1, ((to - from) * factor) / 2);
  zoom(Math.max(first, Math.round((from + to) / 2 - reach)), Math.min(last, Math.round((from + to) / 2 + reach)));
}

function zoomControls() {
  const [first, last] = allSteps();
  if (!(last - first > 1)) return null;
  const field = (name, value, label) => el("input", { type: "number", min: first, max: last, value, "aria-label": label, onchange: (event) => { const chosen = { from: Number(state.from ?? first), to: Number(state.to ?? last), [name]: Number(event.target.value) }; setTimeout(() => zoom(Math.min(chosen.from, chosen.to), Math.max(chosen.from, chosen.to))); } }); // after Tab has moved on
  return el("p.controls", {}, el("span", {}, "Steps ", field("from", state.from ?? first, "First step"), " to ", field("to", state.to ?? last, "Last step")), el("button", { type: "button", class: "toggle", disabled: !zoomed(), text: "All steps", onclick: () => zoom(first, last) }), el("span.note", { text: "or drag over a chart" }));
}

// Dragging over a picture chooses steps; tells whether the click that ends a drag is one.
function dragToZoom(picture, frame, stepAt) {
  let from = null;
  let isDrag = false;
  const area = svg("rect.chosen", { y: CHART.top, height: CHART.height - CHART.bottom - CHART.top, visibility: "hidden" });
  picture.append(area);
  picture.addEventListener("pointerdown", (event) => {
    [from, isDrag] = [event.button ? null : { x: event.clientX, step: stepAt(event) }, false];
    if (from) picture.setPointerCapture(event.pointerId);
  });
  picture.addEventListener("pointermove", (event) => {
    if (!from || Math.abs(event.clientX - from.x) < 8) return;
    isDrag = true;
    const ends = [from.step, stepAt(event)].map(frame.x).sort((one, other) => one - other);
    for (const [name, value] of [["x", ends[0]], ["width", ends[1] - ends[0]], ["visibility", "visible"]]) area.setAttribute(name, value);
  });
  const end = (event) => {
    const [start, to] = [from, stepAt(event)];
    from = null;
    area.setAttribute("visibility", "hidden");
    if (isDrag && event.type === "pointerup" && start.step !== to) setTimeout(() => zoom(Math.min(start.step, to), Math.max(start.step, to)));
  };
  picture.addEventListener("pointerup", end);
  picture.addEventListener("pointercancel", end);
  return () => isDrag;
}
