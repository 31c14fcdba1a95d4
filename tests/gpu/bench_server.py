"""What one vLLM server samples per second, and the CPU time per token of its processes and of the client.

    PYTHONPATH=. python tests/gpu/bench_server.py --shape 4B --tokenizer qwen_tokenizer --folder W --out OUT
    PYTHONPATH=. python tests/gpu/bench_server.py --smoke       # nano on a CPU build of vLLM: figures mean little

Two servers on one GPU, measured in turn, never at the same time; one adapter with random weights; completions of
--tokens tokens to prompts of 256 tokens, eight per prompt, all at once:

    now      as `emailrl serve` starts it, asked as emailrl asks
    before   with a tokenizer and vLLM's statistics, and httpx keeps every connection open

First the check: one completion alone has the same tokens and log-probabilities on both. Then, for each number of
completions, the ways one after another. ``busy`` is a process's CPU seconds per second of wall time: the process that
is near 1 limits the server, except that the engine also spins while it waits for its GPU. ``ms/token`` is the wall time
per token of one completion, prefill included. Nothing starts after --seconds, vLLM's own start included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_async import environment
from bench_sampling import write_model
from random_adapter import write_adapter

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.vllm import servers as module
from emailrl.engines.vllm.serve import Server, running, server_command, server_environment, wait_until_well
from emailrl.model.resolve import resolve_model
from emailrl.settings import Settings, load_settings

PROMPT = 256
PER_PROMPT = 8
WAYS = ("now", "before")
TICK = os.sysconf("SC_CLK_TCK")
KEPT = module.KEPT
NO_PROBE: Any = SimpleNamespace(vocabulary=2**31, temperature=None)
UNKNOWN: Any = SimpleNamespace(adapter_sha256="")


def main() -> None:
    """Start the server, check, measure, print."""
    begun, given = time.monotonic(), arguments()
    work = (given.out or Path(tempfile.mkdtemp(prefix="bench_server."))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    gpus = [given.gpu] if given.gpu else []
    os.environ |= environment(given, gpus)
    if given.shape:
        write_model(given.shape, given.tokenizer.absolute(), Path(given.model), given.gpu)
    memory = {"vllm_gpu_memory_utilization": 0.3} if given.smoke else {"kv_cache_gib": given.kv_gib}
    flags = {"lora_rank": 16, "max_model_len": 2048, "max_batch_trajectories": max(given.rows)}
    settings = load_settings(
        {"model_name": given.model, "vllm_gpu_memory_utilization": 0.45, "vllm_enforce_eager": given.smoke}
        | flags | memory, environ={}, cwd=work,
    )  # fmt: skip
    servers = [
        Server(
            url_of(given, way),
            command(settings, given, way),
            server_environment(settings.vllm, gpus),
            work / f"{way}.log",
        )
        for way in WAYS
    ]
    with running(servers):
        write_adapter(resolve_model(given.model, None), work / "adapter")
        wait_until_well(servers, timeout=given.start, say=lambda line: print(line, flush=True))
        print(f"ready after {time.monotonic() - begun:.0f} s; work in {work}", flush=True)
        for server in servers:
            load(server.url, work / "adapter")
        check(given)
        rows = list(measured(given, begun, work / "bench_server.jsonl"))
    print(f"all done after {time.monotonic() - begun:.0f} s\n")
    table(rows)


def arguments() -> argparse.Namespace:
    """What was asked for; a rehearsal is small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["0.6B", "4B", "14B"], help="random weights; needs --tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer with a chat template")
    parser.add_argument("--folder", type=Path, help="where the shape's weights are, or are written")
    parser.add_argument("--rows", type=int, nargs="+", default=[96, 192, 384, 48], help="completions at once")
    parser.add_argument("--tokens", type=int, default=256, help="per completion")
    parser.add_argument("--kv-gib", type=float, default=32, help="GiB of keys and values per server")
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--port", type=int, default=8417)
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if "OUT" in os.environ else None)
    parser.add_argument("--start", type=float, default=200, help="seconds that vLLM may take to start")
    parser.add_argument("--seconds", type=float, default=235, help="for all of it")
    parser.add_argument("--smoke", action="store_true", help="nano on a CPU build, few tokens: figures mean little")
    given = parser.parse_args()
    given.smol_base = None
    if given.smoke:
        given.gpu, given.rows, given.tokens, given.seconds = "", [16, 48], 32, 600
    if given.shape and given.tokenizer is None:
        parser.error("--tokenizer is needed")
    given.model = str((given.folder or Path(tempfile.gettempdir())).absolute() / given.shape) if given.shape else "nano"
    return given


def url_of(given: argparse.Namespace, way: str) -> str:
    """A server's address."""
    return f"http://127.0.0.1:{given.port + WAYS.index(way)}"


def command(settings: Settings, given: argparse.Namespace, way: str) -> list[str]:
    """A server's command."""
    port = given.port + WAYS.index(way)
    words = server_command(settings, host="127.0.0.1", port=port, on_gpu=bool(given.gpu))
    dropped = () if way == "now" else ("--skip-tokenizer-init", "--disable-log-stats")
    return [word for word in words if word not in dropped]


