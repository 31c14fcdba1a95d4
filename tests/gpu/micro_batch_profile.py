"""One micro-batch of a training step, forward and backward, by what its GPU kernels do."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD = "vocabulary head"
CLASSES = {
    "attention": r"flash|fmha|attention|attn",
    "copies": r"^(?!triton).*(copy|memcpy|memset|fill|CatArray)",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|split_?k|gemv|::mm$|::addmm|::bmm|::linear",
    "norms, RoPE, SwiGLU, sums": r"triton|elementwise|reduce|softmax|norm|vectorized|multi_tensor|::(add|mul|silu|pow)",
}
"""What a kernel's name says of it; the first that fits holds."""
REST = "everything else"


def class_of(kernel: str) -> str:
    """The class of a kernel by its name."""
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, kernel, re.IGNORECASE)), REST)


def kernels(trace: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Each GPU kernel of a Chrome trace: its class, name and seconds.

    What was launched inside a range named ``HEAD`` belongs to the head, whatever it is.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    heads = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] == HEAD
    ]
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = launched.get(event["args"].get("correlation"))
        in_head = at is not None and any(start <= at <= end for start, end in heads)
        yield (HEAD if in_head else class_of(event["name"])), event["name"], event["dur"] / 1e6


def summed(found: Iterator[tuple[str, str, float]]) -> tuple[dict[str, float], list[tuple[str, str, float]]]:
    """Seconds a class, and the ten kernels that take most."""
    classes: dict[str, float] = defaultdict(float)
    names: dict[tuple[str, str], float] = defaultdict(float)
    for kind, name, seconds in found:
        classes[kind] += seconds
        names[kind, name[:90]] += seconds
    most = sorted(((kind, name, seconds) for (kind, name), seconds in names.items()), key=lambda one: -one[2])
    return dict(classes), most[:10]


def profile_micro_batch(updater: Any, item: Any) -> dict[str, Any]:
    """Forward and backward of a prepared micro-batch, once on the clock and once under the profiler.

    ``idle`` is the time on the clock in which no kernel ran. The weights stay as they are. On a CPU operators stand for
    kernels.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from emailrl.model import logprobs
    from emailrl.training.objective import Meter

    whole, cuda = updater.objective.count([item]), torch.cuda.is_available()

    def once() -> float:
        updater.optimizer.zero_grad(set_to_none=True)
        begun = time.perf_counter()
        scored = updater.forward.train(item)
        loss, _, _ = updater.objective.loss(item, scored, whole, Meter(), first_pass=True)
        updater.loss_scale.scale(loss).backward()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    updater.policy.model.train()
    once()
    seconds = once()
    inner = logprobs.fused_logprobs

    def marked(*args: Any) -> Any:
        with record_function(HEAD):
            return inner(*args)

    logprobs.fused_logprobs = marked
    try:
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiler:
            once()
    finally:
        logprobs.fused_logprobs = inner
    updater.policy.model.eval()
    updater.optimizer.zero_grad(set_to_none=True)
    if cuda:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            classes, most = summed(kernels(json.loads(path.read_text())))
    else:
        rows = ((class_of(one.key), one.key, one.self_cpu_time_total / 1e6) for one in profiler.key_averages())
        classes, most = summed(iter(rows))
    classes["idle"] = max(seconds - sum(classes.values()), 0.0)
    return {
        "tokens": item.num_tokens,
        "trained_tokens": item.num_trainable,
        "samples": len(item.indices),
        "seconds": seconds,
        "classes": classes,
        "most": most,
    }
