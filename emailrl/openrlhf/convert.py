"""From flags to ``emailrl.toml``: what was given, the objective in full, and in comments what has no line of its own.

A default that is not part of the objective is OpenRLHF's own in a comment: 1024 questions a step are no choice to make
for someone in silence.
"""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import ValidationError

from emailrl.errors import UsageError
from emailrl.openrlhf.flags import FLAGS, Flag
from emailrl.openrlhf.joint import JOINT, take_batches, take_objective
from emailrl.openrlhf.parse import Given, parse
from emailrl.openrlhf.special import SPECIAL, Plan
from emailrl.settings import Settings
from emailrl.settings.names import Leaf, by_name, leaves

OFFERED: Final = (
    ("rollout_batch_size", "per_device_train_batch_size", 1024),
    ("n_samples_per_prompt", "num_generations", 1),
    ("actor_learning_rate", "learning_rate", 1e-6),
    ("lr_scheduler", "lr_scheduler", "cosine"),
    ("min_lr_ratio", "min_lr_ratio", 0.1),
    ("lr_warmup_ratio", "warmup_ratio", 0.03),
    ("adam_betas", "adam_beta2", 0.95),
    ("generate_max_len", "max_tokens", 1024),
    ("temperature", "temperature", 1.0),
    ("lora_alpha", "lora_alpha", 16),
)
"""Flag, setting, OpenRLHF's default: said in a comment where the flag was not given."""


def to_toml(text: str) -> str:
    """The ``emailrl.toml`` that stands for a command line of OpenRLHF.

    Raises UsageError for a line that cannot be read, an unknown flag, a value no setting takes, or a mix that no
    training here can have. A token in it is never written.
    """
    given = parse(text)
    plan = Plan()
    for flag in FLAGS:
        if flag.name in given:
            _take(flag, given[flag.name], given, plan)
    take_batches(given, plan)
    take_objective(given, plan)
    _check(plan)
    return _write(plan, given)


def _take(flag: Flag, values: list[str], given: Given, plan: Plan) -> None:
    """One flag that was given: its settings, or a note of why it has none."""
    why = f"--{flag.name}"
    if not flag.is_built:
        plan.notes.append(f"{why}: not built yet ({flag.note})")
    elif not flag.settings:
        plan.notes.append(f"{why}: {flag.note}")
    elif flag.name in SPECIAL:
        try:
            SPECIAL[flag.name](values, given, plan)
        except ValueError:
            raise UsageError(f"{why}: not a number.", "See docs/openrlhf.md.") from None
    elif flag.name not in JOINT:
        for key, value in zip(flag.settings, values or ["true"], strict=True):
            plan.set(key, _value(by_name()[key], value, why), why)


def _value(leaf: Leaf, text: str, why: str) -> Any:
    """A value as its setting has it; what is wrong with a number or a choice, validation says."""
    try:
        if bool in leaf.kinds:
            return {"true": True, "false": False}[text.lower()]
        if int in leaf.kinds and float(text) == int(float(text)):
            return int(float(text))
        return float(text) if leaf.kinds & {int, float} else text
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"{why}: not a number.", "See docs/openrlhf.md.") from None


def _check(plan: Plan) -> None:
    """Raise UsageError for a value that its setting does not take, or a mix that cannot be trained."""
    from emailrl.training.algorithms import resolve

    tree: dict[str, dict[str, Any]] = {}
    for key, value in plan.values.items():
        leaf = by_name()[key]
        tree.setdefault(leaf.section, {})[leaf.field] = value
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        section, name = error.errors()[0]["loc"][:2]
        [leaf] = [leaf for leaf in leaves() if (leaf.section, leaf.field) == (section, name)]
        reason = error.errors()[0]["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise UsageError(f"{plan.flags[leaf.key]}: {leaf.key} should be {reason}.", "See docs/settings.md.") from None
    resolve(settings)


def _write(plan: Plan, given: Given) -> str:
    lines = [
        "# The equivalent of a command line of OpenRLHF, made by emailrl train --from-openrlhf.",
        "# What it does not name has emailrl's default; docs/openrlhf.md says where OpenRLHF's differ.",
    ]
    lines += [f"# {_comment(note)}" for note in plan.notes]
    offered = {key: (flag, value) for flag, key, value in OFFERED if flag not in given and key not in plan.values}
    section = ""
    for leaf in leaves():
        if leaf.key not in plan.values and leaf.key not in offered:
            continue
        if leaf.section != section:
            section = leaf.section
            lines += ["", f"[{section}]"]
        if leaf.key in plan.values:
            lines.append(f"{leaf.key} = {_toml(plan.values[leaf.key])}  # {_comment(plan.flags[leaf.key])}")
        else:
            flag, value = offered[leaf.key]
            lines.append(f"# {leaf.key} = {_toml(value)}  # --{flag} not given: OpenRLHF's default")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # A JSON string is a TOML one, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def _comment(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
