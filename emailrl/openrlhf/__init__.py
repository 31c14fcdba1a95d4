"""OpenRLHF in emailrl's settings: flags (`table`), a command line read (`flags`) and written as TOML (`convert`)."""

from emailrl.openrlhf.convert import to_toml
from emailrl.openrlhf.flags import FLAGS, Flag, find_flag, parse

__all__ = ["FLAGS", "Flag", "find_flag", "parse", "to_toml"]
