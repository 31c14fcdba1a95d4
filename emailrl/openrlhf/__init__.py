"""Convert OpenRLHF flags to emailrl settings: the table in ``flags.toml``, a parser and a TOML writer in `convert`."""

from emailrl.openrlhf.convert import FLAGS, Flag, find_flag, parse, to_toml

__all__ = ["FLAGS", "Flag", "find_flag", "parse", "to_toml"]
