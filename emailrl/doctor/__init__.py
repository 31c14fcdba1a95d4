"""Report what is installed, what is missing and how to fix it, for this machine only, in about two seconds.

The packages it checks are not imported here. Versions come from their metadata; torch, whose import can crash the
process, is imported in a child process, as is everything else if ``deep``. It never uses the network or shows secrets.
"""

from emailrl.doctor.checks import Check, examine, verdict

__all__ = ["Check", "examine", "verdict"]
