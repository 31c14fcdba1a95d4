"""emailrl: build a searchable mailbox, let a language model search it, and train it by reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emailrl.agent import EmailAgent

__all__ = ["EmailAgent", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Lazily, so that `import emailrl`, and with it every command's --help, loads no model library.
    if name == "EmailAgent":
        from emailrl.agent import EmailAgent

        return EmailAgent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
