"""Renders the page: one HTML string with its style, script and data, which may load nothing external."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any, Final

from emailrl.page.build import PageData
from emailrl.records import Record, encode

_CHUNK_BYTES = 400_000
"""Trajectory JSON that the page unpacks at a time."""
SCRIPTS: Final = (
    "data", "dom", "state", "charts", "overview", "list", "conversation", "tokens", "detail", "about", "main",
)  # fmt: skip
"""The page's scripts in the order in which they are joined into one."""


def dump(value: Any) -> str:
    """Return a value as strict JSON: lone surrogates as escapes, NaN and infinity as null."""
    return encode(value).decode().strip()


def page(data: PageData) -> str:
    """Return the page as one self-contained HTML document."""
    starts, chunks = [0], list[str]()
    for count, chunk in _chunks(data.details()):
        chunks.append(_block(f"chunk-{len(chunks)}", chunk))
        starts.append(starts[-1] + count)
    blocks = [
        _block("run", encode(data.run)),
        _block("rows", _array(map(encode, data.rows))),
        *chunks,
        _json_script("page", {"served": False, "starts": starts}),
    ]
    return _document(data.run["title"], "\n".join(blocks), connect="'none'")[0]


def served_page(title: str) -> tuple[str, str]:
    """Return the page without data, which it fetches from its server (``/data/…``), and its Content-Security-Policy."""
    return _document(title, _json_script("page", {"served": True}), connect="'self'")


def _chunks(details: Iterable[Record]) -> Iterator[tuple[int, bytes]]:
    """JSON arrays of trajectories of about ``_CHUNK_BYTES`` each, with their lengths."""
    items: list[bytes] = []
    size = 0
    for record in details:
        items.append(encode(record))
        size += len(items[-1])
        if size >= _CHUNK_BYTES:
            yield len(items), _array(items)
            items, size = [], 0
    if items:
        yield len(items), _array(items)


def _array(items: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def _block(name: str, content: bytes) -> str:
    """Compressed data: base64 holds no ``<``, so nothing in it can end the element."""
    packed = base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()
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
    lines = map(str.strip, (files("emailrl.page") / name).read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(("//", "/*")))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
