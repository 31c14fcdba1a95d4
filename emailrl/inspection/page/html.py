"""Writes the page: one HTML string with its style, its script and its data, that may load nothing from anywhere."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any, Final

from emailrl.inspection.page.build import PageData
from emailrl.recording import Record, finite

_CHUNK_CHARACTERS = 400_000
"""JSON of trajectories that the page unpacks at once."""
SCRIPTS: Final = (
    "data", "dom", "state", "charts", "overview", "list", "conversation", "tokens", "detail", "about", "main",
)  # fmt: skip
"""The page's scripts in the order in which they are joined into one."""


def dump(record: Any) -> str:
    """Return a record as strict JSON in ASCII: lone surrogates as escapes, NaN and infinity as null."""
    return json.dumps(finite(record), allow_nan=False, separators=(",", ":"))


def page(data: PageData) -> str:
    """Return the page as one self-contained HTML document."""
    starts, chunks = [0], list[str]()
    for count, chunk in _chunks(data.details()):
        chunks.append(_block(f"chunk-{len(chunks)}", chunk))
        starts.append(starts[-1] + count)
    blocks = [
        _block("run", dump(data.run)),
        _block("rows", dump(data.rows)),
        *chunks,
        _json_script("page", {"served": False, "starts": starts}),
    ]
    return _document(data.run["title"], "\n".join(blocks), connect="'none'")[0]


def served_page(title: str) -> tuple[str, str]:
    """Return the same page without data, which it asks of the server it came from (``/data/…``), and its
    Content-Security-Policy."""
    return _document(title, _json_script("page", {"served": True}), connect="'self'")


def _chunks(details: Iterable[Record]) -> Iterator[tuple[int, str]]:
    """JSON lists of trajectories, each about as long as ``_CHUNK_CHARACTERS``, with how many it holds."""
    texts: list[str] = []
    size = 0
    for record in details:
        texts.append(dump(record))
        size += len(texts[-1])
        if size >= _CHUNK_CHARACTERS:
            yield len(texts), f"[{','.join(texts)}]"
            texts, size = [], 0
    if texts:
        yield len(texts), f"[{','.join(texts)}]"


def _block(name: str, text: str) -> str:
    """Compressed data: base64 holds no ``<``, so nothing in it can end the element."""
    packed = base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
    return f'<script type="application/json" id="{name}">"{packed}"</script>'


def _json_script(name: str, value: Record) -> str:
    return f'<script type="application/json" id="{name}">{dump(value)}</script>'


def _document(title: str, blocks: str, *, connect: str) -> tuple[str, str]:
    """The document and its policy."""
    style, script = _source("page.css"), "\n".join(_source(f"{name}.js") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}\n}})();'
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    document = (
        _source("page.html")
        .replace("{{policy}}", policy)
        .replace("{{style}}", style)
        .replace("{{script}}", script)
        .replace("{{data}}", blocks)
        .replace("{{title}}", html.escape(title))
    )
    return document, policy


def _source(name: str) -> str:
    """A source file without indentation, blank lines and lines of comments."""
    lines = map(str.strip, (files("emailrl.inspection.page") / name).read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(("//", "/*")))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
