// What scrolls is reached by keys, a button that copies is no landmark, and the search is read on a plain background.
const observer = new MutationObserver(() => mend());
const PLAIN = ".e { background: rgb(var(--color-background)) !important } li { color: rgb(var(--color-foreground)) !important; opacity: 1 !important }";

function mend() {
  for (const nav of document.querySelectorAll("nav.md-code__nav")) nav.role = "none";
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap, article table, math[display=block]")) {
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
addEventListener("resize", mend);
mend();
