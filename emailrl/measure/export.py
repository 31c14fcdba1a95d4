"""Prepares a checkpoint for other programs: the adapter as is, or merged weights, with tokenizer and card. The folder
is filled under a temporary name and renamed, so that it is complete or absent. ``export.json`` marks it as an export,
and only such a folder is ever replaced."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import emailrl
from emailrl.base.disk import check_place, new_folder, share_files
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import first_line
from emailrl.checkpoints import METADATA, Checkpoint, Confirmed, Metadata, confirmed_of, sha256_of, verify
from emailrl.engines.vllm.arguments import LORA_RANKS
from emailrl.model.resolve import PACKAGED, resolve_model
from emailrl.records.trajectory import Scenario
from emailrl.settings.names import by_name
from emailrl.settings.tree import PLAYED_WITH

_HERE = Path(__file__).parent
_SHOWN = {
    "training": ("learning_rate", "num_generations", "per_device_train_batch_size", "max_steps", "seed"),
    "algorithm": ("beta", "min_group_std"),
    "agent": ("environment", "max_turns", "max_tokens", "temperature", "eval_temperature"),
    "rewards": ("reward", "judge"),
}
"""Settings shown in the card; metadata.json has all of them."""


def model_card(metadata: Metadata, folder: str, *, format: Format, confirmed: Confirmed | None = None) -> str:
    """Return the card: description, results, training, and how to load and serve the model. ``confirmed`` is the
    accuracy on questions that did not select the checkpoint; it comes first."""

    def accuracy(shares: Mapping[str, Any]) -> str:
        low, high = shares.get("accuracy_low"), shares.get("accuracy_high")
        interval = "" if low is None or high is None else f" (95% interval {low:.1%} to {high:.1%})"
        return f"{shares['accuracy']:.1%}{interval}"

    metrics, base, recorded = metadata.metrics, metadata.base_model, ""
    if metrics.get("accuracy") is not None:
        recorded = accuracy(metrics)
        if metrics.get("num_questions") is not None:
            recorded += f" on {metrics['num_questions']} validation questions"
        if metrics.get("evaluated_step") not in (None, metadata.step):
            recorded += f", measured at step {metrics['evaluated_step']}"
        if metrics.get("reward") is not None:
            recorded += f", mean reward {metrics['reward']:.3f}"
    rows = [("LoRA " + name.replace("_", " "), value) for name, value in metadata.lora.items()]
    for section, names in _SHOWN.items():
        values: dict[str, Any] = metadata.settings.get(section) or {}
        rows += [(name, values[name]) for name in names if values.get(name) is not None]
    agent = metadata.settings.get("agent") or {}
    leaves = map(by_name().__getitem__, PLAYED_WITH)
    values = {leaf.key: (metadata.settings.get(leaf.section, {}).get(leaf.field), leaf.default) for leaf in leaves}
    played = {name: value for name, (value, usual) in values.items() if value not in (None, usual)}
    temperature, rank = agent.get("eval_temperature"), int(metadata.lora.get("rank") or 16)
    return template_in(_HERE / "card.md.jinja", accuracy=accuracy).render(
        asdict(metadata),
        base=base,
        folder=folder,
        format=format,
        merged=format in ("merged", "gguf"),
        is_on_hub="/" in base and not base.startswith("/"),
        is_packaged=base in PACKAGED,
        untrained=metadata.untrained,
        recorded=recorded,
        confirmed=confirmed and asdict(confirmed),
        played=played,
        rows=[(name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else value) for name, value in rows],
        config={"db": "mail.db"}
        | {name: agent[name] for name in ("max_turns", "max_tokens") if name in agent}
        | played,
        max_rank=next((size for size in LORA_RANKS if size >= rank), rank),
        temperature=None if temperature is None else f"{temperature:g}",
    )


def template_in(path: Path, **filters: Callable[[Any], str]) -> Any:
    """The Jinja template in a file, with the filters ``json`` and ``quote`` (for a shell)."""
    from jinja2 import Environment, StrictUndefined

    trims: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(undefined=StrictUndefined, **trims)
    environment.filters |= {"json": json.dumps, "quote": shlex.quote, **filters}
    return environment.from_string(path.read_text("utf-8"))


Format = Literal["adapter", "merged", "gguf", "gguf-lora"]

MARKER = "export.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
     "merges.txt", "tokenizer.model", "chat_template.jinja"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Export:
    out: Path
    format: Format
    checkpoint: Path
    base_model: str
    files: dict[str, str]  # SHA-256 by name of every file except the marker.


def export_checkpoint(checkpoint: Checkpoint, out: Path, *, format: Format, overwrite: bool = False) -> Export:
    """Write ``checkpoint`` to the folder ``out``, after checking its files against their recorded hashes. ``adapter``
    copies adapter and tokenizer byte for byte; ``merged`` adds the adapter to its base in float32 and rounds once to
    the base's dtype; ``gguf`` and ``gguf-lora`` are these two for llama.cpp. Raises UsageError if ``out`` is taken
    (``overwrite`` replaces only an earlier export) or a format cannot hold the model, EmailRLError for a damaged
    checkpoint or a base that does not load."""
    verify(checkpoint)
    metadata = checkpoint.metadata
    with _replacing(out, format, overwrite) as folder:
        _WRITERS[format](checkpoint, folder)
        if format in ("adapter", "merged"):  # GGUF has the tokenizer in it
            home = _tokenizer_home(checkpoint)
            recorded = (metadata.files if home == checkpoint.path else None) or os.listdir(home)
            _copy(home, sorted(TOKENIZER_FILES.intersection(recorded)), folder)
        # The hashes are those of this folder: it is a checkpoint in all but the trainer state, which stays at home.
        own = replace(metadata, files=_hashes(folder))
        (folder / METADATA).write_text(json.dumps(asdict(own), indent=2) + "\n", "utf-8")
        card = model_card(metadata, out.name, format=format, confirmed=confirmed_of(checkpoint))
        (folder / "README.md").write_text(card, "utf-8")
        files = _hashes(folder)
    return Export(out, format, checkpoint.path, metadata.base_model, files)


def export_questions(scenarios: Sequence[Scenario], out: Path, *, overwrite: bool = False) -> dict[str, int]:
    """Write questions to the folder ``out`` as a dataset of the hub, a Parquet file a split and a card, which
    ``read_questions`` reads back; returns their number by split. Raises UsageError as ``export_checkpoint``."""
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([asdict(each) for each in scenarios])  # whole, so that splits have equal types
    splits = [(each.split or "test").replace("val", "validation") for each in scenarios]
    counts = dict(Counter(splits))
    with _replacing(out, "questions", overwrite) as folder:
        for split in counts:
            rows = [number for number, name in enumerate(splits) if name == split]
            parquet.write_table(table.take(rows), folder / f"{split}.parquet")
        num_inboxes = len({each.inbox_address for each in scenarios})
        card = template_in(_HERE / "questions.md.jinja").render(counts=counts, num_inboxes=num_inboxes)
        (folder / "README.md").write_text(card, "utf-8")
    return counts


@contextmanager
def _replacing(out: Path, format: str, overwrite: bool) -> Iterator[Path]:
    """A folder to fill in the block, which then becomes ``out``, marked as an export; an earlier one goes."""
    check_free(out, overwrite)
    with new_folder(out, replaces=True) as incoming:
        yield incoming
        marker = {"format": format, "emailrl": emailrl.__version__, "files": _hashes(incoming)}
        marker["created_at"] = datetime.now(UTC).isoformat(timespec="seconds")
        (incoming / MARKER).write_text(json.dumps(marker, indent=2) + "\n", "utf-8")
        share_files(incoming)


def check_free(out: Path, overwrite: bool) -> None:
    """Raise UsageError unless an export may be written to ``out``."""
    check_place(out, "--out")
    if not (place := next(each for each in (out, *out.parents) if each.exists())).is_dir():
        raise UsageError(f"{place} is a file.", "Name another folder with --out.")
    if out.exists() and any(out.iterdir()):
        if not (out / MARKER).is_file():
            raise UsageError(f"{out} exists and is not an export.", "Name another folder with --out.")
        if not overwrite:
            raise UsageError(f"{out} exists.", "Name another folder with --out, or add --overwrite.")


def _copy_adapter(checkpoint: Checkpoint, folder: Path) -> None:
    from emailrl.model.lora import read_plain_lora
    from emailrl.model.shape import empty_model, load_config

    base: str | Path = (name := checkpoint.metadata.base_model)
    with suppress(EmailRLError):  # of a folder that is gone from this machine; its adapter can leave all the same
        base = _base_of(checkpoint)
    read_plain_lora(checkpoint.path, empty_model(load_config(name, base)) if isinstance(base, Path) else None)
    _copy(checkpoint.path, ADAPTER_FILES, folder)
    if isinstance(base, Path) and (base / "generation_config.json").is_file():
        shutil.copyfile(base / "generation_config.json", folder / "generation_config.json")


def _copy(home: Path, names: Iterable[str], folder: Path) -> None:
    """Copy files; UsageError for one that is a link, as the export may be published."""
    for name in names:
        file = home / name
        if file.is_symlink():
            raise UsageError(f"{file} is a link to {os.readlink(file)}.", "Replace it by the file it stands for.")
        shutil.copyfile(file, folder / name)


def _base_of(checkpoint: Checkpoint) -> str | Path:
    """The place of the base model that the checkpoint's run was given."""
    given = (checkpoint.metadata.settings.get("model") or {}).get("smol_base")
    return resolve_model(checkpoint.metadata.base_model, Path(given) if given else None)


