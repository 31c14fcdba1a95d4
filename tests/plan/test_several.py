"""Several GPUs, by hand: collectives, trainers and servers, a sharded base, GPUs that train and sample in turn."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from plan.planned import ASLEEP, H200, SERVED, plan_for

from emailrl.cli.app import app
from emailrl.plan import find_device
from emailrl.plan.devices import Cluster
from emailrl.plan.memory import plan_memory
from emailrl.plan.time import HANDED_OVER, HANDOVER, MOVED, WAKING, Use

A_TOKEN = 7_266_631_680 / 791.2e12
"""Seconds to read one: 2 · 36 · 100,925,440 operations of Qwen3-4B on an H200."""
DECODING = 1000 * 36 * 0.53e-3
"""Seconds of a quarter of 4,000 tokens, one at a time through 36 layers."""
WEIGHTS = 8_044_936_192
GIB = 2**30

plan_of = partial(plan_for, model="4B", tokens=4000)
shared_of = partial(plan_of, engine="vllm")
"""GPUs that train and sample in turn."""


def split_of(**values: Any) -> Use:
    split = plan_of(**values).split
    assert split is not None
    return split


def test_collectives_by_hand() -> None:
    """257 MB are the float32 gradients of a rank-16 adapter on 14B; 28 GB its base in 16 bits."""
    cluster = Cluster(H200, 8, 2, 25)
    assert cluster.reduce_seconds(257_000_000, 1) == 0
    assert cluster.reduce_seconds(257_000_000, 2) == pytest.approx(257e6 / 200e9 + 20e-6)
    assert cluster.reduce_seconds(257_000_000, 8) == pytest.approx(2 * 7 / 8 * 257e6 / 200e9 + 140e-6)
    # Beyond a host the network's 3.125 GB/s decide.
    assert cluster.reduce_seconds(257_000_000, 16) == pytest.approx(0.1542 + 0.0003)
    assert cluster.gather_seconds(28 * 10**9, 8, offload=False) == pytest.approx(0.1225)
    assert cluster.gather_seconds(28 * 10**9, 8, offload=True) == pytest.approx(0.1225 + 0.175)
    assert Cluster(find_device("L40S"), 2).inside == 20e9


def test_trainers_and_servers_by_hand() -> None:
    """Three GPUs: two ranks of 12 trajectories each, and one server that plays all 24."""
    made, alone = plan_of(gpus=3), plan_of(gpus=1)
    split = made.split
    assert split is not None and made.use == split and made.run_seconds == split.run and alone.split is None
    assert (split.trainers, split.servers, split.tensor_parallel) == (2, 1, 1)
    assert split.tokens.trajectories == made.tokens.trajectories == 24
    # 24 read 3,000 tokens each, a fifth of them a prompt that three share; a thousand times 36 layers of 0.53 ms.
    assert split.sampling == pytest.approx(72_000 * (13 / 15) * A_TOKEN + DECODING, rel=1e-5)
    assert split.rollout == split.sampling > 24 * 14.4e-3 and split.handover == HANDED_OVER
    assert split.train == pytest.approx(alone.use.train / 0.98)
    assert split.score == pytest.approx(alone.use.score / 0.98)
    # 33,030,144 float32 numbers.
    assert split.reduce == pytest.approx(132_120_576 / 200e9 + 20e-6)
    training = split.score + split.train + split.reduce
    assert split.step == split.rollout > HANDED_OVER + training > HANDED_OVER
    assert split.tokens_per_second == pytest.approx(24 * 4000 / split.step)
    assert split.run == pytest.approx(200 * split.step + 22 * split.evaluation)
    turns = split_of(gpus=3, max_staleness=0)
    assert turns.step == pytest.approx(turns.rollout + HANDOVER + training)
    # The trainer saves the adapter, so a faster server does not hide that.
    often = split_of(gpus=3, num_mini_batches=2, update_epochs=9)
    assert often.rollout < often.step == pytest.approx(HANDED_OVER + often.score + often.train + often.reduce)
    assert often.reduce == pytest.approx(18 * split.reduce)


def test_rank_0_plays_so_many_and_no_more() -> None:
    """It takes 14.4 ms for a trajectory of 4,000 tokens, so more than 278,000 tokens a second are out of reach."""
    few, many = plan_of(gpus=8, nodes=8), plan_of(gpus=8, nodes=125)
    assert few.use.playing == pytest.approx(few.use.tokens.trajectories * 0.69 / 48)
    assert few.use.playing < few.use.sampling
    assert many.use.rollout == max(many.use.playing, many.use.sampling)
    assert 0.8 * 4000 / (0.69 / 48) < many.use.tokens_per_second < 1.0001 * 4000 / (0.69 / 48)
    assert any("rank 0" in note for note in many.notes) and not any("rank 0" in note for note in few.notes)


def test_a_server_samples_as_many_at_once_as_it_is_asked_for() -> None:
    """240 trajectories in rounds of 256, 64 or ten; every round decodes a thousand tokens through 36 layers."""

    def decoding(**more: float) -> float:
        split = split_of(gpus=2, per_device_train_batch_size=40, num_generations=6, **more)
        reading = 240 * 3000 * (1 - 0.2 * 5 / 6) * A_TOKEN
        return (split.sampling - reading) / DECODING

    assert decoding(max_batch_trajectories=64) == pytest.approx(240 / 64, rel=1e-4)
    assert decoding(rollout_concurrency=10) == pytest.approx(24, rel=1e-4)
    assert decoding() == decoding(max_batch_trajectories=256) < 240 / 64 - 1
    # 0.3 of 139.8 GiB, less 2 GiB and the weights, hold 59 caches of 4,000 tokens. The 0.9 of a server hold 211,
    # which take longer to read, half full, than kernels to launch.
    assert decoding(vllm_gpu_memory_utilization=0.3) == pytest.approx(240 / 59, rel=1e-4)
    moving = (WEIGHTS + 211 * 2000 * 147_456) / (0.7 * 4.8e12)
    assert decoding() == pytest.approx(240 / 211 * moving / (36 * 0.53e-3), rel=1e-4)


def test_a_base_that_does_not_fit_is_sharded() -> None:
    """Qwen3-32B in 16 bits takes 65.5 of an H100's 84.9 GB: eight ranks hold an eighth each."""
    planned = partial(plan_for, "H100", model="32B", gpus=8)
    made = planned(nodes=2, per_device_train_batch_size=8)
    split = made.split
    assert split is not None and made.runs and split.trainers % 8 == 0 and split.memory.cards == 8
    assert split.tensor_parallel == 2  # half of one card would not hold the weights
    parameters = 32_762_123_264
    head = 2 * 151_936 * 5120  # bytes, whole on every rank
    assert split.memory.resident["weights"] == head + (2 * parameters - head) // 8
    layer = (2 * parameters - 2 * head) // 64
    assert split.memory.resident["gathered"] == 2 * layer > head
    assert planned(shard_offload=True).memory.resident["weights"] == head
    whole = planned(shard="off")
    assert whole.memory.resident["weights"] == 2 * parameters and not whole.runs
    few = planned(gpus=2)
    assert few.split is None and few.verdict.startswith("does not fit: 2 GPUs are too few for a trainer and a server")
    in_4_bits = planned(gpus=2, load_in_4bit=True).split  # servers hold 20 GB on one card too
    assert in_4_bits is not None and (in_4_bits.trainers, in_4_bits.servers) == (1, 1)


