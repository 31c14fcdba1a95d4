"""OpenRLHF's defaults for what a command line leaves out, where emailrl's own differ: said in comments, never set.

They are worked out from the table's column as if they had been given, so that what is said of them stays true.
"""

from __future__ import annotations

import re
from typing import Any, Final

from emailrl.openrlhf.flags import FLAGS, Flag
from emailrl.openrlhf.parse import Given
from emailrl.openrlhf.special import Conversion
from emailrl.openrlhf.take import take_all
from emailrl.settings import Settings
from emailrl.settings.names import by_name
from emailrl.training.algorithms import Algorithm

Offers = dict[str, tuple[Any, str]]
"""Setting → OpenRLHF's default, and what to say behind it."""

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


def offers(given: Given, plan: Conversion, settings: Settings, algorithm: Algorithm) -> Offers:
    """What OpenRLHF would have where the command line says nothing; settings that come to the same are left out.

    ``plan``, ``settings`` and ``algorithm`` are what was made of the flags given.
    """
    left_out = [flag for flag in FLAGS if flag.name not in given and _may_matter(flag, given)]
    theirs = {flag.name: flag.default.strip("`").split() for flag in left_out if _LITERAL.fullmatch(flag.default)}
    trial = take_all(theirs | given)
    found: Offers = {}
    for key, value in trial.values.items():
        if key not in plan.values and value != _here(key, settings, algorithm):
            found[key] = value, _said(key, trial.flags[key])
    if "rollout_batch_size" not in given and "train_batch_size" in given:
        found.pop("num_mini_batches", None)  # it belongs to a number of questions that is not taken over
    for name, (key, value) in SWITCHES.items():
        differs = value != _here(key, settings, algorithm)
        if name not in given and key not in plan.values and differs and _may_matter(_BY_NAME[name], given):
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


def _said(key: str, why: str) -> str:
    if key == "num_mini_batches":
        return f"--train_batch_size not given: OpenRLHF's default is 128 ({why})"
    [name, rest] = re.fullmatch(r"(--\w+)(.*)", why).groups()  # type: ignore[union-attr]
    return f"{name} not given: OpenRLHF's default{rest if rest[:1] in ',' or rest[:2] == ' +' else ' is' + rest}"
