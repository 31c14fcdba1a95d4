"""From flags to ``emailrl.toml``: the given flags, the complete objective, and comments for everything else.

OpenRLHF's defaults that are not part of the objective are comments: 1024 questions per step must not be set silently.
They are derived from the table's column as if they had been given.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pydantic import ValidationError

from emailrl.errors import UsageError
from emailrl.openrlhf.conversion import Conversion
from emailrl.openrlhf.flags import FLAGS, Flag, Given, parse
from emailrl.openrlhf.take import take_all
from emailrl.plain import one_line
from emailrl.settings import Settings, without_credentials
from emailrl.settings.names import by_name, leaves
from emailrl.training.algorithms import Algorithm
from emailrl.training.mix import resolve

Offers = dict[str, tuple[Any, str]]
"""Setting → OpenRLHF's default, and the comment after it."""

SWITCHES: Final = {
    "enable_prefix_caching": ("vllm_enable_prefix_caching", False),
    "vllm_enable_sleep": ("vllm_enable_sleep", "off"),
    "packing_samples": ("packing", False),
    "gradient_checkpointing": ("gradient_checkpointing", "off"),
    "use_wandb": ("wandb_mode", "disabled"),
    "enable_vllm_is_correction": ("importance_correction", "off"),
    "async_train": ("max_staleness", 0),
}
"""Flags off by default in OpenRLHF, and the setting that is on here."""
_UNLIKE: Final = frozenset(
    ("lora_rank", "max_len", "train_max_tokens_per_gpu", "actor_num_gpus_per_node", "input_key", "attn_implementation")
)
"""Refused here (no adapter), without effect unless another flag is given, or a matter of the machine or the files."""
_LITERAL: Final = re.compile(r"-?\d\S*( -?\d\S*)?|`[^`…]+`")
"""A default that is a literal value: not ``computed``, ``as training`` or an abbreviated path."""


def to_toml(text: str) -> str:
    """Convert an OpenRLHF command line into an ``emailrl.toml``.

    Raises UsageError for an unreadable line, an unknown flag, an invalid value, or a combination that cannot be trained
    here. Tokens are never written.
    """
    given = parse(text)
    taken = take_all(given)
    settings, algorithm = _check(taken)
    _add_notes(given, taken)
    _mask(taken)
    return _write(taken, _offers(given, taken, settings, algorithm))


def _add_notes(given: Given, taken: Conversion) -> None:
    """Note OpenRLHF's defaults that no setting can express."""
    if "lora_rank" not in given:
        taken.notes.append("--lora_rank not given: OpenRLHF trains all weights; emailrl trains an adapter (lora_rank)")
    if taken.values.get("shard_offload") and "shard" not in taken.values:
        taken.notes.append(
            "shard_offload acts on a sharded base only: shard = auto shards one above 70 % of a GPU's memory, which"
            " needs vLLM servers (vllm_urls)"
        )
    if "max_steps" not in given:
        taken.notes.append("--max_steps not given: computed there from --num_episodes; here max_steps ends a run")


def _mask(taken: Conversion) -> None:
    """Remove credentials from URLs, and note it."""
    for key, value in taken.values.items():
        if isinstance(value, str) and "://" in value and (shown := without_credentials(value)) != value:
            taken.values[key] = shown
            taken.flags[key] += f"; credentials removed: set the full URL as {by_name()[key].env_names[0]}"


def _check(taken: Conversion) -> tuple[Settings, Algorithm]:
    """Validate a conversion and return its settings and algorithm.

    Raises UsageError for an invalid value, or a combination that cannot be trained.
    """
    tree: dict[str, dict[str, Any]] = {}
    for key, value in taken.values.items():
        leaf = by_name()[key]
        tree.setdefault(leaf.section, {})[leaf.field] = value
    if taken.values.get("max_staleness"):
        tree["vllm"].setdefault("vllm_urls", "http://to-be-set")  # checked as if the servers were listed
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
        "# Converted from an OpenRLHF command line by emailrl train --from-openrlhf.",
        "# Settings not listed keep emailrl's defaults; docs/openrlhf.md shows where OpenRLHF's differ.",
    ]
    lines += [f"# {one_line(note)}" for note in taken.notes]
    section = ""
    for leaf in leaves():
        if leaf.key not in taken.values and leaf.key not in offered:
            continue
        if leaf.section != section:
            section = leaf.section
            lines += ["", f"[{section}]"]
        if leaf.key in taken.values:
            lines.append(f"{leaf.key} = {_toml(taken.values[leaf.key])}  # {one_line(taken.flags[leaf.key])}")
        else:
            value, reason = offered[leaf.key]
            lines.append(f"# {leaf.key} = {_toml(value)}  # {one_line(reason)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # A JSON string is valid TOML except for DEL, which TOML requires escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


# -- OpenRLHF's defaults for flags not given, where emailrl's differ


def _offers(given: Given, taken: Conversion, settings: Settings, algorithm: Algorithm) -> Offers:
    """OpenRLHF's defaults for flags not given; settings with the same value here are omitted.

    ``taken``, ``settings`` and ``algorithm`` are the conversion of the flags given.
    """
    left_out = [flag for flag in FLAGS if flag.name not in given and _may_matter(flag, given)]
    theirs = {flag.name: flag.default.strip("`").split() for flag in left_out if _LITERAL.fullmatch(flag.default)}
    trial = take_all(theirs | given)
    found: Offers = {}
    for key, value in trial.values.items():
        if key not in taken.values and value != _here(key, settings, algorithm):
            found[key] = value, _reason(key, trial.flags[key])
    if "rollout_batch_size" not in given and "train_batch_size" in given:
        found.pop("num_mini_batches", None)  # only valid with OpenRLHF's questions per step, which is not adopted
    for name, (key, value) in SWITCHES.items():
        differs = value != _here(key, settings, algorithm)
        if name not in given and key not in taken.values and differs and _may_matter(_BY_NAME[name], given):
            found[key] = value, f"--{name} not given: off in OpenRLHF"
    if settings.vllm.max_staleness:
        found.pop("importance_correction", None)  # stale rollouts need it
    return found


_BY_NAME: Final = {flag.name: flag for flag in FLAGS}


def _may_matter(flag: Flag, given: Given) -> bool:
    """Whether the default of a flag not given matters: vLLM's flags only with vLLM."""
    is_idle = flag.group == "vLLM" and "vllm_num_engines" not in given
    return bool(flag.settings) and not is_idle and flag.name not in _UNLIKE


def _here(key: str, settings: Settings, algorithm: Algorithm) -> Any:
    """The effective value here; for an unset override, the algorithm's."""
    leaf = by_name()[key]
    value = getattr(getattr(settings, leaf.section), leaf.field)
    return getattr(algorithm, key, None) if value is None else value


def _reason(key: str, why: str) -> str:
    if key == "num_mini_batches":
        return f"--train_batch_size not given: OpenRLHF's default is 128 ({why})"
    [name, rest] = re.fullmatch(r"(--\w+)(.*)", why).groups()  # type: ignore[union-attr]
    return f"{name} not given: OpenRLHF's default{rest if rest[:1] in ',' or rest[:2] == ' +' else ' is' + rest}"
