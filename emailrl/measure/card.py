"""The README of an exported model, filled from its checkpoint's metadata and its run's ``confirmed.json``."""

from __future__ import annotations

import json
import shlex
from typing import Any

from emailrl.checkpoints import Confirmed, Metadata
from emailrl.engines.vllm.arguments import LORA_RANKS
from emailrl.model.resolve import PACKAGED

_SHOWN = {
    "training": ("learning_rate", "num_generations", "per_device_train_batch_size", "max_steps", "seed"),
    "algorithm": ("beta", "min_group_std"),
    "agent": ("environment", "max_turns", "max_tokens", "temperature", "eval_temperature"),
    "rewards": ("reward", "judge"),
}
"""Settings shown in the card; metadata.json has all of them."""


def model_card(metadata: Metadata, folder: str, *, merged: bool, confirmed: Confirmed | None = None) -> str:
    """Return the card: description, results, training, and how to load and serve the model.

    ``confirmed`` is the accuracy on questions that did not select the checkpoint; it comes first.
    """
    parts = [
        _front_matter(metadata, merged),
        _introduction(metadata, merged),
        _results(metadata, confirmed),
        _training(metadata),
        _loading(metadata, folder, merged),
        _serving(metadata, folder, merged),
    ]
    return "\n".join(parts)


def _front_matter(metadata: Metadata, merged: bool) -> str:
    lines = ["---", f"library_name: {'transformers' if merged else 'peft'}", "pipeline_tag: text-generation"]
    if "/" in metadata.base_model and not metadata.base_model.startswith("/"):
        lines.append(f"base_model: {json.dumps(metadata.base_model)}")
    lines += ["tags:", "- emailrl", "- tool-use", f"- {json.dumps(metadata.algorithm)}", "---", ""]
    return "\n".join(lines)


def _introduction(metadata: Metadata, merged: bool) -> str:
    what = "The LoRA adapter is merged into the weights." if merged else "This is the LoRA adapter only."
    began = f", starting from the weights of {metadata.parent}" if metadata.parent else ""
    trained = f"{metadata.base_model}, trained with emailrl using {metadata.algorithm} in mode {metadata.mode}{began}"
    if metadata.untrained:
        trained = (
            f"{metadata.base_model}. **This checkpoint {metadata.untrained}**: no later evaluation of its "
            f"{metadata.algorithm} run in mode {metadata.mode} was more accurate"
        )
    return (
        f"# Mail-search agent, {metadata.run_id}, step {metadata.step}\n\n"
        f"A language model that answers questions by searching a mailbox with tools: {trained}. {what}\n"
    )


def _results(metadata: Metadata, confirmed: Confirmed | None) -> str:
    recorded = _recorded(metadata)
    if recorded is None:
        return "## Results\n\nNo evaluation was recorded with this checkpoint.\n"
    if confirmed is None:
        results = f"{recorded}. The checkpoint was selected on these questions."
    else:
        measured = _accuracy(confirmed.accuracy, confirmed.accuracy_low, confirmed.accuracy_high)
        results = (
            f"{measured} on {confirmed.num_questions} validation questions that were not used to select the "
            f"checkpoint.\n\nFor selection: {recorded[0].lower()}{recorded[1:]}. Such a figure is biased upwards: the "
            "checkpoint is the best of several on these questions."
        )
    return f"## Results\n\n{results} `emailrl benchmark` measures the checkpoint on the test split.\n"


def _recorded(metadata: Metadata) -> str | None:
    """The checkpoint's own metrics: those on the questions that selected it."""
    metrics = metadata.metrics
    if metrics.get("accuracy") is None:
        return None
    line = _accuracy(metrics["accuracy"], metrics.get("accuracy_low"), metrics.get("accuracy_high"))
    if metrics.get("num_questions") is not None:
        line += f" on {metrics['num_questions']} validation questions"
    if metrics.get("evaluated_step") not in (None, metadata.step):
        line += f", measured at step {metrics['evaluated_step']}"
    if metrics.get("reward") is not None:
        line += f", mean reward {metrics['reward']:.3f}"
    return line


def _accuracy(accuracy: float, low: float | None, high: float | None) -> str:
    interval = "" if low is None or high is None else f" (95% interval {low:.1%} to {high:.1%})"
    return f"Accuracy {accuracy:.1%}{interval}"


def _training(metadata: Metadata) -> str:
    rows = [("LoRA " + name.replace("_", " "), value) for name, value in metadata.lora.items()]
    for section, names in _SHOWN.items():
        values: dict[str, Any] = metadata.settings.get(section) or {}
        rows += [(name, values[name]) for name in names if values.get(name) is not None]
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows)
    return f"## Training\n\n| setting | value |\n|---|---|\n{table}\n\nAll other settings are in `metadata.json`.\n"


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _loading(metadata: Metadata, folder: str, merged: bool) -> str:
    here = json.dumps(folder)
    load = f"""model = AutoModelForCausalLM.from_pretrained({here}, dtype="auto")"""
    imports = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    note = ""
    if not merged:
        imports += "\nfrom peft import PeftModel"
        base = json.dumps(metadata.base_model)
        if metadata.base_model in PACKAGED:
            imports += "\nfrom emailrl.model.resolve import resolve_model"
            note = f"The base model {metadata.base_model} ships with emailrl.\n\n"
            base = f"resolve_model({base})"
        load = (
            f'base = AutoModelForCausalLM.from_pretrained({base}, dtype="auto")\n'
            f"model = PeftModel.from_pretrained(base, {here})"
        )
    agent = metadata.settings.get("agent") or {}
    limits = {name: agent[name] for name in ("max_turns", "max_tokens") if name in agent}
    config = json.dumps({"db": "mail.db"} | limits)
    return f"""## Load it

{note}```python
{imports}

{load}
tokenizer = AutoTokenizer.from_pretrained({here})

from emailrl import EmailAgent

agent = EmailAgent(model, tokenizer, {config})
print(agent.answer("When does the lease end?", inbox="ann@example.com").answer)
```
"""


def _serving(metadata: Metadata, folder: str, merged: bool) -> str:
    tools, here = "--enable-auto-tool-choice --tool-call-parser hermes", shlex.quote(folder)
    command = f"vllm serve {here} {tools}"
    if not merged:
        rank = int(metadata.lora.get("rank") or 16)
        limit = next((size for size in LORA_RANKS if size >= rank), rank)
        base = shlex.quote(metadata.base_model)
        if metadata.base_model in PACKAGED:
            base = f"$(python -c 'from emailrl.model.resolve import resolve_model; print(resolve_model(\"{base}\"))')"
        adapter = f"--enable-lora --max-lora-rank {limit} --lora-modules mail-agent={here}"
        command = f"vllm serve {base} \\\n  {adapter} \\\n  {tools}"
    temperature = (metadata.settings.get("agent") or {}).get("eval_temperature")
    decoding = (
        ""
        if temperature is None
        else f"\nIt was evaluated at temperature {temperature:g}; use the same when serving.\n"
    )
    return f"## Serve it\n\n```sh\n{command}\n```\n{decoding}"