@pytest.mark.parametrize(
    ("model", "cards", "gib"), [("14B", 1, 31.7), ("14B", 2, 20.1), ("32B", 1, 67.7), ("32B", 2, 39.8)]
)
def test_measured_peaks_of_a_sharded_base(model: str, cards: int, gib: float) -> None:
    """On H200s: six trajectories of 3,641 tokens, no optimizer."""
    values = {"shard": "host", "gradient_checkpointing": "on", "max_tokens_per_micro_batch": 8192}
    values |= {"per_device_train_batch_size": 1, "num_generations": 6}
    job = plan_for(model=model, tokens=3641, **SERVED, **values).job
    memory = plan_memory(job, job.tokens(), cards=cards)
    assert memory.cards == cards
    assert (memory.training_peak - memory.resident["optimizer"]) / GIB == pytest.approx(gib, rel=0.05)


def test_gathering_that_takes_longer_than_the_work_shows() -> None:
    """Over PCIe, and few tokens to compute: the rest of the gathering is on top."""
    batch = {"per_device_train_batch_size": 1, "num_generations": 2, "beta": 0}
    split = plan_for("L40S", model="8B", tokens=400, gpus=3, shard="host", **batch).split
    assert split is not None and split.memory.cards == 2
    gathered = 2 * 16_381_470_720 / 2 / 20e9  # once forward, once backward, half of the base from the other card
    assert split.gather == pytest.approx(gathered - split.train)


