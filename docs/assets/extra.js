// What scrolls is reached by keys, and a button that copies is no landmark.
const mend = () => {
  for (const nav of document.querySelectorAll("nav.md-code__nav")) nav.role = "none";
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
};
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
addEventListener("resize", mend);
mend();
