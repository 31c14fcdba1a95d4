"""What a decode step of the 14B shape costs in vLLM, setting by setting, and what each does to the log-probabilities.

    python tests/gpu/bench_decode_14b.py --gpus 0 1 --seconds 500 --out results       # some 45 s a variant and GPU
    python tests/gpu/bench_decode_14b.py --gpus 0 --variants today dual-stream fp8
    python tests/gpu/bench_decode_14b.py --smoke --variants today merged ngram         # a CPU build of vLLM, tiny

The engine is the product's: its own engine arguments (``emailrl.engines.vllm_arguments``), in this process, an adapter
of rank 16 on all linear layers, weights drawn on the GPU (load format ``dummy``, norms set to 1), CUDA graphs for the
batch sizes used. A variant adds engine arguments (as VLLM_ENGINE_ARGS would) or environment variables. ``--rows``
requests with contexts of 1,200 to 4,000 tokens sample ``--tokens`` tokens each, seeded and with log-probabilities, as
in the measured step; figures are medians over the steps in which all of them decode and none reads a prompt. On the
first variant also: requests without seeds, without log-probabilities, short contexts, few rows.

``|d| to today``: mean absolute difference of the log-probabilities that the variant gives a fixed text in prefill, to
those of ``today``; ``|d| own``: of its sampled tokens' log-probabilities while decoding to its own in prefill. The
product's probe allows 0.1 nats in bf16. Rows are written to decode_14b.jsonl as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

Extra = dict[str, Any]
VARIANTS: dict[str, tuple[Extra, dict[str, str]]] = {
    "today": ({}, {}),
    "merged": ({"enable_lora": False}, {}),
    "dual-stream": ({}, {"VLLM_LORA_ENABLE_DUAL_STREAM": "1"}),
    "specialize": ({"specialize_active_lora": True}, {}),
    "fp8": ({"quantization": "fp8_per_tensor"}, {"VLLM_DISABLED_KERNELS": "CutlassFP8ScaledMMLinearKernel"}),
    "fp8-cutlass": ({"quantization": "fp8_per_tensor"}, {}),
    "both-lora": ({"specialize_active_lora": True}, {"VLLM_LORA_ENABLE_DUAL_STREAM": "1"}),
    "kv-fp8": ({"kv_cache_dtype": "fp8"}, {}),
    "v1-runner": ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "no-async": ({"async_scheduling": False}, {}),
    "piecewise": ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, {}),
    "full-decode": ({"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}, {}),
    "two-loras": ({"max_loras": 2}, {}),
    "no-sleep": ({"enable_sleep_mode": False}, {}),
    "ngram": ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}}, {}),
    "eager": ({"enforce_eager": True}, {}),
}
"""Engine arguments and environment variables of vLLM 0.26, the most telling first."""
CONTEXT = (1200, 4000)
FIXED, ROWS_FIXED = 192, 8
"""Tokens and number of the texts that all variants score."""


def main() -> None:
    """Measure one variant, or hand all of them out to the GPUs and print the table."""
    given = arguments()
    if given.variant:
        print(json.dumps(measure(given)))
        return
    given.work.mkdir(parents=True, exist_ok=True)
    prepare(given)
    deadline = time.monotonic() + given.seconds
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in given.variants:
        waiting.put(name)
    rows: dict[str, dict[str, Any]] = {}
    workers = [threading.Thread(target=work, args=(given, gpu, waiting, rows, deadline)) for gpu in given.gpus]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print_table(given, [rows[name] for name in given.variants if name in rows])


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="14B")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--gpus", nargs="+", default=["0"])
    parser.add_argument("--rows", type=int, default=38)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=500, help="no variant begins when less than --limit is left")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one variant")
    parser.add_argument("--work", type=Path, default=Path("/tmp/decode_14b"), help="config, adapter, compile cache")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="for decode_14b.jsonl")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smoke:
        given.shape, given.rows, given.tokens, given.gpus = "smoke", 4, 24, [""]
    return given


def prepare(given: argparse.Namespace) -> None:
    """Write the shape's config and a random adapter."""
    import torch
    from safetensors.torch import save_file
    from train_step_sides import config_of

    torch.manual_seed(0)
    config = config_of(given.shape)
    config.architectures, config.dtype = ["Qwen3ForCausalLM"], "float32" if given.smoke else "bfloat16"
    if given.smoke:
        config.head_dim = 64  # vLLM's least on a CPU
    config.save_pretrained(given.work / "model")
    heads, keys, wide = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    sizes = {
        "self_attn.q_proj": (config.hidden_size, heads * config.head_dim),
        "self_attn.k_proj": (config.hidden_size, keys * config.head_dim),
        "self_attn.v_proj": (config.hidden_size, keys * config.head_dim),
        "self_attn.o_proj": (heads * config.head_dim, config.hidden_size),
        "mlp.gate_proj": (config.hidden_size, wide), "mlp.up_proj": (config.hidden_size, wide),
        "mlp.down_proj": (wide, config.hidden_size),
    }  # fmt: skip
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, (into, out) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{key}.lora_A.weight"] = (0.02 * torch.randn(16, into)).to(torch.bfloat16)
            weights[f"{key}.lora_B.weight"] = (0.002 * torch.randn(out, 16)).to(torch.bfloat16)
    (given.work / "adapter").mkdir(exist_ok=True)
    save_file(weights, given.work / "adapter" / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in sizes]
    adapter = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": targets, "bias": "none",
               "task_type": "CAUSAL_LM", "base_model_name_or_path": str(given.work / "model")}  # fmt: skip
    (given.work / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))


