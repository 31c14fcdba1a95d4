"""The consoles of all commands: they read no markup, and nothing in what they print can steer the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from emailrl.plain import plain


class PlainConsole(Console):
    """A Rich console on stdout or stderr for texts that may be anyone's: mail, names of files and models, metadata.

    Rich itself takes escape sequences in a text for part of it. Here the text of everything that is laid out, in
    tables and progress bars too, goes through ``plain``; Rich's own colors and movements pass.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Lay out as Rich does, its text harmless."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)
