"""``emailrl serve`` as real processes, with a stand-in for vLLM: flags, deaths, restarts, and that nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines.vllm.serve import Server, check_port, deal_gpus, find_gpus, server_environment, supervise
from emailrl.settings import load_settings

STAND_IN = Path(__file__).parent / "stand_in"
PACKAGE = Path(__file__).resolve().parents[2]


class Serving:
    """A running command, and what its servers printed."""

    def __init__(self, folder: Path, *arguments: str, environ: dict[str, str]) -> None:
        self.folder, self.port = folder, free_ports(2)
        command = [sys.executable, "-P", "-m", "emailrl", "serve", "--model", "nano", "--port", str(self.port)]
        environ = os.environ | {"PYTHONPATH": f"{STAND_IN}:{PACKAGE}"} | environ
        self.errors = (folder / "stderr").open("w+")
        out = {"stdout": subprocess.PIPE, "stderr": self.errors, "text": True}
        self.process = subprocess.Popen([*command, *arguments], cwd=folder, env=environ, **out)

    def ready(self) -> str:
        """What it prints once all are ready."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def starts(self) -> list[dict[str, Any]]:
        """What every server printed at each of its starts."""
        logs = sorted((self.folder / "outputs/servers").glob("vllm-*.log"))
        lines = [line for log in logs for line in log.read_text().splitlines()]
        return [json.loads(line.removeprefix("started ")) for line in lines if line.startswith("started ")]

    def said(self) -> str:
        return (self.folder / "stderr").read_text()