def work(
    given: argparse.Namespace, gpu: str, waiting: queue.SimpleQueue[str], rows: dict[str, Any], deadline: float
) -> None:
    """Measure variants on one GPU while there is time; each row is written at once."""
    while not waiting.empty():
        name = waiting.get()
        if deadline - time.monotonic() < given.limit:
            rows[name] = {"variant": name, "error": "no time left"}
            continue
        rows[name] = {"variant": name} | run(given, gpu, name)
        with (given.out / "decode_14b.jsonl").open("a") as file:
            file.write(json.dumps(rows[name]) + "\n")
        shown = {key: value for key, value in rows[name].items() if key != "fixed"}
        print(json.dumps(shown), file=sys.stderr, flush=True)


def run(given: argparse.Namespace, gpu: str, name: str) -> dict[str, Any]:
    """One variant in a process of its own; an error is a row, the end of the log goes to stderr."""
    from emailrl.engines.vllm_engine import ENVIRONMENT

    command = [sys.executable, __file__, "--variant", name, "--shape", given.shape, "--work", str(given.work)]
    command += ["--rows", str(given.rows), "--tokens", str(given.tokens), *(["--smoke"] if given.smoke else [])]
    environ = ENVIRONMENT | {"VLLM_USE_FLASHINFER_SAMPLER": "0"} | os.environ | VARIANTS[name][1]
    environ |= {"VLLM_CACHE_ROOT": str(given.work / "cache")}
    environ |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    begun, log = time.monotonic(), given.work / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, env=environ)
        try:
            said, _ = process.communicate(timeout=given.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {"error": f"over {given.limit:.0f} s"}
    if process.returncode:
        lines = log.read_text(errors="replace").splitlines()
        print(f"{name}:\n  " + "\n  ".join(lines[-12:]), file=sys.stderr, flush=True)
        told = [line for line in lines if "Error" in line] or ["?"]
        return {"error": told[-1].strip()[-200:]}
    row: dict[str, Any] = json.loads(said.splitlines()[-1])
    return row | {"wall": round(time.monotonic() - begun, 1)}


# -- one variant


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Start the engine and take all times of a variant."""
    import faulthandler

    faulthandler.dump_traceback_later(0.85 * given.limit)
    begun = time.perf_counter()
    engine, lora = start(given)
    row: dict[str, Any] = {"start": round(time.perf_counter() - begun, 1)}
    player = Player(engine, lora, 512 if given.smoke else 151936, given.tokens)
    context = (40, 90) if given.smoke else CONTEXT
    row |= player.play(given.rows, context)
    row["fixed"], row["own"] = player.score()
    if given.variant == "today":
        few = max(2, given.rows // 5)
        row["more"] = {
            "no seeds": player.play(given.rows, context, seeded=False),
            "no log-probs": player.play(given.rows, context, logprobs=None),
            "short contexts": player.play(given.rows, (16, 32)),
            f"{few} rows": player.play(few, context),
            "merged request": Player(engine, None, player.vocabulary, given.tokens).play(given.rows, context),
        }
    return row


def start(given: argparse.Namespace) -> tuple[Any, Any]:
    """The product's engine with the variant's arguments, and the adapter's request."""
    import torch
    from vllm import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.model_loader import dummy_loader, weight_utils
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    from emailrl.engines.vllm_arguments import engine_arguments
    from emailrl.settings import load_settings

    def draw(parameter: Any, *range_and_seed: Any) -> None:
        """Norms are 1, all else has the spread of an untrained model's weights."""
        if parameter.device.type == "meta":
            return  # drawn when it is quantized
        if parameter.ndim == 1:
            parameter.data.fill_(1)
        else:
            generator = torch.Generator(parameter.device).manual_seed(1234)
            parameter.data.uniform_(-0.035, 0.035, generator=generator)

    for module in (dummy_loader, weight_utils):
        module.initialize_single_dummy_weight = draw
    extra = VARIANTS[given.variant][0]
    if "quantization" in extra:
        quantize_in_torch()
    settings = load_settings({"max_model_len": 8192, "lora_rank": 16}, environ={})
    dtype = "float32" if given.smoke else "bfloat16"
    arguments = engine_arguments(
        settings, model=str(given.work / "model"), dtype=dtype, lora_rank=16, can_sleep=not given.smoke
    )
    arguments |= {"load_format": "dummy"} | ({"enforce_eager": True} if given.smoke else {})
    compilation = {"cudagraph_capture_sizes": sorted({1, 8, 40, 64})} | extra.get("compilation_config", {})
    arguments |= extra | {"compilation_config": compilation}
    if given.smoke or arguments["enforce_eager"]:
        del arguments["compilation_config"]
    if not arguments["enable_lora"]:
        arguments = {name: value for name, value in arguments.items() if "lora" not in name}
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=UsageContext.LLM_CLASS)
    if "enable_lora" not in arguments:
        return engine, None
    lora = LoRARequest("v-1", 1, str(given.work / "adapter"))
    assert engine.add_lora(lora)
    return engine, lora