def fleet_of(url: str, rows: int) -> module.VllmServers:
    """A server whose adapter is not proven, for so many completions at once."""
    given = {"engine": "vllm", "vllm_urls": url, "max_batch_trajectories": rows, "max_model_len": 2048}
    settings = load_settings(given | {"vllm_retries": 0}, environ={})
    found = module.VllmServers(settings.agent, settings.vllm, NO_PROBE, [])
    found.replicas[0].alive = True
    return found


def load(url: str, adapter: Path) -> None:
    """Load the adapter into a server."""
    one = fleet_of(url, 1)
    one.run(lambda client: one.replicas[0].load(client, "adapter", str(adapter)))


def sample(given: argparse.Namespace, way: str, requests: list[Request]) -> list[Completion]:
    """All completions, through emailrl's own client."""
    module.KEPT = None if way == "before" else KEPT  # type: ignore[assignment]
    version = module.Version("adapter", UNKNOWN, "adapter")
    pinned = module.PinnedVersion(fleet_of(url_of(given, way), len(requests)), version)
    completions = pinned.generate(requests)
    assert not any(completion.error for completion in completions), completions[0].error
    return completions


def requests_of(rows: int, tokens: int, seed: int, prompt: int = PROMPT) -> list[Request]:
    """Prompts of random ids, one per eight completions."""
    ids = random.Random(seed)
    prompts = [[ids.randrange(5, 1900) for _ in range(prompt)] for _ in range(-(-rows // PER_PROMPT))]
    return [Request(f"t{n}", SamplingParams(tokens), prompts[n // PER_PROMPT], seed=n) for n in range(rows)]


def check(given: argparse.Namespace) -> None:
    """One completion alone, either way."""
    one, other = (sample(given, way, requests_of(1, 64, 1, prompt=12))[0] for way in WAYS)
    equal = next((n for n, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), 64)
    gap = max((abs(a - b) for a, b in zip(one.logprobs[:equal], other.logprobs[:equal], strict=True)), default=0.0)
    print(f"check: {equal} of 64 tokens equal, log-probabilities within {gap:.2g}", flush=True)
    # On a GPU a sum's order may decide between near tokens.
    assert equal > (63 if given.smoke else 8) and gap < (1e-6 if given.smoke else 0.05), "the ways sample differently"


def measured(given: argparse.Namespace, begun: float, out: Path) -> Iterator[dict[str, Any]]:
    """A row for each number of completions and way."""
    found = {way: processes(given.port + WAYS.index(way)) for way in WAYS}
    for number, count in enumerate(given.rows):
        for way in WAYS:
            api, engine = found[way]
            sample(given, way, requests_of(count, 4, number + 2))  # kernels for so many rows
            if time.monotonic() - begun > given.seconds:
                print("time is up", flush=True)
                return
            before, start = [cpu(api), cpu(engine), time.process_time()], time.monotonic()
            done = sample(given, way, requests_of(count, given.tokens, number + 100))
            wall = time.monotonic() - start
            used = [b - a for a, b in zip(before, [cpu(api), cpu(engine), time.process_time()], strict=True)]
            tokens = sum(len(completion.token_ids) for completion in done)
            names = ("api", "engine", "client")
            costs = {f"{name}_us": 1e6 * each / tokens for name, each in zip(names, used, strict=True)}
            row = {"rows": count, "way": way, "tokens": tokens, "seconds": wall} | costs
            print(json.dumps(row), flush=True)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            yield row


def processes(port: int) -> tuple[list[int], list[int]]:
    """The API server of a port, and its engine with workers."""
    parents = {int(folder.name): int(fields(folder.name)[1]) for folder in Path("/proc").glob("[0-9]*")}
    for pid in below(os.getpid(), parents):
        api = parents[pid]
        words = Path(f"/proc/{api}/cmdline").read_bytes().split(b"\0")
        if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes() and str(port).encode() in words:
            return [api], [pid, *below(pid, parents)]
    raise AssertionError(f"no engine of the server at port {port}")


def below(top: int, parents: dict[int, int]) -> list[int]:
    """The descendants of a process."""
    children = [pid for pid, parent in parents.items() if parent == top]
    return children + [pid for child in children for pid in below(child, parents)]


def fields(pid: int | str) -> list[str]:
    """What /proc says of a process, after its name; zeros if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 13


def cpu(pids: list[int]) -> float:
    """CPU seconds of processes, all threads."""
    return sum(int(ticks) for pid in pids for ticks in fields(pid)[11:13]) / TICK


def table(rows: list[dict[str, Any]]) -> None:
    """Tokens per second and microseconds per token; ``busy`` in brackets."""
    print("| completions | way | tokens/s | ms/token | API server, µs (busy) | engine, µs (busy) | client, µs (busy) |")
    print("|---" * 7 + "|")
    for row in rows:
        rate = row["tokens"] / row["seconds"]
        costs = (
            f"{row[f'{name}_us']:.1f} ({row[f'{name}_us'] * rate / 1e6:.2f})" for name in ("api", "engine", "client")
        )
        print(f"| {row['rows']} | {row['way']} | {rate:,.0f} | {1e3 * row['rows'] / rate:.2f} | {' | '.join(costs)} |")


if __name__ == "__main__":
    main()
