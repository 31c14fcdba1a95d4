"""From flags to ``emailrl.toml``: what was given, the objective in full, and in comments what has no line of its own.

A default that is not part of the objective is OpenRLHF's own in a comment: 1024 questions a step are no choice to make
for someone in silence. Such defaults are worked out from the table's column as if they had been given.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pydantic import ValidationError

from emailrl.errors import UsageError
from emailrl.openrlhf.flags import FLAGS, Flag, Given, parse
from emailrl.openrlhf.take import Conversion, take_all
from emailrl.settings import Settings, without_credentials
from emailrl.settings.names import by_name, leaves
from emailrl.training.algorithms import Algorithm
from emailrl.training.mix import resolve

Offers = dict[str, tuple[Any, str]]
"""Setting → OpenRLHF's default, and the comment behind it."""

SWITCHES: Final = {
    "enable_prefix_caching": ("vllm_enable_prefix_caching", False),
    "vllm_enable_sleep": ("vllm_enable_sleep", False),
    "packing_samples": ("packing", False),
    "gradient_checkpointing": ("gradient_checkpointing", "off"),
    "use_wandb": ("wandb_mode", "disabled"),
    "enable_vllm_is_correction": ("importance_correction", "off"),
}
"""Flags that are off unless given, and the setting that is not off here."""
_UNLIKE: Final = frozenset(("lora_rank", "max_len", "train_max_tokens_per_gpu"))
"""No adapter, which is refused here; and what counts only beside flags that were not given."""
_LITERAL: Final = re.compile(r"-?\d\S*( -?\d\S*)?|`[^`…]+`")
"""A default that can be read as a value: not ``computed``, ``as training`` or a path that goes on."""


def to_toml(text: str) -> str:
    """The ``emailrl.toml`` that stands for a command line of OpenRLHF.

    Raises UsageError for a line that cannot be read, an unknown flag, a value no setting takes, or a mix that no
    training here can have. A token in it is never written.
    """
    given = parse(text)
    taken = take_all(given)
    settings, algorithm = _check(taken)
    _add_notes(given, taken)
    _mask(taken)
    return _write(taken, _offers(given, taken, settings, algorithm))


def _add_notes(given: Given, taken: Conversion) -> None:
    """What cannot be told beside a setting, for there is no value of OpenRLHF's that one could take."""
    if "lora_rank" not in given:
        taken.notes.append("--lora_rank not given: OpenRLHF trains all weights; here it is an adapter (lora_rank)")
    if "max_steps" not in given:
        taken.notes.append("--max_steps not given: computed there from --num_episodes; here max_steps ends a run")


def _mask(taken: Conversion) -> None:
    """Take credentials out of addresses, and say so where there were any."""
    for key, value in taken.values.items():
        if isinstance(value, str) and "://" in value and (shown := without_credentials(value)) != value:
            taken.values[key] = shown
            taken.flags[key] += (
                f"; its credentials are left out: give the whole address as {by_name()[key].env_names[0]}"
            )


def _check(taken: Conversion) -> tuple[Settings, Algorithm]:
    """The settings and the algorithm that a conversion comes to.

    Raises UsageError for a value that its setting does not take, or a mix that cannot be trained.
    """
    tree: dict[str, dict[str, Any]] = {}
    for key, value in taken.values.items():
        leaf = by_name()[key]
        tree.setdefault(leaf.section, {})[leaf.field] = value
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        section, name = error.errors()[0]["loc"][:2]
        [leaf] = [leaf for leaf in leaves() if (leaf.section, leaf.field) == (section, name)]
        reason = error.errors()[0]["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise UsageError(f"{taken.flags[leaf.key]}: {leaf.key} should be {reason}.", "See docs/settings.md.") from None
    return settings, resolve(settings)


def _write(taken: Conversion, offered: Offers) -> str:
    lines = [
        "# The equivalent of a command line of OpenRLHF, made by emailrl train --from-openrlhf.",
        "# What it does not name has emailrl's default; docs/openrlhf.md says where OpenRLHF's differ.",
    ]
    lines += [f"# {_comment(note)}" for note in taken.notes]
    section = ""
    for leaf in leaves():
        if leaf.key not in taken.values and leaf.key not in offered:
            continue
        if leaf.section != section:
            section = leaf.section
            lines += ["", f"[{section}]"]
        if leaf.key in taken.values:
            lines.append(f"{leaf.key} = {_toml(taken.values[leaf.key])}  # {_comment(taken.flags[leaf.key])}")
        else:
            value, reason = offered[leaf.key]
            lines.append(f"# {leaf.key} = {_toml(value)}  # {_comment(reason)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # A JSON string is a TOML one, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def _comment(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


# -- OpenRLHF's defaults for what the command line leaves out, where emailrl's own differ


def _offers(given: Given, taken: Conversion, settings: Settings, algorithm: Algorithm) -> Offers:
    """What OpenRLHF would have where the command line says nothing; settings that come to the same are left out.

    ``taken``, ``settings`` and ``algorithm`` are what was made of the flags given.
    """
    left_out = [flag for flag in FLAGS if flag.name not in given and _may_matter(flag, given)]
    theirs = {flag.name: flag.default.strip("`").split() for flag in left_out if _LITERAL.fullmatch(flag.default)}
    trial = take_all(theirs | given)
    found: Offers = {}
    for key, value in trial.values.items():
        if key not in taken.values and value != _here(key, settings, algorithm):
            found[key] = value, _reason(key, trial.flags[key])
    if "rollout_batch_size" not in given and "train_batch_size" in given:
        found.pop("num_mini_batches", None)  # it belongs to a number of questions that is not taken over
    for name, (key, value) in SWITCHES.items():
        differs = value != _here(key, settings, algorithm)
        if name not in given and key not in taken.values and differs and _may_matter(_BY_NAME[name], given):
            found[key] = value, f"--{name} not given: off in OpenRLHF"
    return found


_BY_NAME: Final = {flag.name: flag for flag in FLAGS}


def _may_matter(flag: Flag, given: Given) -> bool:
    """Whether a flag that was left out says anything beside those given: vLLM's do only where there is vLLM."""
    is_idle = flag.group == "vLLM" and "vllm_num_engines" not in given
    return bool(flag.settings) and not is_idle and flag.name not in _UNLIKE


def _here(key: str, settings: Settings, algorithm: Algorithm) -> Any:
    """The value in force here; of an unset override, the algorithm's."""
    leaf = by_name()[key]
    value = getattr(getattr(settings, leaf.section), leaf.field)
    return getattr(algorithm, key, None) if value is None else value


def _reason(key: str, why: str) -> str:
    if key == "num_mini_batches":
        return f"--train_batch_size not given: OpenRLHF's default is 128 ({why})"
    [name, rest] = re.fullmatch(r"(--\w+)(.*)", why).groups()  # type: ignore[union-attr]
    return f"{name} not given: OpenRLHF's default{rest if rest[:1] in ',' or rest[:2] == ' +' else ' is' + rest}"
