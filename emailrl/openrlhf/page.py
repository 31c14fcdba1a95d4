"""``docs/openrlhf.md``, generated from the table that the conversion reads."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from emailrl.openrlhf.flags import FLAGS, Flag

_HEAD: Final = """\
# Coming from OpenRLHF

`emailrl train --from-openrlhf "…flags…"` converts an OpenRLHF command line into an `emailrl.toml`, without training:

<!-- test: options -->
```bash
emailrl train --from-openrlhf "--advantage_estimator group_norm --n_samples_per_prompt 8" > emailrl.toml
emailrl train
```

If the conversion fails, the shell leaves an empty `emailrl.toml`: correct the flags and convert again before you train.

It accepts the flags of OpenRLHF 0.9.2 and their dotted names since April 2026, with shell quoting, `--flag=value` and
backslashes at line ends, with or without the command that starts OpenRLHF. An unknown flag is an error that suggests
the nearest known one.

- Each given flag becomes a line. The objective is always written in full, including OpenRLHF's defaults (without
  `--advantage_estimator`, PPO with a critic).
- Other flags whose default differs from emailrl's become comments with OpenRLHF's value: uncomment them to train as
  OpenRLHF would. Its defaults for your machine and files (GPUs, attention package, field names) are left out.
- A comment explains every rounded number. Tokens, and credentials in URLs, are never written.

Equivalent settings do not always give the same numbers: the last column says what differs. The formulas are compared in
[algorithms.md](algorithms.md).

Tests convert and train four typical OpenRLHF combinations, scaled down to `nano` or a smaller model on demo mail:
REINFORCE++-baseline and dynamic filtering unchanged; the hybrid engine for eight A100 with two ranks and the engine in
process instead of vLLM; and asynchronous training with one server. Differences in placement:

- Engines that share GPUs with the trainer run in the ranks' own processes: one for each `vllm_tensor_parallel_size`
  ranks, so their number follows from the ranks ([scaling.md](scaling.md#shared-gpus)).
- The base is frozen and an adapter is trained, so ZeRO's stages 1 and 2 have nothing to partition. Stage 3 and offload
  concern the base ([scaling.md](scaling.md#a-base-model-that-does-not-fit)) and need vLLM servers.
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
        head = (
            f"## {group}\n\n| flag | since 2026-04 | setting here | OpenRLHF default | default here | what differs |\n"
        )
        parts.append(head + "|---|---|---|---|---|---|\n" + _lines(_mapped(flag) for flag in flags))
    without = [flag for flag in FLAGS if not flag.settings]
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
