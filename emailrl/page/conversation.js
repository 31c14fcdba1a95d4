// A trajectory's conversation: the question, each call with its folded result, and the answer.

function conversation(detail, { compact = false } = {}) {
  const gold = new Set(detail.evidence.gold.map((each) => each.id));
  const items = [];
  for (const item of detail.conversation) {
    if (item.role === "assistant") items.push(assistantTurn(item, gold, { compact, raw: !compact && !detail.samples.length }));
    else if (item.role === "tool") (items.at(-1) || items).append?.(toolResult(item, gold, compact));
    else if (!compact) items.push(openingMessage(item));
  }
  return el("ol", { class: compact ? "talk compact" : "talk" }, items);
}

function openingMessage(item) {
  if (item.role === "user") return el("li.message.user", {}, el("span.who", { text: "Question" }), outside(item.text, "p.said", {}));
  return el("li.message.system", {}, fold(item.role, firstLine(item.text), () => outside(item.text, "pre")));
}

const firstLine = (text) => (text.length > 90 ? `${text.slice(0, 90).replaceAll("\n", " ")}…` : text.replaceAll("\n", " "));

function fold(label, hint, content, opened = false) {
  const box = el("details.fold", { open: opened }, el("summary", {}, el("span.who", { text: label }), outside(hint, "span.hint", {})));
  const draw = () => box.children.length > 1 || box.append(content());
  if (opened) draw();
  box.draw = draw;
  box.addEventListener("toggle", () => box.open && draw());
  return box;
}

function assistantTurn(item, gold, { compact, raw }) {
  const node = el("li.message.assistant", {});
  const facts = [item.turn ? `turn ${item.turn}` : "assistant"];
  if (!compact && item.tokens) facts.push(plural(item.tokens, "token"));
  if (!compact && item.seconds) facts.push(`${number(item.seconds, 2)} s`);
  if (!compact && item.logprob !== null && item.logprob !== undefined) facts.push(`mean log-prob ${number(item.logprob)}`);
  if (item.finish && item.finish !== "stop") facts.push(`finish ${item.finish}`);
  node.append(el("span.who", { text: facts.join(" · ") }));
  if (item.said) node.append(outside(item.said, "p.said", {}));
  for (const call of item.calls) node.append(callNode(call, gold));
  if (item.error) node.append(outside(`Unreadable tool call: ${item.error}`, "p.problem", {}));
  if (raw && item.calls.length && item.text) node.append(fold("raw text", "", () => outside(item.text, "pre")));
  return node;
}

function callNode(call, gold) {
  const { name } = call;
  const given = call.arguments && typeof call.arguments === "object" ? call.arguments : {};
  if (name === "return_final_answer") {
    const sources = Array.isArray(given.sources) ? given.sources : [];
    return el("div.call.final", {}, el("span.tool", { text: "final answer" }), outside(textOf(given.answer), "span.answer-text", {}),
      sources.length ? el("span.sources", {}, "cites ", sources.map((id) => messageId(textOf(id), gold))) : null);
  }
  const argumentsOf = Object.entries(given).map(([key, value]) => el("span.argument", {}, outside(key, "span.key", {}), " ", key === "message_id" ? messageId(textOf(value), gold) : outside(textOf(value), "code")));
  return el("div.call", {}, outside(name, "span.tool", {}), argumentsOf);
}

function textOf(value) {
  if (typeof value === "string") return value;
  if (Array.isArray(value) && value.every((each) => each === null || typeof each === "string")) return value.map((each) => (each === null ? "none" : `“${each}”`)).join(", ");
  return JSON.stringify(value) ?? "";
}

function messageId(id, gold) {
  const isGold = gold.has(id);
  return el("span", { class: isGold ? "id gold" : "id", title: isGold ? "holds the answer" : null }, isGold ? el("span.star", { role: "img", "aria-label": "gold email ", text: "★ " }) : null, outside(id));
}

function toolResult(item, gold, compact) {
  let value = null;
  try {
    value = JSON.parse(item.text);
  } catch {
    return fold("result", firstLine(item.text), () => outside(item.text, "pre"), !compact && item.text.length < 400);
  }
  if (Array.isArray(value)) {
    const some = value.some((hit) => hit && gold.has(hit.message_id));
    return fold("result", `${plural(value.length, "email")} found${some ? ", ★ among them" : ""}`, () => el("ul.hits", {}, value.map((hit) => hitNode(hit, gold))), !compact && value.length <= 4);
  }
  if (value && typeof value === "object" && typeof value.body === "string") {
    const subject = textOf(value.subject ?? "");
    return fold(gold.has(value.message_id) ? "★ email" : "email", subject || "(no subject)", () => emailNode(value, gold), !compact && value.body.length < 600);
  }
  return fold("result", firstLine(item.text), () => outside(JSON.stringify(value, null, 1), "pre"), true);
}

// Snippets mark matches with <b>…</b>, which are highlighted; everything else is shown as is.
function hitNode(hit, gold) {
  if (!hit || typeof hit !== "object") return el("li", {}, outside(textOf(hit)));
  const parts = textOf(hit.snippet ?? "").split(/<b>(.*?)<\/b>/s).map((part, index) => outside(part, index % 2 ? "mark" : "span"));
  return el("li", {}, messageId(textOf(hit.message_id), gold), el("span.snippet", {}, parts));
}

function emailNode(email, gold) {
  const line = (name, value) => (value && value.length ? el("div", {}, el("dt", { text: name }), el("dd", {}, outside(Array.isArray(value) ? value.join(", ") : value))) : null);
  return el("div.email", {}, el("dl", {}, line("From", email.from_address), line("To", email.to_addresses), line("Cc", email.cc_addresses), line("Date", email.date), el("div", {}, el("dt", { text: "Id" }), el("dd", {}, messageId(textOf(email.message_id), gold)))), outside(email.body, "pre"));
}
