"""Prepares a checkpoint for other programs: the adapter as is, or merged weights, with tokenizer and card.

The folder is filled under a temporary name and renamed, so that it is complete or absent. ``export.json`` marks it as
an export, and only such a folder is ever replaced.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import emailrl
from emailrl.base.disk import check_place, share_files
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import first_line
from emailrl.checkpoints import METADATA, Checkpoint, confirmed_of, sha256_of, verify
from emailrl.measure.card import model_card
from emailrl.model.resolve import resolve_model

if TYPE_CHECKING:
    import torch

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

    from emailrl.model.lora import read_plain_lora
    from emailrl.model.shape import load_config
    from emailrl.model.tensors import writing_tensors

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
