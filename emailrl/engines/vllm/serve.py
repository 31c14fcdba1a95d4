"""``emailrl serve``: vLLM servers as supervised child processes, one per replica, none left behind. Flags, environment
and GPUs of each server; its start, health checks, end and cause of death; and restarts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx

from emailrl.base.credentials import check_key
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.install import need
from emailrl.base.plain import counted, cut, one_line
from emailrl.engines.budget import rows_per_server, server_share
from emailrl.engines.vllm.arguments import api_key, as_flags, lora_rank_limit, shared_arguments
from emailrl.model.layout import dtype_name
from emailrl.model.resolve import base_name, resolve_model
from emailrl.settings import PolicySettings, VllmSettings

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
GRACE = 5.0  # seconds from SIGTERM to SIGKILL
HEALTH_TIMEOUT = 10.0  # of a health check, in seconds
MISSED = 3  # consecutive failed health checks after which a server counts as hung
PAUSE = 1.0  # seconds between health checks
PROGRESS_SECONDS = 15.0
LAST_PORT = 65535
TOLD = 300  # characters of the log quoted when a server dies
READ = 1 << 17  # bytes of the log's end searched for the error, after which vLLM prints long tracebacks
_CAUSE: Final = re.compile(r"(?:^|[ )])([\w.]*(?:Error|Exception): (?!.*See (?:root cause|stack trace)).+)")
"""An error in a traceback, but not vLLM's line that only refers to another."""

Say = Callable[[str], None]


def server_command(
    settings: PolicySettings, *, host: str, port: int, on_gpu: bool, extra: Sequence[str] = ()
) -> list[str]:
    """The command of one server, with room for the adapters of MAX_STALENESS + 2 versions; ``extra`` flags come last.
    Raises as ``resolve_model`` does, EmailRLError if vLLM is not installed."""
    need("vllm", "emailrl serve")
    vllm, model = settings.vllm, settings.model
    adapters = vllm.staleness(servers=True) + 2
    arguments = {
        "model": str(resolve_model(model.name, model.smol_base)),
        "served_model_name": base_name(model.name),
        "host": host,
        "port": port,
        "dtype": DTYPES[dtype_name(model.dtype, on_gpu=on_gpu)],
        "gpu_memory_utilization": server_share(vllm),
        "max_num_seqs": rows_per_server(settings.agent),
        "max_lora_rank": lora_rank_limit(settings.lora.lora_rank),
        "max_loras": adapters,
        "max_cpu_loras": adapters + 1,  # a new version is loaded before the oldest is unloaded
        "disable_uvicorn_access_log": True,  # a line per request and health check, in a log that is never cut
        "generation_config": "vllm",  # the model's own may limit completions to fewer tokens than asked for
    }
    flags = as_flags(arguments | shared_arguments(settings.agent, vllm, model, on_gpu=on_gpu))
    # As a module: the script of the CPU builds is broken.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *extra]


