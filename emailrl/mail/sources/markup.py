"""Renders marked-up text: HTML (Beautiful Soup on the standard library's parser), enriched and flowed text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bs4.element import PageElement

MAX_HTML_CHARS = 500_000
"""Maximum characters of HTML to read: a tree takes about a hundred times the memory of its text."""

_BLOCKS = re.compile(
    r"<(?=/?(?:address|blockquote|br|center|d[dlt]|div|h[1-6]|hr|li|ol|p|pre|table|title|tr|ul)[\s/>])", re.IGNORECASE
)
_CELLS = re.compile(r"<(?=/?t[dh][\s/>])", re.IGNORECASE)
# The parser searches for the end of an unclosed comment or tag again at every following "<", so half a megabyte of
# them takes minutes; both are closed before parsing.
_COMMENT = re.compile(r"<!--.*?(?:--!?>|\Z)", re.DOTALL)
_PRE = re.compile(r"(<pre(?:\s[^<>]*)?>)(.*?)(?=</pre|\Z)", re.DOTALL | re.IGNORECASE)
_LINE_END = re.compile(r"<[^<>]*>|\n")
_HIDDEN = re.compile(r"display\s*:\s*none", re.IGNORECASE)
_ENRICHED = re.compile(r"<<|<param>[^<]*</param>|</?[a-z0-9-]{1,60}>|\n+", re.IGNORECASE)


def enriched_to_text(text: str) -> str:
    """Return the text of ``text/enriched`` (RFC 1896): one line end is a space, and n line ends are n - 1."""

    def plain(found: re.Match[str]) -> str:
        if found[0][0] == "\n":
            return found[0][1:] or " "
        return "<" if found[0] == "<<" else ""

    return _ENRICHED.sub(plain, text)


def flowed_to_text(text: str, *, delete_spaces: bool) -> str:
    """Return the text of ``format=flowed`` (RFC 3676) with each paragraph on one line; ``delete_spaces`` is DelSp.

    A line that ends in a space continues on the next line of the same quote depth; signature separators and empty
    lines stay alone.
    """
    paragraphs: list[list[str]] = []
    open_depth = None  # of the paragraph being continued
    for line in text.split("\n"):
        content = line.lstrip(">")
        depth = len(line) - len(content)
        content = content.removeprefix(" ")
        is_mark = content == "-- "
        flows = content.endswith(" ") and not is_mark
        shown = content[:-1] if flows and delete_spaces else content
        if depth == open_depth and content and not is_mark:
            paragraphs[-1].append(shown)
        else:
            paragraphs.append([f"{'>' * depth} {shown}" if depth else shown])
        open_depth = depth if flows else None
    return "\n".join(map("".join, paragraphs))


def html_to_text(html: str, defects: list[str]) -> str:
    """Return the visible text of an HTML email, one line per block.

    Only the first ``MAX_HTML_CHARS`` characters are read (``html_cut`` in ``defects``). If the parser rejects the
    markup, only its tags are removed (``bad_html``).
    """
    from bs4 import ParserRejectedMarkup

    if len(html) > MAX_HTML_CHARS:
        defects.append("html_cut")
        html = html[:MAX_HTML_CHARS]
    html = _PRE.sub(_with_breaks, _COMMENT.sub("", html).replace("\0", ""))
    html = " ".join(html.split())
    html = _CELLS.sub(" <", _BLOCKS.sub("\n<", html))
    complete, end, rest = html.rpartition(">")
    html = complete + end + rest.replace("<", "&lt;")
    try:
        text = _visible_text(html)
    except ParserRejectedMarkup:
        defects.append("bad_html")
        text = re.sub(r"<[^>]*>", " ", html)
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _visible_text(html: str) -> str:
    """The text outside the title and hidden tags; all of it if none is visible.

    Each node is visited once: taking tags out of the tree takes quadratic time if they are nested or many.
    """
    from bs4 import BeautifulSoup
    from bs4.element import CData, NavigableString, Tag

    class Soup(BeautifulSoup):
        def _linkage_fixer(self, el: Tag) -> None:
            """Do nothing: it serves parsers that move nodes, and climbs to the root at each text in nested blocks."""

    soup = Soup(html, "html.parser")
    shown: list[str] = []
    nodes: list[PageElement] = [soup]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Tag):
            if node.name != "title" and not _HIDDEN.search(str(node.get("style", ""))):
                nodes += reversed(node.contents)
        elif type(node) in (NavigableString, CData):  # not comments, scripts and styles
            shown.append(str(node))
    text = "".join(shown)
    return text if text.strip() else soup.get_text()


def _with_breaks(preformatted: re.Match[str]) -> str:
    """Preformatted text with a break for each line end outside tags."""
    inside = preformatted[2].removeprefix("\n")
    return preformatted[1] + _LINE_END.sub(lambda found: "<br>" if found[0] == "\n" else found[0], inside)
