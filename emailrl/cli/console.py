"""A Rich console for text of others: email, names of files and models, metadata. Markup is disabled, and printed text
cannot control the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType, RenderHook
from rich.segment import Segment

from emailrl.base.plain import guard_streams, plain


class PlainConsole(Console):
    """A Rich console on stdout or stderr for untrusted text: email, names of files and models, metadata. Rich passes
    escape sequences in text through. Here all rendered text, also in tables and progress bars, goes through ``plain``;
    Rich's own colors and cursor movements are kept, as they go past ``PlainStream``."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    @property  # type: ignore[misc]
    def file(self) -> IO[str]:
        """The stream itself, behind ``PlainStream`` and Rich's stand-in."""
        stream = super().file
        while (behind := getattr(stream, "rich_proxied_file", None) or getattr(stream, "terminal", None)) is not None:
            stream = behind
        return stream

    def push_render_hook(self, hook: RenderHook) -> None:
        """Begin a live display, whose stand-ins for the streams would read escape sequences in what others print."""
        super().push_render_hook(hook)
        guard_streams()

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as Rich does, with sanitized text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)
