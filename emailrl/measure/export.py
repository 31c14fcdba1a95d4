"""Prepares a checkpoint for other programs: the adapter as is, or merged weights, with tokenizer and card.

The folder is filled under a temporary name and renamed, so that it is complete or absent. ``export.json`` marks it as
an export, and only such a folder is ever replaced.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import emailrl
from emailrl.base.disk import check_own, check_place, share_files
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import first_line
from emailrl.checkpoints import METADATA, Checkpoint, Confirmed, Metadata, confirmed_of, sha256_of, verify
from emailrl.engines.vllm.arguments import LORA_RANKS
from emailrl.model.resolve import PACKAGED, resolve_model

if TYPE_CHECKING:
    import torch


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


Format = Literal["adapter", "merged"]

MARKER = "export.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
     "merges.txt", "tokenizer.model", "chat_template.jinja"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Export:
    """The files of an export."""

    out: Path
    format: Format
    checkpoint: Path
    base_model: str
    files: dict[str, str]
    """SHA-256 by name of every file except the marker."""


def export_checkpoint(checkpoint: Checkpoint, out: Path, *, format: Format, overwrite: bool = False) -> Export:
    """Write ``checkpoint`` to the folder ``out``, after checking its files against their recorded hashes.

    ``adapter`` copies adapter and tokenizer byte for byte; ``merged`` adds the adapter to its base in float32 and
    rounds once to the base's dtype. Raises UsageError if ``out`` is taken (``overwrite`` replaces only an earlier
    export), EmailRLError for a damaged checkpoint or a base that does not load.
    """
    verify(checkpoint)
    check_free(out, overwrite)
    incoming = out.with_name(f".{out.name}.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    try:
        fill: Callable[[Checkpoint, Path], None] = _copy_adapter if format == "adapter" else _write_merged
        fill(checkpoint, incoming)
        export = _finish(checkpoint, incoming, out, format)
        _put_in_place(incoming, out)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    return export


def check_free(out: Path, overwrite: bool) -> None:
    """Raise UsageError unless an export may be written to ``out``."""
    check_place(out, "--out")
    for beside in ("incoming", "outgoing"):
        check_own(out.with_name(f".{out.name}.{beside}"), "--out")
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file.", "Name another folder with --out.")
    if not any(out.iterdir()):
        return
    if not (out / MARKER).is_file():
        raise UsageError(f"{out} exists and is not an export.", "Name another folder with --out.")
    if not overwrite:
        raise UsageError(f"{out} exists.", "Name another folder with --out, or add --overwrite.")


def _copy_adapter(checkpoint: Checkpoint, folder: Path) -> None:
    from emailrl.model.lora import read_plain_lora
    from emailrl.model.shape import empty_model, load_config

    name = checkpoint.metadata.base_model
    try:
        base = _base_of(checkpoint)
    except EmailRLError:
        base = name  # a folder that is gone from this machine; its adapter can leave all the same
    read_plain_lora(checkpoint.path, empty_model(load_config(name, base)) if isinstance(base, Path) else None)
    _copy(checkpoint, ADAPTER_FILES, folder)
    if isinstance(base, Path) and (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", folder / "generation_config.json")


def _copy(checkpoint: Checkpoint, names: Iterable[str], folder: Path) -> None:
    """Copy files of the checkpoint; UsageError for one that is a link, as the export may be published."""
    for name in names:
        file = checkpoint.path / name
        if file.is_symlink():
            raise UsageError(f"{file} is a link to {os.readlink(file)}.", "Replace it by the file it stands for.")
        shutil.copyfile(file, folder / name)


def _base_of(checkpoint: Checkpoint) -> str | Path:
    """The place of the base model that the checkpoint's run was given."""
    given = (checkpoint.metadata.settings.get("model") or {}).get("smol_base")
    return resolve_model(checkpoint.metadata.base_model, Path(given) if given else None)


def _write_merged(checkpoint: Checkpoint, folder: Path) -> None:
    """Merge layer by layer, so that only one layer at a time is in float32."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from emailrl.model.lora import read_plain_lora, writing_tensors
    from emailrl.model.shape import load_config

    disable_progress_bar()  # a bar over tensors already on disk says nothing
    name = checkpoint.metadata.base_model
    path = _base_of(checkpoint)
    try:
        base = AutoModelForCausalLM.from_pretrained(
            path,
            config=load_config(name, path),
            dtype="auto",
            attn_implementation="eager",  # never the one that its config names: it may lie on the hub
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise EmailRLError(
            f"The base model '{name}' failed to load: {first_line(error)}", "Use --format adapter."
        ) from error
    if getattr(base, "quantization_method", None) is not None:
        raise UsageError(f"The base model '{name}' is quantized; merging would round twice.", "Use --format adapter.")
    read_plain_lora(checkpoint.path, base)
    try:
        model = PeftModel.from_pretrained(base, str(checkpoint.path))
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                layer = module.get_base_layer()
                dtype = cast("torch.dtype", layer.weight.dtype)
                layer.float()
                module.merge(safe_merge=True)
                layer.to(dtype)
    except (RuntimeError, ValueError) as error:
        raise EmailRLError(f"The adapter in {checkpoint.path} cannot be merged: {first_line(error)}") from error
    with writing_tensors(folder):
        model.unload().save_pretrained(folder)


def _finish(checkpoint: Checkpoint, folder: Path, out: Path, format: Format) -> Export:
    """Add tokenizer, metadata and card, then the marker with the hash of everything."""
    recorded = checkpoint.metadata.files or {file.name: "" for file in checkpoint.path.iterdir()}
    _copy(checkpoint, sorted(TOKENIZER_FILES & recorded.keys()), folder)
    # The hashes are those of this folder: it is a checkpoint in all but the trainer state, which stays at home.
    metadata = replace(checkpoint.metadata, files=_hashes(folder))
    (folder / METADATA).write_text(json.dumps(asdict(metadata), indent=2) + "\n", "utf-8")
    card = model_card(checkpoint.metadata, out.name, merged=format == "merged", confirmed=confirmed_of(checkpoint))
    (folder / "README.md").write_text(card, "utf-8")
    files = _hashes(folder)
    export = Export(out, format, checkpoint.path, checkpoint.metadata.base_model, files)
    marker = {
        "format": format,
        "run_id": checkpoint.metadata.run_id,
        "step": checkpoint.metadata.step,
        "emailrl": emailrl.__version__,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": files,
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", "utf-8")
    share_files(folder)
    return export


def _hashes(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of(file) for file in sorted(folder.iterdir())}


def _put_in_place(incoming: Path, out: Path) -> None:
    outgoing = out.with_name(f".{out.name}.outgoing")
    shutil.rmtree(outgoing, ignore_errors=True)
    if out.exists():
        out.rename(outgoing)
    incoming.rename(out)
    shutil.rmtree(outgoing, ignore_errors=True)