def _tokenizer_home(checkpoint: Checkpoint) -> Path:
    """The folder with its tokenizer: its own, but ``smol`` has its base's."""
    return checkpoint.path if (checkpoint.path / "tokenizer_config.json").is_file() else Path(_base_of(checkpoint))


def _write_merged(checkpoint: Checkpoint, folder: Path) -> None:
    from emailrl.model.lora import writing_tensors

    model = _merged(checkpoint)
    with writing_tensors(folder):
        model.save_pretrained(folder)


def _write_gguf(checkpoint: Checkpoint, folder: Path, *, is_adapter: bool = False) -> None:
    from transformers import AutoTokenizer

    from emailrl.measure.gguf import check_gguf, write_adapter, write_model
    from emailrl.model.lora import read_plain_lora
    from emailrl.model.shape import empty_model, load_config

    config, name = load_config(checkpoint.metadata.base_model, _base_of(checkpoint)), checkpoint.metadata.run_id
    tokenizer = AutoTokenizer.from_pretrained(_tokenizer_home(checkpoint), trust_remote_code=False)
    check_gguf(config, tokenizer)  # before the weights are loaded
    if is_adapter:
        write_adapter(read_plain_lora(checkpoint.path, empty_model(config)), config, folder / "adapter.gguf", name)
        return
    write_model(_merged(checkpoint), tokenizer, folder / "model.gguf", name)
    (folder / "Modelfile").write_text(template_in(_HERE / "modelfile.jinja").render(), "utf-8")


