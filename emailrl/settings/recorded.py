"""Settings recorded in a run's checkpoints, as a source for resuming the run.

A run's folder may come from a stranger, so it never decides what code runs, which server gets emails and keys, or where
files are written: code and addresses must be given again, paths are the current ones, and secrets are not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from emailrl.errors import UsageError
from emailrl.plain import tell
from emailrl.settings.credentials import without_credentials
from emailrl.settings.fields import PLAIN_WORD
from emailrl.settings.names import Leaf, leaves
from emailrl.settings.sources import Given, Source
from emailrl.settings.tree import Settings

_ORIGIN: Final = "recorded by the run"


def from_record(
    record: Mapping[str, Mapping[str, Any]], stated: Mapping[Leaf, Given], others: Mapping[Leaf, Given]
) -> Source:
    """The recorded values, without those that the record may not decide.

    ``stated`` holds flags and environment, which override the record; ``others`` holds the folder's files and the
    preset, which the record overrides. Raises UsageError for code or an address that none of them names.
    """
    defaults = Settings().public()
    source: Source = {}
    for leaf in leaves():
        placed = leaf.written is not None and not leaf.written.read_mostly
        if leaf.secret or placed or leaf in stated or leaf.field not in record.get(leaf.section, {}):
            continue
        value, default = record[leaf.section][leaf.field], defaults[leaf.section][leaf.field]
        own = others[leaf].value if leaf in others else default
        if (leaf.address or leaf.code) and value != default and not PLAIN_WORD.fullmatch(str(value)):
            if without_credentials(str(own)) != value:
                raise UsageError(
                    f"The run was trained with {leaf.env_names[0]}={value}, which a run's folder may not set.",
                    f"Set it again ({leaf.env_names[0]}=… emailrl train …), or choose another value.",
                )
        elif value != default or leaf in others:
            source[leaf] = Given(value, leaf.env_names[0], _ORIGIN)
    _warn_of_unknown(record)
    return source


def _warn_of_unknown(record: Mapping[str, Mapping[str, Any]]) -> None:
    known = {(leaf.section, leaf.field) for leaf in leaves()}
    unknown = [name for section, values in record.items() for name in values if (section, name) not in known]
    if unknown:
        names = ", ".join(unknown[:5])[:200]
        tell(f"warning: the run recorded unknown settings: {names}")
