"""One variant of ``bench_decode_14b``: the product's engine with its arguments, timed step by step."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from typing import Any

CONTEXT = (1200, 4000)
FIXED, NUM_FIXED = 192, 8
"""Tokens and number of the texts that all variants score."""


def measure(given: argparse.Namespace, extra: dict[str, Any]) -> dict[str, Any]:
    """Start the engine and take all times of a variant."""
    import faulthandler

    faulthandler.dump_traceback_later(0.85 * given.limit)
    begun = time.perf_counter()
    engine, lora = start(given, extra)
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
            "greedy": player.play(given.rows, context, temperature=0.0),
            "no adapter": Player(engine, None, player.vocabulary, given.tokens).play(given.rows, context),
        }
    return row


def start(given: argparse.Namespace, extra: dict[str, Any]) -> tuple[Any, Any]:
    """The product's engine with the variant's arguments, and the adapter's request."""
    import torch
    from vllm import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.model_loader import dummy_loader, weight_utils
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    from emailrl.engines.vllm.arguments import engine_arguments
    from emailrl.settings import load_settings

    def draw(parameter: Any, *range_and_seed: Any) -> None:
        """Norms and scales are 1, all else has the spread of an untrained model's weights."""
        if parameter.device.type == "meta":
            return  # drawn when it is quantized
        if parameter.ndim < 2:
            parameter.data.fill_(1)
        else:
            generator = torch.Generator(parameter.device).manual_seed(1234)
            parameter.data.uniform_(-0.035, 0.035, generator=generator)

    for module in (dummy_loader, weight_utils):
        module.initialize_single_dummy_weight = draw
    if "quantization" in extra:
        quantize_in_torch()
    cache = 0.5 if given.smoke else 30  # given, so that free memory is not measured at the start
    settings = load_settings({"max_model_len": 8192, "lora_rank": 16, "kv_cache_gib": cache}, environ={})
    dtype = "float32" if given.smoke else "bfloat16"
    arguments = engine_arguments(
        settings, model=str(given.work / "model"), dtype=dtype, lora_rank=16, on_gpu=not given.smoke, sleeps=True
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
    """Quantize weights without vLLM's own kernel, and multiply in torch if CUTLASS's are disabled.

    Not every build of vLLM has them.
    """
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.online import fp8

    if "Cutlass" in os.environ.get("VLLM_DISABLED_KERNELS", ""):
        fp8.cutlass_fp8_supported = lambda: False  # what torch can do: one scale per tensor of activations

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

    def play(self, rows: int, context: tuple[int, int], **sampling: Any) -> dict[str, Any]:
        """Decode so many rows at once; median milliseconds of a step, tokens per second."""
        draw = random.Random(0)  # the same prompts each time, so that they are read once
        prompts = [draw.choices(range(300, self.vocabulary), k=draw.randint(*context)) for _ in range(rows)]
        self.steps.clear()
        self._ask(prompts, self.tokens, **sampling)
        times = [
            after[0] - before[0]
            for before, after in zip(self.steps, self.steps[1:], strict=False)
            if before[1] == after[1] == rows and before[2] == after[2] == rows
        ]
        if not times:
            return {"error": "no step decoded all rows"}
        median = statistics.median(times)
        return {
            "ms": round(1e3 * median, 2), "ms_p90": round(1e3 * sorted(times)[int(0.9 * len(times))], 2),
            "tokens_per_second": round(rows / median), "steps": len(times),
        }  # fmt: skip

    def score(self) -> tuple[list[float], float]:
        """Log-probabilities of fixed texts in prefill, and how far those while decoding are from those in prefill."""
        fixed = random.Random(7)
        texts = [[fixed.randrange(300, self.vocabulary) for _ in range(FIXED)] for _ in range(NUM_FIXED)]
        found = [value for text in texts for value in self._prefill(text)]
        gaps = []
        for one in self._ask([text[:64] for text in texts], self.tokens):
            sampled = one.outputs[0]
            decoded = [entry[token].logprob for token, entry in zip(sampled.token_ids, sampled.logprobs, strict=True)]
            again = self._prefill([*one.prompt_token_ids, *sampled.token_ids])[63:]
            gaps += [abs(first - second) for first, second in zip(decoded, again, strict=True)]
        return [round(value, 5) for value in found], round(statistics.fmean(gaps), 5)

    def _prefill(self, ids: list[int]) -> list[float]:
        """The log-probabilities of a text's tokens after the first; alone, as vLLM mixes up prompts of several."""
        (output,) = self._ask([ids], 1, prompt_logprobs=0)
        pairs = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        return [entry[token].logprob for token, entry in pairs]

    def _ask(
        self,
        prompts: list[list[int]],
        tokens: int,
        *,
        seeded: bool = True,
        logprobs: int | None = 0,
        temperature: float = 1.0,
        **more: Any,
    ) -> list[Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ended: dict[int, Any] = {}
        for prompt in prompts:
            self.asked += 1
            params = SamplingParams(
                max_tokens=tokens, temperature=temperature, seed=self.asked if seeded else None, logprobs=logprobs,
                detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, **more,
            )  # fmt: skip
            request = {"prompt_token_ids": prompt}
            self.engine.add_request(str(self.asked), request, params, lora_request=self.lora)
        while len(ended) < len(prompts):
            for output in self.engine.step():
                if output.finished:
                    ended[int(output.request_id)] = output
        return [ended[number] for number in sorted(ended)]
