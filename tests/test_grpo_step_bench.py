"""The clocks and sums of ``bench_grpo_step``: nothing is left out, nothing counts twice. No GPU is needed."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from gpu.micro_batch_profile import HEAD, REST, class_of, kernels, summed
from gpu.step_figure import batches_table, by_phase, part_of, tables
from gpu.step_timeline import Timeline, name_steps


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


class Worker:
    """Methods that take a known time and call each other."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def outer(self) -> str:
        self.clock.pass_(1.0)
        self.inner()
        self.clock.pass_(2.0)
        self.inner()
        return "done"

    def inner(self) -> None:
        self.clock.pass_(0.25)
        self.nameless()

    def nameless(self) -> None:
        self.clock.pass_(0.5)

    def broken(self) -> None:
        self.clock.pass_(1.0)
        raise ValueError("no")


def worked() -> tuple[Timeline, Worker, Clock]:
    clock = Clock()
    worker, timeline = Worker(clock), Timeline(clock=clock)
    timeline.wrap(worker, "outer", "sampling/bookkeeping", drawn=True)
    timeline.wrap(worker, "inner", "sampling/engine")
    timeline.wrap(worker, "nameless", None)
    timeline.wrap(worker, "broken", "reward")
    return timeline, worker, clock


def test_own_seconds_and_the_rest_are_the_wall_time() -> None:
    timeline, worker, clock = worked()
    clock.pass_(4.0)
    assert worker.outer() == "done"
    clock.pass_(8.0)
    step = timeline.cut()
    assert step["seconds"] == 16.5
    assert step["own"] == {"sampling/bookkeeping": 3.0, "sampling/engine": 1.5, "other": 12.0}
    assert step["whole"]["Worker.outer"] == 4.5
    assert step["spans"] == [("sampling/bookkeeping", 4.0, 8.5)]
    assert step["calls"] == {"sampling/bookkeeping": 1, "sampling/engine": 4}
    clock.pass_(1.0)
    assert timeline.cut()["own"] == {"other": 1.0}


def test_the_gpu_is_waited_for_where_its_work_was_asked_for() -> None:
    clock = Clock()
    worker, timeline = Worker(clock), Timeline(clock=clock, settle=lambda: clock.pass_(32.0))
    timeline.wrap(worker, "nameless", "forward", settled=True)
    worker.nameless()
    assert timeline.cut()["own"] == {"forward": 32.5, "other": 0.0}


def test_a_failure_says_where_it_began() -> None:
    timeline, worker, _ = worked()
    with pytest.raises(ValueError, match="no"), timeline.span("other"):
        worker.broken()
    assert timeline.failed_in == ["other", "reward"]
    assert timeline.cut()["own"]["reward"] == 1.0


def batch(rows: dict[str, int], drafts: dict[str, list[int]]) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=rows, total_num_scheduled_tokens=sum(rows.values()), preempted_req_ids={"c"},
        scheduled_spec_decode_tokens=drafts,
    )  # fmt: skip


def test_steps_of_vllm_are_told_apart() -> None:
    """What reads prompts, what only samples, and what proves an adapter."""
    clock, counts, batches, seen = Clock(), Counter[str](), [], []
    timeline = Timeline(clock=clock)
    scheduler = SimpleNamespace(update_from_output=lambda scheduled, output: seen.append(output))
    name_steps(timeline, scheduler, counts, batches)
    for name, rows, drafts, seconds in (
        ("sampling/engine", {"a": 1, "b": 70}, {}, 2.0), ("sampling/engine", {"a": 5, "b": 1}, {"a": [7] * 4}, 0.5),
        ("sampling/engine", {}, {}, 0.125), ("adapter/proof", {"p": 128}, {}, 4.0),
    ):  # fmt: skip
        with timeline.span(name):
            clock.pass_(seconds)
            scheduler.update_from_output(batch(rows, drafts), name)
    own = {"sampling/prompts": 2.0, "sampling/tokens": 0.5, "sampling/engine": 0.125, "adapter/proof": 4.0}
    assert timeline.cut()["own"] == own | {"other": 0.0}
    assert counts == {"prompt_steps": 1, "token_steps": 1, "prompt_tokens": 69, "draft_tokens": 4, "preempted": 2}
    assert batches == [(2.0, 2, 71), (0.5, 2, 2)]
    assert len(seen) == 4


