"""What is installed, what is missing and what to do: read from this machine alone, in about two seconds.

Nothing here imports the packages it looks at. Versions come from their metadata; torch, whose import can fail in ways
that end a process, is imported in a child, as is everything else when ``deep``. The network is never asked, and no
secret is shown.
"""

from emailrl.doctor.check import Check
from emailrl.doctor.examine import examine

__all__ = ["Check", "examine"]
