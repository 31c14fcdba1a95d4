"""Servers that hold adapters of another run: refused while that run is under way, whoever sees it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from engines.test_vllm_server import adapters, ask, connect, model, policy, serve
from engines.vllm_stub import VllmStub

from emailrl.engines.vllm.servers import VllmServers
from emailrl.errors import UsageError

__all__ = ["adapters", "connect", "model", "policy", "serve"]  # fixtures

Serve, Connect = Callable[..., VllmStub], Callable[..., VllmServers]


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """A run under way."""
    lock = os.open(run / ".lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(lock)


@pytest.fixture
def versions(tmp_path: Path, adapters: list[Path]) -> Callable[[str], Path]:
    """The adapter of a run, by name."""

    def make(run: str) -> Path:
        return Path(shutil.copytree(adapters[0], tmp_path / run / "policy/v-000001"))

    return make


def test_a_server_of_a_run_under_way_is_refused_before_it_is_probed(
    serve: Serve, connect: Connect, versions: Callable[[str], Path], tmp_path: Path
) -> None:
    stub, mine = serve(), versions("mine")
    stub.adapters["emailrl-abcd-v-000001"] = versions("other")
    with locked(tmp_path / "other"), pytest.raises(UsageError, match="in use by another training run") as raised:
        connect(stub).load_adapter(mine, "v-000001")
    assert str(tmp_path / "other") in raised.value.message and "servers of its own" in raised.value.hint
    assert set(stub.calls) == {"/v1/models"}


def test_what_an_ended_run_left_there_is_no_obstacle(
    serve: Serve, connect: Connect, versions: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stub = serve()
    stub.adapters["emailrl-abcd-v-000001"] = versions("other")
    stub.adapters["emailrl-abcd-v-000002"] = Path("/no\0path")
    with closing(connect(stub)) as engine:
        engine.load_adapter(versions("mine"), "v-000001")
        assert len(ask(engine, 2)) == 2
    assert "another run" not in capsys.readouterr().err


def test_a_resumed_run_finds_its_own_adapters(
    serve: Serve, connect: Connect, versions: Callable[[str], Path], tmp_path: Path
) -> None:
    stub, mine = serve(), versions("mine")
    stub.adapters["emailrl-abcd-v-000001"] = mine  # of the process that was killed
    with locked(tmp_path / "mine"), closing(connect(stub)) as engine:
        engine.load_adapter(mine, "v-000001")


def test_a_run_on_another_host_is_reported(
    serve: Serve, connect: Connect, versions: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    stub = serve()
    stub.adapters["emailrl-abcd-v-000001"] = Path("/elsewhere/run/policy/v-000001")
    with closing(connect(stub)) as engine:
        engine.load_adapter(versions("mine"), "v-000001")
    said = capsys.readouterr().err
    assert said.count("holds adapters of another run, /elsewhere/run, which is not visible here.") == 1


def test_the_path_map_leads_back_to_the_run(
    serve: Serve, connect: Connect, versions: Callable[[str], Path], tmp_path: Path
) -> None:
    stub, mine = serve(), versions("mine")
    stub.adapters["emailrl-abcd-v-000001"] = Path("/mnt/outputs/other/policy/v-000001")
    versions("other")
    engine = connect(stub, vllm_adapter_path_map=f"{tmp_path}=/mnt/outputs")
    with locked(tmp_path / "other"), pytest.raises(UsageError, match="in use by another training run"):
        engine.load_adapter(mine, "v-000001")
