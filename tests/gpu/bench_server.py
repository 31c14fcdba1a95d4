"""What one vLLM server samples per second, and the CPU seconds per token of its processes and of the client.

    PYTHONPATH=. python tests/gpu/bench_server.py --shape 4B --tokenizer qwen_tokenizer --folder W --out OUT
    PYTHONPATH=. python tests/gpu/bench_server.py --smoke       # nano on a CPU build of vLLM: figures mean little

One server with the flags of `emailrl serve`, apart from --tokens-only, which leaves no /v1/completions; one adapter
with random weights; completions of --tokens tokens to prompts of 256 tokens, eight per prompt, all at once. Ways:

    now      as emailrl asks: /inference/v1/generate, without text
    route    /v1/completions, which also makes text of every token
    before   the same, and httpx keeps every connection open

First the check: one completion alone gives the same tokens and log-probabilities either way. Then, for each number of
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
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from bench_async import environment
from bench_grpo_trl import write_model

from emailrl.engines import vllm_fleet
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.replicas import Replica
from emailrl.engines.vllm_fleet import Fleet, Version
from emailrl.engines.vllm_play import Limits, Play
from emailrl.policy.resolve import resolve_model
from emailrl.serving.command import server_command, server_environment
from emailrl.serving.server import Server
from emailrl.serving.supervise import running, wait_until_well
from emailrl.settings import Settings, load_settings

PROMPT = 256
PER_PROMPT = 8
WAYS = ("now", "route", "before")
TICK = os.sysconf("SC_CLK_TCK")
KEPT = vllm_fleet.KEPT
NEW = ("detokenize", "output_kind")
"""Parameters that /v1/completions does not have."""
NO_PROBE: Any = SimpleNamespace(vocabulary=2**31)
UNKNOWN: Any = SimpleNamespace(adapter_sha256="")


class CompletionsReplica(Replica):
    """Asks at /v1/completions, and turns the answer into that of /inference/v1/generate."""

    async def complete(self, client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
        sampling = {name: value for name, value in body["sampling_params"].items() if name not in NEW}
        old = {"model": body["model"], "prompt": body["token_ids"], "return_token_ids": True}
        response = await self._send(client, "POST", "/v1/completions", sampling | old | {"skip_special_tokens": False})
        response.raise_for_status()
        answer = response.json()
        choice = answer["choices"][0]
        entries = [{"logprob": logprob} for logprob in choice["logprobs"]["token_logprobs"]]
        choice = {name: choice[name] for name in ("token_ids", "finish_reason")} | {"logprobs": {"content": entries}}
        answer = {"model": answer["model"], "choices": [choice], "usage": answer["usage"]}
        return httpx.Response(200, json=answer, request=response.request)


def main() -> None:
    """Start the server, check, measure, print."""
    begun, given = time.monotonic(), arguments()
    work = (given.out or Path(tempfile.mkdtemp(prefix="bench_server."))).absolute()
    work.mkdir(parents=True, exist_ok=True)
    gpus = [given.gpu] if given.gpu else []
    os.environ |= environment(given, gpus)
    if given.shape:
        write_model(given.shape, given.tokenizer.absolute(), Path(given.model), given.gpu)
    settings = load_settings(
        {"model_name": given.model, "lora_rank": 16, "max_model_len": 2048, "vllm_enforce_eager": given.smoke,
         "max_batch_trajectories": max(given.rows)}
        | ({"vllm_gpu_memory_utilization": 0.3} if given.smoke else {}),
        environ={}, cwd=work,
    )  # fmt: skip
    url = f"http://127.0.0.1:{given.port}"
    server = Server(url, command(settings, given, gpus), server_environment(settings, gpus), work / "server.log")
    with running([server]):
        write_adapter(resolve_model(given.model, None), work / "adapter")
        wait_until_well([server], timeout=given.start, say=lambda line: print(line, flush=True))
        print(f"ready after {time.monotonic() - begun:.0f} s; work in {work}", flush=True)
        fleet().run(lambda client: Replica(url).load(client, "adapter", str(work / "adapter")))
        check(url, given)
        rows = list(measured(url, given, begun, work / "bench_server.jsonl"))
    print(f"all done after {time.monotonic() - begun:.0f} s\n")
    table(rows)


def arguments() -> argparse.Namespace:
    """What was asked for; a rehearsal is small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["0.6B", "4B", "14B"], help="random weights; needs --tokenizer")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer with a chat template")
    parser.add_argument("--folder", type=Path, help="where the shape's weights are, or are written")
    parser.add_argument("--rows", type=int, nargs="+", default=[48, 96, 192, 384], help="completions at once")
    parser.add_argument("--tokens", type=int, default=256, help="per completion")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["now", "before"])
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


