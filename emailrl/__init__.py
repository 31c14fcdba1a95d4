"""emailrl: build a searchable mailbox, let a language model search it, and train it by reinforcement learning."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emailrl.agent.email_agent import EmailAgent

__all__ = ["EmailAgent", "__version__"]

__version__ = "0.1.0"

# OpenMP reads it when torch loads, so it is set before anything here can load it: threads that wait by spinning slow a
# busy machine to a crawl. A value of the user's own stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# oneDNN keeps a kernel for each of 1,024 shapes, and every length of a prompt is another: hundreds of MB in a session.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
os.environ.setdefault("LRU_CACHE_CAPACITY", "128")  # likewise torch's own cache of oneDNN's kernels


def __getattr__(name: str) -> object:
    # Lazily, so that `import emailrl`, and with it every command's --help, loads no model library.
    if name == "EmailAgent":
        from emailrl.agent.email_agent import EmailAgent

        return EmailAgent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