def free_ports(count: int) -> int:
    """The first of so many free neighbours."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
        try:
            for number in range(port, port + count):
                socket.create_server(("127.0.0.1", number)).close()
            return port
        except OSError:
            continue


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Serving]]:
    begun: list[Serving] = []

    def start(*arguments: str, **environ: str) -> Serving:
        begun.append(Serving(tmp_path, *arguments, environ=environ))
        return begun[-1]

    yield start
    for one in begun:
        one.process.kill()
        one.process.wait()
        one.errors.close()


def until(condition: Callable[[], Any], seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "in vain"
        time.sleep(0.05)
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(starts: list[dict[str, Any]]) -> bool:
    return not any(lives(one[name]) for one in starts for name in ("pid", "child"))


def test_each_replica_gets_its_own_gpus_and_room_for_the_versions_and_imports_nothing_from_the_working_folder(
    serving: Callable[..., Serving], tmp_path: Path
) -> None:
    for name in ("contextlib.py", "ctypes.py", "torch.py", "emailrl/__init__.py", "vllm/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("open('PWNED', 'w')\n")
    flags = "--replicas 2 --tensor-parallel 2 --gpus 4,5,6,7 --max-staleness 2 --json --lora-rank 12 -- --swap-space 1"
    environ = {"VLLM_ENGINE_ARGS": '{"kv_cache_dtype": "fp8"}', "KV_CACHE_GIB": "1.5", "LOAD_IN_4BIT": "true"}
    command = serving(*flags.split(), **environ)
    result = json.loads(command.ready())
    assert not (tmp_path / "PWNED").exists()
    assert result["vllm_urls"] == f"http://127.0.0.1:{command.port},http://127.0.0.1:{command.port + 1}"
    assert [Path(log).name for log in result["logs"]] == [f"vllm-{command.port + n}.log" for n in (0, 1)]
    starts = command.starts()
    assert [one["CUDA_VISIBLE_DEVICES"] for one in starts] == ["4,5", "6,7"]
    for one in starts:
        flags = dict(zip(one["flags"], one["flags"][1:], strict=False))
        assert one["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True" and "--enable-lora" in flags
        assert {"--skip-tokenizer-init", "--disable-log-stats", "--disable-uvicorn-access-log"} <= set(flags)
        assert (flags["--max-loras"], flags["--max-cpu-loras"]) == ("4", "5")  # MAX_STALENESS + 2, and one on its way
        assert flags["--max-num-seqs"] == "256"
        assert (flags["--max-lora-rank"], flags["--tensor-parallel-size"]) == ("16", "2")
        assert flags["--logprobs-mode"] == "processed_logprobs" and flags["--swap-space"] == "1"
        assert flags["--kv-cache-memory-bytes"] == "1610612736"  # 1.5 · 2^30
        assert flags["--kv-cache-dtype"] == "fp8" and "--no-enable-chunked-prefill" not in flags
        assert flags["--quantization"] == "bitsandbytes"  # the trainer's base, or the probe would fail
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(300) == 130
    assert all_gone(starts)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("flags", [(), ("--stubborn", "--leaves-group")])
def test_no_server_outlives_the_command(
    serving: Callable[..., Serving], number: signal.Signals, flags: tuple[str, ...]
) -> None:
    """A server that ignores SIGTERM, and its child in another session, too."""
    command = serving("--replicas", "2", "--gpus", "", "--", *flags)
    assert command.ready().startswith(f"VLLM_URLS=http://127.0.0.1:{command.port},")
    starts = command.starts()
    assert len(starts) == 2 and all(lives(one["child"]) for one in starts)
    # On a CPU, vLLM dies on a seeded request whose prompt is read in parts.
    assert all("--no-enable-chunked-prefill" in one["flags"] for one in starts)
    assert not any("--kv-cache-memory-bytes" in one["flags"] for one in starts)
    command.process.send_signal(number)
    command.process.wait(300)
    until(lambda: all_gone(starts), 30)


def test_a_server_that_dies_is_restarted_and_one_that_keeps_dying_given_up(
    serving: Callable[..., Serving], tmp_path: Path
) -> None:
    marker = tmp_path / "die"
    command = serving("--max-restarts", "1", "--gpus", "", "--", "--die-when", str(marker))
    command.ready()
    marker.touch()
    first = until(lambda: len(command.starts()) > 1 and command.starts()[0])
    assert all_gone([first])  # the child that it left too, before the next start
    until(lambda: "is back" in command.said())
    assert "died (exit code 3: " in command.said() and "CUDA error: an illegal memory access" in command.said()
    assert "restart 1 of 1" in command.said()
    marker.touch()
    assert command.process.wait(300) == 1
    assert "will not be restarted again (--max-restarts 1)" in command.said()
    assert "error: No server is left." in command.said() and all_gone(command.starts())


def test_a_server_that_does_not_start_ends_the_command_with_its_last_words(serving: Callable[..., Serving]) -> None:
    command = serving("--replicas", "2", "--gpus", "", "--", "--broken")
    assert command.process.wait(300) == 1
    assert "did not start (exit code 1: " in command.said() and "ValueError: there is no such model" in command.said()
    assert all_gone(command.starts())


VLLM_LOG = [
    "(EngineCore pid=71) ERROR 11-22 20:11:12 [core.py:843] Traceback (most recent call last):",
    "(EngineCore pid=71) ERROR 11-22 20:11:12 [core.py:843] ValueError: Free memory on device (10/80 GiB) on startup is"
    " less than desired GPU memory utilization (0.9, 72 GiB).",
    *['  File "api_server.py", line 1268, in launch_core_engines'] * 200,
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]


def test_the_cause_is_told_that_a_long_traceback_follows(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[1]); raise SystemExit(1)", "\n".join(VLLM_LOG)]
    server = Server("http://127.0.0.1:1", command, dict(os.environ) | {"PYTHONPATH": str(PACKAGE)}, tmp_path / "log")
    with pytest.raises(EmailRLError) as raised:
        supervise([server], restarts=0, timeout=30, say=print, ready=pytest.fail)  # type: ignore[arg-type]
    assert "(exit code 1: ValueError: Free memory on device (10/80 GiB) on startup is less" in raised.value.message
    assert raised.value.hint.startswith("Lower --gpu-memory-utilization, or free memory. The whole log: ")


def test_gpus_are_dealt_out_or_found_too_few() -> None:
    assert find_gpus("0, 3") == ["0", "3"] and find_gpus(None, {"CUDA_VISIBLE_DEVICES": "2,1"}) == ["2", "1"]
    assert deal_gpus(["0", "3", "4", "5"], 2, 2) == [["0", "3"], ["4", "5"]]
    assert deal_gpus([], 3, 2) == [[], [], []]
    with pytest.raises(UsageError, match="2 replicas on 2 GPUs each need 4, and there are 3"):
        deal_gpus(["0", "1", "2"], 2, 2)


def test_a_port_in_use_and_a_missing_vllm_are_told_at_once(serving: Callable[..., Serving], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = serving("--port", str(taken.getsockname()[1]))
        assert command.process.wait(300) == 2
        assert f"Port {taken.getsockname()[1]} on 127.0.0.1 cannot be used: Address already in use." in command.said()
    command = serving(PYTHONPATH=str(PACKAGE))
    assert command.process.wait(300) == 2 and "pip install 'vllm<0.32,>=0.26'" in command.said()


@pytest.mark.parametrize(
    ("host", "port", "message", "hint"),
    [
        ("127.0.0.1", 65536, "would go up to 65536; the last one is 65535", "--port"),
        ("", 8000, "--host '' is not an address: ", "127.0.0.1"),
        ("[::1]", 8000, "--host '[::1]' is not an address: ", "::1"),
        ("a" * 64 + ".b", 8000, "is not an address: ", "127.0.0.1"),
        ("192.0.2.1", 8000, "Port 8000 on 192.0.2.1 cannot be used: ", "--host"),  # kept for documents, so never here
    ],
)
def test_an_address_to_listen_on_that_does_not_exist(host: str, port: int, message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        check_port(host, port)
    assert hint in raised.value.hint


def test_servers_open_to_others_without_a_key_are_warned_of_and_a_key_must_be_one(
    serving: Callable[..., Serving], tmp_path: Path
) -> None:
    settings = load_settings({"vllm_api_key": "two words"}, environ={}, cwd=tmp_path)
    with pytest.raises(UsageError, match="VLLM_API_KEY is not a valid key"):
        server_environment(settings.vllm, [])
    command = serving("--host", "0.0.0.0", "--gpus", "")
    until(lambda: "Note: anyone who can reach 0.0.0.0 can load adapters" in command.said())
    command = serving("--host", "0.0.0.0", "--gpus", "", VLLM_API_KEY="secret")
    until(lambda: "Starting 1 vLLM server" in command.said())
    assert "Note:" not in command.said() and "secret" not in command.said()
