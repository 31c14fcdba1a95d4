"""Convert OpenRLHF flags to emailrl settings: their table (`table`), and their parser and TOML writer (`convert`)."""

from emailrl.openrlhf.convert import FLAGS, Flag, find_flag, parse, to_toml

__all__ = ["FLAGS", "Flag", "find_flag", "parse", "to_toml"]