def command(settings: Settings, given: argparse.Namespace, gpus: list[str]) -> list[str]:
    """The server's command, with both ways of asking."""
    words = server_command(settings, host="127.0.0.1", port=given.port, on_gpu=bool(gpus))
    words.remove("--tokens-only")
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None
    routes = Path(vllm.origin).parent / "entrypoints/scale_out/factories.py"
    return words + (["--enable-scale-out"] if "enable_scale_out" in routes.read_text() else [])  # not in 0.26


def write_adapter(base: str, folder: Path) -> None:
    """An adapter of rank 16 with small random weights in every linear layer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
        adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.peft_config["default"].save_pretrained(folder)
    matrices = {
        name.replace(".default", ""): each.shape for name, each in adapted.named_parameters() if "lora_" in name
    }
    tensors = {name: (torch.randn(shape) * 0.01).bfloat16() for name, shape in matrices.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def fleet(*replicas: Replica) -> Fleet:
    """Servers whose adapter is not proven."""
    return Fleet([*replicas], NO_PROBE, "", 600.0, 0.0)


def sample(url: str, way: str, requests: list[Request]) -> list[Completion]:
    """All completions, through emailrl's own client."""
    vllm_fleet.KEPT = None if way == "before" else KEPT  # type: ignore[assignment]
    replica = (Replica if way == "now" else CompletionsReplica)(url, most=len(requests), alive=True)
    play = Play(fleet(replica), Version("adapter", UNKNOWN, "adapter"), Limits([], 2048, len(requests), 0))
    completions = play.run(requests, None)
    assert not any(completion.error for completion in completions), completions[0].error
    return completions


def requests_of(rows: int, tokens: int, seed: int, prompt: int = PROMPT) -> list[Request]:
    """Prompts of random ids, one per eight completions."""
    ids = random.Random(seed)
    prompts = [[ids.randrange(5, 1900) for _ in range(prompt)] for _ in range(-(-rows // PER_PROMPT))]
    return [Request(f"t{n}", SamplingParams(tokens), prompts[n // PER_PROMPT], seed=n) for n in range(rows)]


def check(url: str, given: argparse.Namespace) -> None:
    """One completion alone, either way; the prompt is too short for the prefix cache, which would change rounding."""
    one, other = (sample(url, way, requests_of(1, 64, 1, prompt=12))[0] for way in ("now", "before"))
    equal = next((n for n, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b), 64)
    gap = max((abs(a - b) for a, b in zip(one.logprobs[:equal], other.logprobs[:equal], strict=True)), default=0.0)
    print(f"check: {equal} of 64 tokens equal, log-probabilities within {gap:.2g}", flush=True)
    # On a GPU a sum's order may decide between near tokens.
    assert equal > (63 if given.smoke else 8) and gap < (1e-6 if given.smoke else 0.05), "the ways sample differently"


def measured(url: str, given: argparse.Namespace, begun: float, out: Path) -> Iterator[dict[str, Any]]:
    """A row for each number of completions and way."""
    api, engine = processes()
    for number, count in enumerate(given.rows):
        sample(url, "now", requests_of(count, 4, number + 2))  # kernels for so many rows
        for way in given.ways:
            if time.monotonic() - begun > given.seconds:
                print("time is up", flush=True)
                return
            before, start = [cpu(api), cpu(engine), time.process_time()], time.monotonic()
            done = sample(url, way, requests_of(count, given.tokens, 10 * number + WAYS.index(way) + 100))
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


def processes() -> tuple[list[int], list[int]]:
    """The API server, and the engine with its workers."""
    parents = {int(folder.name): int(fields(folder.name)[1]) for folder in Path("/proc").glob("[0-9]*")}
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in below(os.getpid(), parents)}
    (engine,) = (pid for pid, name in names.items() if b"EngineCore" in name)
    return [parents[engine]], [engine, *below(engine, parents)]


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
