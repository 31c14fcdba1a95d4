// Settings, versions and files behind the page.

function about() {
  const { run } = data;
  const lora = run.run.lora && Object.entries(run.run.lora).map(([name, value]) => `${plain(name)} ${[value].flat().join(" ")}`).join(", ");
  const identity = { ...run.run, lora };
  const groups = Object.entries(run.settings).map(([name, values]) => el("div.card", {}, outside(name, "h2"), pairTable(name.includes("→") ? Object.fromEntries(Object.entries(values).map(([each, both]) => [each, both.map(inWords).join(" → ")])) : values)));
  return el("div.overview", {}, heading("Settings"),
    groups.length ? el("section", {}, el("p.lead", { text: "Secrets are never recorded." }), el("div.cards", {}, groups)) : null,
    el("div.two", {},
      Object.values(identity).some(Boolean) && section("Run", null, pairTable(identity)),
      section("Versions", null, pairTable({ "page made by emailrl": run.made.emailrl, at: run.made.at, ...run.versions }))),
    section("Files", null, fileTable()));
}

function fileTable() {
  const rows = data.run.files.map((file) => el("tr", {}, el("th", { scope: "row" }, file.left_out ? outside(file.name) : el("a", { href: address(listOf({ file: file.name })) }, outside(file.name))), brief(file.label, "td.words", {}), el("td", { text: file.left_out ? "left out" : grouped(file.count) }), el("td", { text: `${(file.bytes / 1e6).toFixed(1)} MB` })));
  return numbersTable("Files", ["file", el("th", { scope: "col", class: "words", text: "contents" }), "trajectories", "size"], rows);
}
