"""Flags that say where engines and the base run, and whether sampling and training overlap."""

from __future__ import annotations

from emailrl.errors import UsageError
from emailrl.openrlhf.conversion import Conversion
from emailrl.openrlhf.flags import Given, find_flag, hint_of


def take_engines(values: list[str], given: Given, taken: Conversion) -> None:
    count = int(values[0])
    if count < 0:
        raise UsageError("--vllm_num_engines must be at least 0.", "0: transformers in process; 1: vLLM in process.")
    taken.set("engine", "vllm" if count else "transformers", "--vllm_num_engines")
    if _shares_gpus(given):
        ranks = taken.values.get("nproc", 1) * taken.values.get("nnodes", 1)
        engines = ranks // taken.values.get("vllm_tensor_parallel_size", 1) or 1
        if count not in (0, engines):
            taken.notes.append(
                f"--vllm_num_engines {count} --colocate_all_models: the number of engines follows from the ranks, one "
                f"for each vllm_tensor_parallel_size of them: {engines}"
            )
    elif count > 1 or "async_train" in given:
        taken.notes.append(
            f"--vllm_num_engines {count}: start them with emailrl serve --replicas {count} and set vllm_urls to the "
            "addresses it prints"
        )


def _shares_gpus(given: Given) -> bool:
    """Whether vLLM runs on the trainer's GPUs; with --async_train only the other models share theirs."""
    return "colocate_all_models" in given and "async_train" not in given


def take_colocation(values: list[str], given: Given, taken: Conversion) -> None:
    if _shares_gpus(given):
        taken.set("vllm_urls", "", "--colocate_all_models: every rank samples on its own GPU")
    else:
        taken.notes.append("--colocate_all_models: with --async_train vLLM has its own GPUs, set vllm_urls")


def take_asynchronous(values: list[str], given: Given, taken: Conversion) -> None:
    steps = int(given.get("async_queue_size", ["1"])[0])
    if steps < 1:
        raise UsageError("--async_queue_size must be at least 1.", hint_of(find_flag("async_queue_size")))
    if given.get("vllm_num_engines", ["0"])[0] == "0":
        raise UsageError("--async_train needs vLLM servers.", "Give --vllm_num_engines as well, at least 1.")
    taken.set("max_staleness", steps, "--async_train" + " --async_queue_size" * ("async_queue_size" in given))


def take_zero_stage(values: list[str], given: Given, taken: Conversion) -> None:
    stage = int(values[0])
    if stage not in range(4):
        raise UsageError(f"--zero_stage {stage}: should be 0, 1, 2 or 3.")
    taken.set("shard", "host" if stage == 3 else "off", f"--zero_stage {stage}")
    if stage == 3 and _shares_gpus(given):
        taken.notes.append("--zero_stage 3 --colocate_all_models: a sharded base needs vLLM servers, set vllm_urls")