def quantize_in_torch() -> None:
    """Quantize weights without vLLM's own kernel, which not every build has."""
    import torch
    from vllm import _custom_ops

    inner = _custom_ops.scaled_fp8_quant

    def quantize(value: Any, scale: Any = None, *others: Any, **named: Any) -> Any:
        if scale is not None or torch.compiler.is_compiling():
            return inner(value, scale, *others, **named)
        largest = value.abs().amax().float() / 448
        return (value / largest).clamp(-448, 448).to(torch.float8_e4m3fn), largest.view(1)

    _custom_ops.scaled_fp8_quant = quantize


class Player:
    """Asks an engine for completions, and knows when each of its steps ended and what it was made of."""

    def __init__(self, engine: Any, lora: Any, vocabulary: int, tokens: int) -> None:
        self.engine, self.lora, self.vocabulary, self.tokens = engine, lora, vocabulary, tokens
        self.draw = random.Random(0)
        self.asked = 0
        self.steps: list[tuple[float, int, int]] = []
        """Time of the end of each step, its rows, its tokens."""
        scheduler = engine.engine_core.engine_core.scheduler
        inner = scheduler.update_from_output

        def update(scheduled: Any, *given: Any, **named: Any) -> Any:
            rows = len(scheduled.num_scheduled_tokens)
            self.steps.append((time.perf_counter(), rows, scheduled.total_num_scheduled_tokens))
            return inner(scheduled, *given, **named)

        scheduler.update_from_output = update

    def play(
        self, rows: int, context: tuple[int, int], *, seeded: bool = True, logprobs: int | None = 0
    ) -> dict[str, Any]:
        """Decode so many rows at once; median milliseconds of a step, tokens per second, tokens a row and step."""
        prompts = [self._ids(self.draw.randint(*context)) for _ in range(rows)]
        self.steps.clear()
        ended = self._ask(prompts, self.tokens, seeded=seeded, logprobs=logprobs)
        times = [
            after[0] - before[0]
            for before, after in zip(self.steps, self.steps[1:], strict=False)
            if before[1] == after[1] == rows and max(before[2], after[2]) <= 5 * rows
        ]
        if not times:
            return {"error": "no step decoded all rows"}
        sampled = sum(len(one.outputs[0].token_ids) for one in ended)
        decoding = [step for step in self.steps if step[2] <= 5 * step[1]]
        per_row = (sampled - rows) / max(sum(step[1] for step in decoding), 1)
        median = statistics.median(times)
        return {
            "ms": round(1e3 * median, 2), "ms_p90": round(1e3 * sorted(times)[int(0.9 * len(times))], 2),
            "tokens_per_second": round(rows * max(per_row, 1.0) / median), "steps": len(times),
            "tokens_per_row_and_step": round(per_row, 3),
        }  # fmt: skip

    def score(self) -> tuple[list[float], float]:
        """Log-probabilities of fixed texts in prefill, and how far those while decoding are from those in prefill."""
        fixed = random.Random(7)
        texts = [[fixed.randrange(300, self.vocabulary) for _ in range(FIXED)] for _ in range(ROWS_FIXED)]
        found = [value for one in self._ask(texts, 1, prompt_logprobs=0) for value in of_prompt(one)]
        ended = self._ask([text[:64] for text in texts], self.tokens)
        gaps = []
        again = self._ask([list(one.prompt_token_ids) + list(one.outputs[0].token_ids) for one in ended], 1,
                          prompt_logprobs=0)  # fmt: skip
        for first, second in zip(ended, again, strict=True):
            decoded = [entry[token].logprob for token, entry in
                       zip(first.outputs[0].token_ids, first.outputs[0].logprobs, strict=True)]  # fmt: skip
            gaps += [abs(a - b) for a, b in zip(decoded, of_prompt(second)[63:], strict=True)]
        return [round(value, 5) for value in found], round(statistics.fmean(gaps), 5)

    def _ids(self, count: int) -> list[int]:
        return [self.draw.randrange(300, self.vocabulary) for _ in range(count)]

    def _ask(
        self, prompts: list[list[int]], tokens: int, *, seeded: bool = True, logprobs: int | None = 0, **more: Any
    ) -> list[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ended: dict[int, Any] = {}
        for prompt in prompts:
            self.asked += 1
            params = SamplingParams(
                max_tokens=tokens, temperature=1.0, seed=self.asked if seeded else None, logprobs=logprobs,
                detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **more,
            )  # fmt: skip
            request = {"prompt_token_ids": prompt}
            self.engine.add_request(str(self.asked), request, params, lora_request=self.lora)
        while len(ended) < len(prompts):
            for output in self.engine.step():
                if output.finished:
                    ended[int(output.request_id)] = output
        return [ended[number] for number in sorted(ended)]


def of_prompt(output: Any) -> list[float]:
    """The log-probabilities of a prompt's tokens after the first."""
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [entry[token].logprob for token, entry in pairs]


# -- the table


def print_table(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """A row a variant; below, what was varied on the first."""
    today = next((row for row in rows if row["variant"] == "today" and "fixed" in row), None)
    print(f"\n{given.shape}, {given.rows} rows, contexts of {CONTEXT[0]:,} to {CONTEXT[1]:,} tokens")
    print(
        "| variant | ms a step | p90 | tokens/s | of today | tokens a row and step | |d| to today | |d| own | start s |"
    )
    print("|---" * 9 + "|")
    for row in rows:
        if "ms" not in row:
            print(f"| {row['variant']} | {row.get('error', '?').replace('|', '/')[:120]} |" + " |" * 7)
            continue
        speed = gap = "–"
        if today is not None:
            speed = f"{row['tokens_per_second'] / today['tokens_per_second']:.2f}"
            if row["variant"] != "merged":
                pairs = zip(row["fixed"], today["fixed"], strict=True)
                gap = f"{statistics.fmean(abs(a - b) for a, b in pairs):.4f}"
        cells = [row["variant"], row["ms"], row["ms_p90"], f"{row['tokens_per_second']:,}", speed,
                 row["tokens_per_row_and_step"], gap, f"{row['own']:.4f}", row["start"]]  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |")
    for name, one in (today or {}).get("more", {}).items():
        print(f"today, {name}: {one.get('ms', one.get('error'))} ms, {one.get('tokens_per_second', '–')} tokens/s")


if __name__ == "__main__":
    main()