def test_batches_are_classed_by_what_they_hold_and_what_ran_before() -> None:
    batches = [(0.5, 2, 71), (0.25, 2, 2), (0.125, 4, 4), (0.0625, 2, 2), (2.0, 1, 2048)]
    assert batches_table(batches)[2:-1] == [
        "| prompts, at most 128 tokens | 1 | 0.50 | 500.0 | 2 | 71 |",
        "| prompts, at most 2,048 tokens | 1 | 2.00 | 2000.0 | 1 | 2,048 |",
        "| samples only, after prompts | 1 | 0.25 | 250.0 | 2 | 2 |",
        "| samples only, as the one before | 2 | 0.19 | 93.8 | 3 | 3 |",
    ]
    assert batches_table([]) == []


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_tn_align8>", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norms, RoPE, SwiGLU, sums"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
         "norms, RoPE, SwiGLU, sums"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at_cuda_detail::cub::DeviceSelectSweepKernel", REST),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_names(kernel: str, kind: str) -> None:
    assert class_of(kernel) == kind


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_what_the_head_launches_is_the_heads() -> None:
    """By the moment of the launch: the kernels themselves run later, after the range has ended."""
    trace = {
        "traceEvents": [
            event("user_annotation", HEAD, 10, 20),
            event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=1),
            event("cuda_runtime", "cudaLaunchKernel", 12, 1, correlation=2),
            event("cuda_driver", "cuLaunchKernel", 29, 1, correlation=3),
            event("cuda_driver", "cuLaunchKernel", 31, 1, correlation=4),
            event("kernel", "nvjet_a", 100, 1000, correlation=1),
            event("kernel", "nvjet_a", 1100, 2000, correlation=2),
            event("kernel", "triton_b", 3100, 4000, correlation=3),
            event("kernel", "triton_b", 7100, 8000, correlation=4),
            event("gpu_memcpy", "Memcpy HtoD", 20000, 16000, correlation=9),
            {"ph": "M", "name": "process_name"},
        ]
    }
    classes, most = summed(kernels(trace))
    assert classes == pytest.approx(
        {"matrix products": 0.001, HEAD: 0.006, "norms, RoPE, SwiGLU, sums": 0.008, "copies": 0.016}
    )
    assert most[0] == ("copies", "Memcpy HtoD", pytest.approx(0.016))


def test_phases_add_up_to_their_parts() -> None:
    own = {"wake": 1.0, "adapter/save": 2.0, "adapter/load": 4.0, "sampling/tokens": 8.0, "other": 16.0}
    assert by_phase(own) == {"wake": 1.0, "adapter": 6.0, "sampling": 8.0, "other": 16.0}
    assert part_of(own, "adapter") == {"save": 2.0, "load": 4.0}


def test_a_phase_without_a_name_is_an_error_and_not_left_out() -> None:
    with pytest.raises(KeyError, match="nap"):
        by_phase({"wake": 1.0, "nap": 2.0})


def test_the_table_means_over_the_steps_that_count() -> None:
    assert "| sampling | 3.00 | 60.0% | 9.00 | 2.00 | 4.00 |" in tables([step(1, 9.0), step(2, 2.0), step(3, 4.0)])


def step(number: int, sampling: float) -> dict[str, Any]:
    own = {"sampling/tokens": sampling, "other": 2.0}
    counts = dict.fromkeys(("trajectories", "shortest", "longest", "mean", "computed_tokens", "turns"), 1)
    more = dict.fromkeys(("sampled_tokens", "broken", "micro_batches", "halved"), 1)
    batch = counts | more | {"tokens": 4, "trained_tokens": 1, "kept": {}, "vllm": {}, "proof_gap": None}
    whole = {"Run.collect": 3.0, "Run.train": 1.0}
    return {
        "kind": "step", "number": number, "counts": number > 1, "seconds": sampling + 2.0, "own": own, "whole": whole,
        "spans": [], "batch": batch | {"vllm_version": None}, "memory": {},
        "batches": [], "product_seconds": {"rollout": 3.0, "update": 1.0, "total": 4.0},
    }  # fmt: skip
