"""What vLLM in this process returns, as completions; does not import vLLM."""

from __future__ import annotations

from typing import Any

from emailrl.engines.base import Completion, Request


def read_output(output: Any, request: Request, seconds: float) -> Completion:
    """A finished ``vllm.RequestOutput`` as a completion."""
    sampled = output.outputs[0]
    completion = Completion(
        request.trajectory_id,
        list(sampled.token_ids),
        logprobs_of(sampled),
        str(sampled.finish_reason),
        seconds=seconds,
        prompt_tokens=len(request.prompt_ids),
    )
    if sampled.finish_reason not in ("stop", "length"):
        completion.finish_reason, completion.error = "error", f"vLLM ended a completion by {sampled.finish_reason!r}"
    return completion


def logprobs_of(sampled: Any) -> list[float]:
    """The log-probabilities of the sampled tokens."""
    return [entry[token].logprob for token, entry in zip(sampled.token_ids, sampled.logprobs, strict=True)]
