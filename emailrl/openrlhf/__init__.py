"""Convert OpenRLHF flags to emailrl settings: table (`table`), parser (`flags`) and TOML writer (`convert`)."""

from emailrl.openrlhf.convert import to_toml
from emailrl.openrlhf.flags import FLAGS, Flag, find_flag, parse

__all__ = ["FLAGS", "Flag", "find_flag", "parse", "to_toml"]
