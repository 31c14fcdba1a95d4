"""Checks once whether the Hugging Face Hub is reachable and has a model, as its library would retry for minutes; and
uploads what ``export`` wrote."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final, Literal
from urllib.parse import urlsplit

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import first_line, tell

CONNECT_SECONDS: Final = 5  # timeout per address family; a firewall that drops packets gives no answer at all
DECIDE_SECONDS: Final = 2 * CONNECT_SECONDS
"""Timeout of the whole check; a resolver without a network may take a minute."""
_DECIDED_BY: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_READ_AT_IMPORT: Final = ("huggingface_hub.constants", "datasets.config")


def go_offline_if_unreachable() -> None:
    """Switch the hub's libraries to their local caches if the hub cannot be reached. ``HF_HUB_OFFLINE`` (1 or 0)
    overrides the check, which is skipped behind a proxy."""
    if any(os.environ.get(name) for name in _DECIDED_BY):
        return
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    answers: SimpleQueue[bool] = SimpleQueue()
    Thread(target=lambda: answers.put(_answers(host, port)), daemon=True).start()  # getaddrinfo has no timeout
    with suppress(Empty):
        if answers.get(timeout=DECIDE_SECONDS):
            return
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in _READ_AT_IMPORT:
        if (module := sys.modules.get(name)) is not None:
            module.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def _answers(host: str, port: int) -> bool:
    """Whether one address of each family, tried in turn, accepts a connection."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    first_of_family = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    for address in reversed(first_of_family.values()):
        with suppress(OSError), socket.create_connection((address, port), timeout=CONNECT_SECONDS):
            return True
    return False


def check_hub(name: str) -> None:
    """Ask the hub once for the model; the libraries' own calls would retry for half a minute without a network.
    UsageError for a name the hub does not know, EmailRLError if it cannot be reached or requires a license."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=10)
    except GatedRepoError as error:
        hint = "Accept its license on the hub page, then run `hf auth login`."
        raise EmailRLError(f"The model '{name}' is gated.", hint) from error
    except RepositoryNotFoundError as error:
        raise UsageError(f"The hub has no model '{name}'.", "Use nano, a folder, or another hub name.") from error
    except (OSError, httpx.HTTPError, HfHubHTTPError, OfflineModeIsEnabled) as error:
        what = f"The model '{name}' is not on this machine, and the hub cannot be reached."
        hint = "Use --model nano or a folder with the model, or copy a hub cache here (HF_HUB_CACHE)."
        raise EmailRLError(what, hint) from error


def push_folder(folder: Path, name: str, kind: Literal["model", "dataset"]) -> str:
    """Upload a folder to a repository of the hub, private if it is new; returns its address. EmailRLError if the hub
    cannot be reached, or refuses the name or the login."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        repository = HfApi().create_repo(name, repo_type=kind, private=True, exist_ok=True)
        tell(f"Uploading {folder} to {repository}")
        message = "Upload by emailrl export"
        HfApi().upload_folder(
            repo_id=repository.repo_id, folder_path=folder, repo_type=kind, commit_message=message, delete_patterns="*"
        )
    except (OSError, ValueError, httpx.HTTPError, HfHubHTTPError, OfflineModeIsEnabled) as error:
        hint = (
            "Log in with `hf auth login` as one who may write there; the folder is complete: hf upload does the rest."
        )
        raise EmailRLError(f"{folder} was not pushed to {name}: {first_line(error)}", hint) from error
    return str(repository)
