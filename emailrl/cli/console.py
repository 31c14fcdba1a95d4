"""The consoles of all commands: markup is disabled, and printed text cannot control the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from emailrl.plain import plain


class PlainConsole(Console):
    """A Rich console on stdout or stderr for untrusted text: email, names of files and models, metadata.

    Rich passes escape sequences in text through. Here all rendered text, also in tables and progress bars, goes
    through ``plain``; Rich's own colors and cursor movements are kept.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as Rich does, with sanitized text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)