def _merged(checkpoint: Checkpoint) -> Any:
    """The base model with the adapter merged, layer by layer, so that only one layer at a time is in float32."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.utils.logging import disable_progress_bar

    from emailrl.model.lora import read_plain_lora
    from emailrl.model.shape import auto_class, load_config

    disable_progress_bar()  # a bar over tensors already on disk says nothing
    name = checkpoint.metadata.base_model
    path, hint = _base_of(checkpoint), "Use --format adapter."
    # Never the attention that its config names: it may lie on the hub.
    options: dict[str, Any] = {"attn_implementation": "eager", "trust_remote_code": False, "use_safetensors": True}
    try:
        config = load_config(name, path)
        base = auto_class(config).from_pretrained(path, config=config, dtype="auto", **options)
    except (OSError, ValueError, KeyError) as error:
        raise EmailRLError(f"The base model '{name}' failed to load: {first_line(error)}", hint) from error
    if getattr(base, "quantization_method", None) is not None:
        raise UsageError(f"The base model '{name}' is quantized; merging would round twice.", hint)
    read_plain_lora(checkpoint.path, base)
    try:
        model = PeftModel.from_pretrained(base, str(checkpoint.path))
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                layer = module.get_base_layer()
                dtype: Any = layer.weight.dtype
                layer.float()
                module.merge(safe_merge=True)
                layer.to(dtype)
    except (RuntimeError, ValueError) as error:
        raise EmailRLError(f"The adapter in {checkpoint.path} cannot be merged: {first_line(error)}") from error
    return model.unload()


_WRITERS: Final[dict[str, Callable[[Checkpoint, Path], None]]] = {
    "adapter": _copy_adapter, "merged": _write_merged,
    "gguf": _write_gguf, "gguf-lora": partial(_write_gguf, is_adapter=True),
}  # fmt: skip


def _hashes(folder: Path) -> dict[str, str]:
    return {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
