"""``docs/openrlhf.md``, made from the table the conversion reads."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from emailrl.openrlhf.flags import FLAGS, Flag

_HEAD: Final = """\
# Coming from OpenRLHF

`emailrl train --from-openrlhf "…flags…"` prints the `emailrl.toml` that stands for a command line of OpenRLHF:

```bash
emailrl train --from-openrlhf "--advantage_estimator group_norm --n_samples_per_prompt 8" > emailrl.toml
emailrl train
```

It takes the flags of OpenRLHF 0.9.2 and the dotted names they have had since April 2026, with shell quoting,
`--flag=value` and backslashes at the ends of lines; what starts OpenRLHF may stand before them. An unknown flag is an
error that names the nearest known one. What was given becomes a line; the objective is written out in full, OpenRLHF's
defaults included (without `--advantage_estimator` that is PPO with a critic). Of the flags left out, every one whose
default differs from emailrl's is a comment with OpenRLHF's value: take the `#` away to train as OpenRLHF would. A
number that had to be rounded says how. Tokens, and credentials in an address, are never written. It does not train.

Two settings that mean the same do not always come to the same number: the last column says what differs. The formulas
are set against OpenRLHF's in [algorithms.md](algorithms.md).

The three typical combinations of OpenRLHF's list are converted and trained by a test, scaled down to `nano` on demo
mail: REINFORCE++-baseline and dynamic filtering as they stand, the hybrid engine for eight A100 with the engine in
process in place of vLLM (four engines that share GPUs with the trainer are not built yet).
"""
_NOT_BUILT: Final = """\
## Not built yet

These have no setting yet, for what they steer does not exist here. The conversion says so in a comment.

| flag | since 2026-04 | default there | |
|---|---|---|---|
"""
_NONE: Final = """\
## Without a setting

| flag | since 2026-04 | why |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    mapped = [flag for flag in FLAGS if flag.settings]
    parts = [_HEAD]
    for group, flags in groupby(mapped, key=lambda flag: flag.group):
        head = f"## {group}\n\n| flag | since 2026-04 | setting here | default there | default here | what differs |\n"
        parts.append(head + "|---|---|---|---|---|---|\n" + _lines(_mapped(flag) for flag in flags))
    waiting = [flag for flag in FLAGS if not flag.is_built]
    parts.append(_NOT_BUILT + _lines([_name(f), _dotted(f), f.default, f.note] for f in waiting))
    without = [flag for flag in FLAGS if flag.is_built and not flag.settings]
    parts.append(_NONE + _lines([_name(flag), _dotted(flag), flag.note] for flag in without))
    return "\n".join(parts)


def _mapped(flag: Flag) -> list[str]:
    settings = ", ".join(f"`{leaf.key}`" for leaf in flag.leaves)
    here = ", ".join(_shown(leaf.default) for leaf in flag.leaves)
    return [_name(flag), _dotted(flag), settings, flag.default, here, flag.note]


def _name(flag: Flag) -> str:
    return f"`--{flag.name}`"


def _dotted(flag: Flag) -> str:
    return f"`--{flag.dotted}`" if flag.dotted else "–"


def _lines(rows: Iterable[list[str]]) -> str:
    return "".join(f"| {' | '.join(cell or ' ' for cell in row)} |\n" for row in rows)


def _shown(value: object) -> str:
    if value is None or value == "":
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