def test_the_seconds_of_several_gpus_are_the_same_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--gpu", "H200", "--model", "Qwen/Qwen3-14B", "--num-gpus", "8"]
    app([*asked, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    seconds = found["seconds"]
    assert {**seconds, **found["split"]} == seconds | {"sharded_over": 1} and seconds["overlaps"]
    training = sum(seconds[name] for name in ("handover", "score", "train", "gather", "reduce"))
    assert seconds["step"] == pytest.approx(max(seconds["rollout"], training), abs=0.01)
    assert seconds["run"] == pytest.approx(200 * seconds["step"] + 22 * seconds["evaluation"], rel=1e-3)
    app(asked, standalone_mode=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for phase, name in (("sampling per step", "rollout"), ("step", "step"), ("per evaluation", "evaluation")):
        assert any(line.startswith(f"{phase} {seconds[name]:.1f} s") for line in lines)


def test_every_gpu_trains_and_samples_its_own_trajectories() -> None:
    """Three ranks of 12 trajectories, each with an engine: the sampling of one GPU, and then its training."""
    made, alone = shared_of(gpus=3), shared_of(gpus=1)
    split = made.split
    assert split is not None and split.shared and made.runs and made.run_seconds == split.run
    assert (split.trainers, split.servers, split.tensor_parallel) == (3, 3, 1)
    assert split.tokens.trajectories == 36
    assert split.sampling == pytest.approx(36_000 * (13 / 15) * A_TOKEN + DECODING, rel=1e-5)
    assert split.sampling == pytest.approx(alone.use.rollout)
    assert split.playing == pytest.approx(36 * 0.16 / 48)  # rank 0 records all
    assert split.rollout == pytest.approx(split.sampling + split.playing) and split.handover == HANDOVER
    asleep = plan_of(gpus=3, **ASLEEP).use.handover
    assert asleep == pytest.approx(HANDOVER + WAKING + WEIGHTS / MOVED)
    assert split.train == pytest.approx(alone.use.train / 0.98)
    assert split.reduce == pytest.approx(2 * 2 / 3 * 132_120_576 / 200e9 + 40e-6)
    assert split.step == pytest.approx(split.rollout + HANDOVER + split.score + split.train + split.reduce)


def test_engines_of_two_gpus() -> None:
    """Two engines of 24 trajectories each: they read twice as fast, but launch as many kernels."""
    made = shared_of(gpus=4, vllm_tensor_parallel_size=2)
    split = made.use
    assert (split.trainers, split.servers, split.tensor_parallel) == (4, 2, 2)
    assert split.sampling == pytest.approx(72_000 * (13 / 15) * A_TOKEN / 2 + DECODING, rel=1e-5)
    asleep = plan_of(gpus=4, vllm_tensor_parallel_size=2, **ASLEEP).use.handover
    assert asleep == pytest.approx(HANDOVER + WAKING + WEIGHTS / 2 / MOVED)
    cache = int(0.45 * 139.8 * GIB) - WEIGHTS // 2 - 2 * GIB  # on each of them
    assert made.memory.cache_tokens == 2 * cache // 147_456
    # Evaluations are divided among four engines.
    assert shared_of(gpus=4, eval_dataset_size=12).use.evaluation == pytest.approx(9000 * A_TOKEN + DECODING, rel=1e-5)


def test_a_cache_of_its_own_size_replaces_vllms_share() -> None:
    made = shared_of(gpus=2, kv_cache_gib=10, vllm_enable_sleep=False)
    assert made.memory.cache_tokens == 10 * GIB // 147_456
    assert made.memory.sampling["vLLM"] == made.memory.training["vLLM"] == WEIGHTS + 12 * GIB
    assert made.use.handover == HANDOVER  # nobody sleeps


def test_both_uses_of_the_gpus_are_compared() -> None:
    shared, apart = plan_of(gpus=8, **ASLEEP), plan_of(gpus=8, vllm_enable_sleep="on")
    assert shared.split == apart.alternative and apart.split == shared.alternative
    assert shared.use.shared and not apart.use.shared and (apart.use.trainers, apart.use.servers) == (7, 1)
    assert apart.use.tokens_per_second > shared.use.tokens_per_second
    (note,) = [note for note in shared.notes if "would reach" in note]
    assert note.startswith("7 trainers and 1 server (VLLM_URLS; emailrl serve) would reach")
    assert f"instead of {shared.use.tokens_per_second:,.0f}" in note
    assert not any("would reach" in note for note in apart.notes)
    many = shared_of(gpus=8, nodes=125)  # here the other use is slower
    assert many.alternative is not None
    (note,) = [note for note in many.notes if "would reach" in note]
    assert note.endswith(f"would reach only {many.alternative.tokens_per_second:,.0f} tokens/s")


def test_a_base_too_large_for_two_copies_is_divided_among_neighbors() -> None:
    """Qwen3-32B on H200s: 61 GiB for the trainer, and vLLM's share beside it holds no whole copy."""
    planned = partial(shared_of, model="32B")
    made = planned(gpus=8)
    assert not made.runs and made.split is None and made.tokens.trajectories == 8 * 12
    assert made.verdict.endswith("; try VLLM_TENSOR_PARALLEL_SIZE=2")
    turned = planned(gpus=8, vllm_tensor_parallel_size=2)
    assert turned.runs and turned.use.servers == 4
    assert (made.ways[0].peak, made.ways[0].run_seconds) == (turned.memory.peak, turned.run_seconds)
    [larger] = [way for way in made.ways if way.text.startswith("--gpu")]
    assert larger.run_seconds == planned(larger.text.removeprefix("--gpu "), gpus=8).run_seconds
    # Two do not divide three.
    assert "VLLM_TENSOR_PARALLEL_SIZE=3" in [way.text for way in planned(gpus=3).ways]
    assert not any("PARALLEL" in way.text for way in planned(gpus=1).ways)


def test_ranks_in_the_settings_are_planned_as_they_train() -> None:
    planned = partial(plan_for, model="4B")
    shared = planned(engine="vllm", nproc=4, nnodes=2, vllm_tensor_parallel_size=2)
    assert shared.job.cluster.per_host == 4 and shared.split is not None and shared.split.shared
    assert (shared.split.trainers, shared.split.servers) == (8, 4)
    # Without an engine every rank samples with transformers, as in train.
    split = planned(nproc=2).split
    assert split is not None and split.shared and split == planned(nproc=2, engine="transformers").split
    served = planned(nproc=2, **SERVED)
    assert served.split is not None and not served.split.shared
    assert any(note.startswith("EMAILRL_NPROC counts only trainers") for note in served.notes)
    assert planned(engine="vllm", nproc=4, gpus=1).split is None
    assert planned("CPU", engine="vllm", nproc=4).split is None


def test_several_gpus_train_and_serve_whatever_the_engine_set() -> None:
    made = plan_for("H100", model="4B", gpus=8)
    assert made.split == plan_for("H100", model="4B", gpus=8, **SERVED).split is not None
    assert "times were measured on an H200 and scaled to the H100 by its data sheet" in made.notes
    assert any("PER_DEVICE_TRAIN_BATCH_SIZE is per rank" in note for note in made.notes)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vllm_tensor_parallel_size": 3}, "8 ranks on a host cannot be divided into engines"),
        ({"model": "32B"}, "a sharded base model needs vLLM servers"),
    ],
)
def test_what_shared_gpus_cannot_do_is_said(values: dict[str, Any], reason: str) -> None:
    made = shared_of("H100", gpus=8, **values)
    assert not made.runs and made.verdict.startswith(f"cannot run: {reason}")
    assert "too few for a trainer and a server" not in made.verdict
    assert made.alternative is not None and any(note.startswith(f"{made.alternative} would fit") for note in made.notes)