def server_environment(vllm: VllmSettings, gpus: Sequence[str]) -> dict[str, str]:
    """The environment of one server: only ``gpus`` are visible (none: a CPU build); the API key is not in its flags.
    Raises UsageError for a key that no request can carry."""
    environment = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1"} | os.environ
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if key := api_key(vllm):
        check_key("VLLM_API_KEY", key)
        environment["VLLM_API_KEY"] = key
    return environment | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def find_gpus(chosen: str | None, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs to use: those chosen, else CUDA_VISIBLE_DEVICES, else all; empty on a machine without GPUs."""
    named = chosen if chosen is not None else environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    return [str(number) for number, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]


def deal_gpus(gpus: Sequence[str], replicas: int, each: int) -> list[list[str]]:
    """Each replica's GPUs, consecutive ones; none on a machine without GPUs. UsageError if there are too few."""
    if gpus and len(gpus) < replicas * each:
        need = f"{replicas} replicas on {counted(each, 'GPU')} each need {replicas * each}"
        hint = "Lower --replicas or --tensor-parallel, or name more with --gpus."
        raise UsageError(f"{need}, and there {'is' if len(gpus) == 1 else 'are'} {len(gpus)}.", hint)
    return [list(gpus[number * each : (number + 1) * each]) for number in range(replicas)]


def check_port(host: str, port: int) -> None:
    """Raise UsageError for an address that is not this machine's, or a port that does not exist or is in use."""
    if port > LAST_PORT:
        raise UsageError(f"The servers' ports would go up to {port}; the last one is {LAST_PORT}.", "Lower --port.")
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host or "(empty)", port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: the name has a part of more than 63 characters
        hint = "Use 127.0.0.1, 0.0.0.0 (all addresses), or ::1 for IPv6."
        raise UsageError(f"--host {host!r} is not an address: {error}.", hint) from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            hint = "Choose another --port, or an address of this machine as --host."
            raise UsageError(f"Port {port} on {host} cannot be used: {error.strerror}.", hint) from None


class Server:
    """A server on its own port; ``log`` gets all its output, across restarts."""

    def __init__(self, url: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.url, self.command, self.environment, self.log = url, command, environment, log
        self.starts = 0
        self.was_well = False  # since its last start
        self._began = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._missed = self._log_start = 0

    def start(self) -> None:
        """Start it under a keeper, which stops it when this process ends."""
        self.starts, self.was_well, self._missed, self._began = self.starts + 1, False, 0, time.monotonic()
        with self.log.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "emailrl.engines.vllm.keeper", str(GRACE), *self.command],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=dict(self.environment),
                start_new_session=True,
            )  # fmt: skip

    def check(self) -> str | None:
        """Why it is dead or hung, None while starting or healthy; records when it becomes healthy."""
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            names = {128 + number: f"killed by {number.name}" for number in signal.Signals}
            names |= {-number: f"its keeper was killed by {number.name}" for number in signal.Signals}
            return f"{names.get(code, f'exit code {code}')}: {self._last_words()}"
        answers = False
        with suppress(httpx.HTTPError):
            # Every second: reading the certificates, which http does not use, takes ten times as long as the rest.
            reply = httpx.get(f"{self.url}/health", timeout=HEALTH_TIMEOUT, trust_env=False, verify=False)
            answers = reply.status_code == 200
        self._missed = 0 if answers or not self.was_well else self._missed + 1
        self.was_well = self.was_well or answers
        return None if self._missed < MISSED else f"it answered none of {MISSED} health checks: {self._last_words()}"

    @property
    def age(self) -> float:
        """Seconds since its last start."""
        return time.monotonic() - self._began

    def release(self) -> None:
        """Tell its keeper to stop it, without waiting."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Stop it and wait for its keeper."""
        self.release()
        if self._process is not None:
            self._process.wait()

    def _last_words(self) -> str:
        """The error that ended it, else the end of its output since its last start, on one line."""
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - READ))
            lines = log.read().decode(errors="replace").splitlines()
        if causes := [found[1] for line in lines if (found := _CAUSE.search(line))]:
            return cut(one_line(causes[-1]), TOLD)
        text = one_line(" | ".join(line.strip() for line in lines if line.strip()))
        return f"{'…' if len(text) > TOLD else ''}{text[-TOLD:]}" or "it printed nothing"


def supervise(
    servers: Sequence[Server], *, restarts: int, timeout: float, say: Say, ready: Callable[[float], None]
) -> None:
    """Start the servers, call ``ready`` with the seconds it took until all answer, and restart those that die or hang,
    each at most ``restarts`` times; all are stopped at the end. A server that is not healthy ``timeout`` seconds after
    its start counts as dead. EmailRLError, with the end of its log, for one that dies before all were ready, and
    if none is left."""
    alive, begun, told, are_ready = list(servers), time.monotonic(), time.monotonic(), False
    try:
        for server in servers:
            server.start()
        while alive:
            for server in list(alive):
                was_well, why = server.was_well, server.check()
                if why is None and not server.was_well and server.age > timeout:
                    why = f"it is not ready after {timeout:g} s; raise --start-timeout if it is only slow"
                if why is not None and not are_ready:
                    memory = "Lower --gpu-memory-utilization, or free memory. " * ("memory utilization" in why.lower())
                    hint = f"{memory}The whole log: {server.log}."
                    raise EmailRLError(f"{server.url} did not start ({why.rstrip('.')}).", hint)
                if why is not None:
                    server.end()
                    given_up = server.starts > restarts
                    then = f"it will not be restarted again (--max-restarts {restarts})"
                    say(f"{server.url} died ({why}); {then if given_up else f'restart {server.starts} of {restarts}'}.")
                    if given_up:
                        alive.remove(server)
                    else:
                        server.start()
                elif server.was_well and not was_well:
                    say(f"{server.url} is " + ("back." if are_ready else f"ready after {server.age:.0f} s."))
            well = sum(server.was_well for server in servers)
            if not are_ready and well == len(servers):
                are_ready = True
                ready(time.monotonic() - begun)
            elif not are_ready and time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                say(f"{well} of {len(servers)} servers are ready after {told - begun:.0f} s.")
            time.sleep(PAUSE)
        raise EmailRLError("No server is left.", f"The logs are in {servers[0].log.parent}.")
    finally:
        for server in servers:
            server.release()
        for server in servers:
            server.end()
