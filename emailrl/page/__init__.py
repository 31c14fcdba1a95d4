"""One HTML page of a run, a trajectory file or one trajectory: a single file that works offline.

The page's sources (``page.html``, ``page.css`` and the scripts) use no library and need no build: ``build.py`` joins
them, stripped of indentation and comments, for every page.
"""

from emailrl.page.build import PageData, dump, gather, page, served_page
from emailrl.page.place import Place, place_of, run_record
from emailrl.page.redact import redacted
from emailrl.page.shapes import detail, rows

__all__ = [
    "PageData",
    "Place",
    "detail",
    "dump",
    "gather",
    "page",
    "place_of",
    "redacted",
    "rows",
    "run_record",
    "served_page",
]
