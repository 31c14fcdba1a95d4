"""Without a network the hub's libraries go offline at once; with one they are left as they are."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from emailrl.base.hub import DECIDE_SECONDS, go_offline_if_unreachable


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on a user's machine: no variable decides, and the library has been imported already."""
    import huggingface_hub  # noqa: F401

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return monkeypatch


def is_offline() -> bool:
    from huggingface_hub import is_offline_mode

    assert is_offline_mode() == (os.environ["HF_HUB_OFFLINE"] == "1")
    return is_offline_mode()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_an_endpoint_that_answers_changes_nothing_and_one_that_refuses_means_offline(
    online: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        online.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        go_offline_if_unreachable()
    assert not is_offline()
    online.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    go_offline_if_unreachable()
    assert is_offline()


def test_a_resolver_that_hangs_means_offline_in_time(online: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(*address: object, **options: object) -> None:
        over.wait(300)
        raise socket.gaierror("no network in this test")

    online.setattr(socket, "getaddrinfo", hang)
    online.setattr("emailrl.base.hub.DECIDE_SECONDS", 0.2)
    started = time.monotonic()
    go_offline_if_unreachable()
    over.set()
    assert is_offline() and time.monotonic() - started < 120 and DECIDE_SECONDS <= 10


def test_a_cached_model_loads_without_a_network_and_without_retries(tmp_path: Path) -> None:
    """The library asks for ``adapter_config.json`` five times, over half a minute, unless it is told to be offline."""
    from emailrl.model.resolve import NANO_DIR

    snapshot = tmp_path / "models--some--model" / "snapshots" / ("a" * 40)
    shutil.copytree(NANO_DIR, snapshot, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("a" * 40)
    environment = os.environ | {
        "HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{closed_port()}", "HF_HUB_OFFLINE": "",
    }  # fmt: skip
    script = (
        "import time, transformers\nfrom emailrl.model.shape import load_config\nslept = []\n"
        "time.sleep = slept.append\n"
        "print(load_config('some/model', 'some/model').hidden_size, sum(slept))"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Retry" not in done.stderr, done.stderr
    assert float(done.stdout.split()[1]) < 1
