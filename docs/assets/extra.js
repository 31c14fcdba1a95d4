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
addEventListener("resize", mend);
mend();

// All words of a search must be on a page: those that a question only strings together are left out.
const STOP = new Set("a an and are as at be can do does for from get have how i if in is it me my need of on or should so that the there they this to use using want was we what when where which why will with you your".split(" "));
const post = Worker.prototype.postMessage;

Worker.prototype.postMessage = function (message, ...rest) {
  if (typeof message?.data?.input === "string") {
    const words = message.data.input.split(/\s+/).filter((word) => !STOP.has(word.replace(/[?!.,]+$/, "").toLowerCase()));
    if (words.join("")) message = { ...message, data: { ...message.data, input: words.join(" ").replace(/\?+$/, "") } };
  }
  return post.call(this, message, ...rest);
};
