"""Several GPUs, by hand: collectives, trainers and servers, a sharded base, GPUs that train and sample in turn."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plan.planned import H200, settings_with

from emailrl.cli.app import app
from emailrl.plan import Known, Plan, find_device, make_plan
from emailrl.plan.devices import Cluster
from emailrl.plan.time import HANDED_OVER, HANDOVER, MOVED, WAKING, Use

H100 = find_device("H100")
A_TOKEN = 7_266_631_680 / 791.2e12
"""Seconds to read one: 2 · 36 · 100,925,440 operations of Qwen3-4B on an H200."""
DECODING = 1000 * 36 * 0.53e-3
"""Seconds of a quarter of 4,000 tokens, one at a time through 36 layers."""
WEIGHTS = 8_044_936_192
GIB = 2**30


def plan_of(tmp_path: Path, num_gpus: int, nodes: int = 1, gpu: str = "H200", **values: Any) -> Plan:
    settings = settings_with(tmp_path, **({"model_name": "Qwen/Qwen3-4B"} | values))
    return make_plan(settings, find_device(gpu), known=Known(4000), num_gpus=num_gpus, nodes=nodes)


shared_of = partial(plan_of, engine="vllm")
"""GPUs that train and sample in turn."""


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


def test_trainers_and_servers_by_hand(tmp_path: Path) -> None:
    """Three GPUs: two ranks of 12 trajectories each, and one server that plays all 24."""
    made, alone = plan_of(tmp_path, 3), plan_of(tmp_path, 1)
    split = made.split
    assert split is not None and (split.trainers, split.servers, split.tensor_parallel) == (2, 1, 1)
    assert split.tokens.trajectories == made.tokens.trajectories == 24
    # 24 read 3,000 tokens each, a fifth of them a prompt that three share; a thousand times 36 layers of 0.53 ms.
    assert split.sampling == pytest.approx(72_000 * (13 / 15) * A_TOKEN + 1000 * 36 * 0.53e-3, rel=1e-5)
    seconds = split
    assert seconds.rollout == split.sampling > 24 * 14.4e-3 and seconds.handover == HANDED_OVER
    assert seconds.train == pytest.approx(alone.use.train / 0.98)
    assert seconds.score == pytest.approx(alone.use.score / 0.98)
    # 33,030,144 float32 numbers.
    assert seconds.reduce == pytest.approx(132_120_576 / 200e9 + 20e-6)
    training = seconds.score + seconds.train + seconds.reduce
    assert seconds.step == seconds.rollout > HANDED_OVER + training > HANDED_OVER
    assert split.tokens_per_second == pytest.approx(24 * 4000 / seconds.step)
    assert seconds.run == pytest.approx(200 * seconds.step + 22 * seconds.evaluation)
    assert made.use == seconds and made.run_seconds == seconds.run and alone.split is None
    turns = plan_of(tmp_path, 3, max_staleness=0).use
    assert turns.step == pytest.approx(turns.rollout + HANDOVER + training)
    # The trainer saves the adapter, so a faster server does not hide that.
    often = plan_of(tmp_path, 3, update_epochs=9).use
    assert often.rollout < often.step == pytest.approx(HANDED_OVER + often.score + often.train + often.reduce)


def test_rank_0_plays_so_many_and_no_more(tmp_path: Path) -> None:
    """It takes 14.4 ms for a trajectory of 4,000 tokens, so more than 278,000 tokens a second are out of reach."""
    few, many = plan_of(tmp_path, 8, 8), plan_of(tmp_path, 8, 125)
    assert few.split is not None and many.split is not None
    assert few.split.playing == pytest.approx(few.split.tokens.trajectories * 0.69 / 48)
    assert few.split.playing < few.split.sampling
    assert many.use.rollout == max(many.split.playing, many.split.sampling)
    assert 0.8 * 4000 / (0.69 / 48) < many.split.tokens_per_second < 1.0001 * 4000 / (0.69 / 48)
    assert any("rank 0" in note for note in many.notes) and not any("rank 0" in note for note in few.notes)


def served(tmp_path: Path, **values: Any) -> Use:
    """One trainer and one server of the 4B shape: 12 × 8 completions of 764 tokens to prompts of 770."""
    given = {"per_device_train_batch_size": 12, "num_generations": 8, "max_turns": 1, "max_tokens": 768} | values
    settings = settings_with(tmp_path, model_name="Qwen/Qwen3-4B", vllm_urls="http://server", engine="vllm", **given)
    made = make_plan(settings, H200, known=Known(1535, 0.498), num_gpus=2)
    assert made.split is not None and (made.split.trainers, made.split.servers) == (1, 1)
    return made.split


def test_a_trainer_and_a_server_as_measured(tmp_path: Path) -> None:
    """H200s, two machines: rollouts with loading the adapter 9.8 and 12.2 s, updates 5.2 and 5.3 s, steps in turns 15.2
    and 17.7 s, overlapping 9.2 and 11.6 s. A new adapter took 1.7 s then."""
    turns, ahead = served(tmp_path, max_staleness=0), served(tmp_path, max_staleness=1)
    assert turns.rollout + 1.7 == pytest.approx((9.8 + 12.2) / 2, rel=0.15)
    assert turns.score + turns.train == pytest.approx((5.2 + 5.3) / 2, rel=0.15)
    assert turns.step - turns.handover + 1.7 == pytest.approx((15.2 + 17.7) / 2, rel=0.15)
    assert ahead.step == pytest.approx((9.2 + 11.6) / 2, rel=0.15)
    assert served(tmp_path, per_device_train_batch_size=24).sampling == pytest.approx(16.5, rel=0.15)


@pytest.mark.parametrize(("gpus", "seconds"), [(2, 13.30), (4, 13.88)])
def test_shared_gpus_as_measured(tmp_path: Path, gpus: int, seconds: float) -> None:
    """4B on H200s, 48 completions of 768 tokens on each; the new adapter, waking and sleeping took 3.2 s then."""
    given = {"per_device_train_batch_size": 6, "num_generations": 8, "max_turns": 1, "max_tokens": 768}
    settings = settings_with(tmp_path, model_name="Qwen/Qwen3-4B", engine="vllm", vllm_enable_sleep="on", **given)
    made = make_plan(settings, H200, known=Known(1535, 0.498), num_gpus=gpus)
    assert made.split is not None and made.split.shared
    assert made.use.step - made.use.handover + 3.2 == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(("completions", "seconds"), [(48, 1.84), (96, 2.38), (192, 4.00), (384, 6.34)])
def test_a_server_samples_as_measured(tmp_path: Path, completions: int, seconds: float) -> None:
    """One H200, 4B, prompts and completions of 256 tokens: 6,681, 10,335, 12,277 and 15,496 tokens per second."""
    batch = {"per_device_train_batch_size": completions // 8, "num_generations": 8, "max_turns": 1, "max_tokens": 256}
    batch |= {"max_batch_trajectories": 384}
    settings = settings_with(tmp_path, model_name="Qwen/Qwen3-4B", vllm_urls="http://s", engine="vllm", **batch)
    made = make_plan(settings, H200, known=Known(512, 0.5), num_gpus=2)
    assert made.split is not None and made.split.sampling == pytest.approx(seconds, rel=0.1)


def test_a_server_samples_as_many_at_once_as_it_is_asked_for(tmp_path: Path) -> None:
    """240 trajectories in rounds of 256, 64 or ten; every round decodes a thousand tokens through 36 layers."""
    values = {"per_device_train_batch_size": 40, "num_generations": 6}

    def decoding(**more: float) -> float:
        split = plan_of(tmp_path, 2, **values, **more).split
        assert split is not None
        reading = 240 * 3000 * (1 - 0.2 * 5 / 6) * A_TOKEN
        return (split.sampling - reading) / (1000 * 36 * 0.53e-3)

    assert decoding(max_batch_trajectories=64) == pytest.approx(240 / 64, rel=1e-4)
    assert decoding(rollout_concurrency=10) == pytest.approx(24, rel=1e-4)
    assert decoding() == decoding(max_batch_trajectories=256) < 240 / 64 - 1
    # 0.3 of 139.8 GiB, less 2 GiB and the weights, hold 59 caches of 4,000 tokens. The 0.9 of a server hold 211,
    # which take longer to read, half full, than kernels to launch.
    assert decoding(vllm_gpu_memory_utilization=0.3) == pytest.approx(240 / 59, rel=1e-4)
    moving = (8_044_936_192 + 211 * 2000 * 147_456) / (0.7 * 4.8e12)
    assert decoding() == pytest.approx(240 / 211 * moving / (36 * 0.53e-3), rel=1e-4)


def test_updates_reduce_as_often(tmp_path: Path) -> None:
    once, often = plan_of(tmp_path, 3).use, plan_of(tmp_path, 3, num_mini_batches=2, update_epochs=2).use
    assert once.reduce > 0 and often.reduce == pytest.approx(4 * once.reduce)


def test_a_base_that_does_not_fit_is_sharded(tmp_path: Path) -> None:
    """Qwen3-32B in 16 bits takes 65.5 of an H100's 84.9 GB: eight ranks hold an eighth each."""
    settings = settings_with(tmp_path, model_name="Qwen/Qwen3-32B", per_device_train_batch_size=8)
    made = make_plan(settings, H100, num_gpus=8, nodes=2)
    split = made.split
    assert split is not None and made.runs and split.trainers % 8 == 0 and split.memory.cards == 8
    assert split.tensor_parallel == 2  # half of one card would not hold the weights
    parameters = 32_762_123_264
    head = 2 * 151_936 * 5120  # bytes, whole on every rank
    assert split.memory.resident["weights"] == head + (2 * parameters - head) // 8
    layer = (2 * parameters - 2 * head) // 64
    assert split.memory.resident["gathered"] == 2 * layer > head
    offloaded = make_plan(settings_with(tmp_path, model_name="Qwen/Qwen3-32B", shard_offload=True), H100, num_gpus=8)
    assert offloaded.memory.resident["weights"] == head
    whole = make_plan(settings_with(tmp_path, model_name="Qwen/Qwen3-32B", shard="off"), H100, num_gpus=8)
    assert whole.memory.resident["weights"] == 2 * parameters and not whole.runs


def test_servers_hold_the_base_in_4_bits_too(tmp_path: Path) -> None:
    made = make_plan(settings_with(tmp_path, model_name="Qwen/Qwen3-32B", load_in_4bit=True), H100, num_gpus=2)
    assert made.split is not None and (made.split.trainers, made.split.servers) == (1, 1)  # 20 GB fit on one card


def test_gathering_that_takes_longer_than_the_work_shows(tmp_path: Path) -> None:
    """Over PCIe, and few tokens to compute: the rest of the gathering is on top."""
    settings = settings_with(
        tmp_path, model_name="Qwen/Qwen3-8B", shard="host", per_device_train_batch_size=1, num_generations=2, beta=0
    )
    made = make_plan(settings, find_device("L40S"), num_gpus=3, known=Known(400))
    split = made.split
    assert split is not None and split.memory.cards == 2
    gathered = 2 * 16_381_470_720 / 2 / 20e9  # once forward, once backward, half of the base from the other card
    assert split.gather == pytest.approx(gathered - split.train)


def test_too_few_gpus(tmp_path: Path) -> None:
    made = make_plan(settings_with(tmp_path, model_name="Qwen/Qwen3-32B"), H100, num_gpus=2)
    assert made.split is None and not made.runs
    assert made.verdict == "does not fit: 2 GPUs are too few for a trainer and a server; use more"


def test_the_seconds_of_several_gpus_are_the_same_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--gpu", "H200", "--model", "Qwen/Qwen3-14B", "--num-gpus", "8"]
    app([*asked, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    seconds = found["seconds"]
    assert {**seconds, **found["split"]["seconds"]} == seconds and seconds["overlaps"]
    training = sum(seconds[name] for name in ("handover", "score", "train", "gather", "all_reduce"))
    assert seconds["step"] == pytest.approx(max(seconds["rollout"], training), abs=0.01)
    assert seconds["run"] == pytest.approx(200 * seconds["step"] + 22 * seconds["evaluation"], rel=1e-3)
    app(asked, standalone_mode=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for phase, name in (("sampling per step", "rollout"), ("step", "step"), ("per evaluation", "evaluation")):
        assert any(line.startswith(f"{phase} {seconds[name]:.1f} s") for line in lines)


def test_every_gpu_trains_and_samples_its_own_trajectories(tmp_path: Path) -> None:
    """Three ranks of 12 trajectories, each with an engine: the sampling of one GPU, and then its training."""
    made, alone = shared_of(tmp_path, 3), shared_of(tmp_path, 1)
    split = made.split
    assert split is not None and split.shared and made.runs
    assert (split.trainers, split.servers, split.tensor_parallel) == (3, 3, 1)
    assert split.tokens.trajectories == 36
    assert split.sampling == pytest.approx(36_000 * (13 / 15) * A_TOKEN + DECODING, rel=1e-5)
    assert split.sampling == pytest.approx(alone.use.rollout)
    assert split.playing == pytest.approx(36 * 0.16 / 48)  # rank 0 records all
    seconds = split
    assert seconds.rollout == pytest.approx(split.sampling + split.playing) and seconds.handover == HANDOVER
    asleep = shared_of(tmp_path, 3, vllm_enable_sleep="on").use.handover
    assert asleep == pytest.approx(HANDOVER + WAKING + WEIGHTS / MOVED)
    assert seconds.train == pytest.approx(alone.use.train / 0.98)
    assert seconds.reduce == pytest.approx(2 * 2 / 3 * 132_120_576 / 200e9 + 40e-6)
    training = seconds.score + seconds.train + seconds.reduce
    assert seconds.step == pytest.approx(seconds.rollout + HANDOVER + training)
    assert split.tokens_per_second == pytest.approx(36 * 4000 / seconds.step)
    assert made.run_seconds == pytest.approx(200 * seconds.step + 22 * seconds.evaluation)


def test_engines_of_two_gpus(tmp_path: Path) -> None:
    """Two engines of 24 trajectories each: they read twice as fast, but launch as many kernels."""
    made = shared_of(tmp_path, 4, vllm_tensor_parallel_size=2)
    split = made.split
    assert split is not None and (split.trainers, split.servers, split.tensor_parallel) == (4, 2, 2)
    assert split.sampling == pytest.approx(72_000 * (13 / 15) * A_TOKEN / 2 + DECODING, rel=1e-5)
    asleep = shared_of(tmp_path, 4, vllm_tensor_parallel_size=2, vllm_enable_sleep="on").use.handover
    assert asleep == pytest.approx(HANDOVER + WAKING + WEIGHTS / 2 / MOVED)
    cache = int(0.45 * 139.8 * GIB) - WEIGHTS // 2 - 2 * GIB  # on each of them
    assert made.memory.cache_tokens == 2 * cache // 147_456


def test_evaluations_are_divided_among_the_engines(tmp_path: Path) -> None:
    split = shared_of(tmp_path, 4, eval_dataset_size=12).split
    assert split is not None
    assert split.evaluation == pytest.approx(3 * 3000 * A_TOKEN + DECODING, rel=1e-5)


def test_a_cache_of_its_own_size_replaces_vllms_share(tmp_path: Path) -> None:
    made = shared_of(tmp_path, 2, kv_cache_gib=10, vllm_enable_sleep=False)
    assert made.memory.cache_tokens == 10 * GIB // 147_456
    assert made.memory.sampling["vLLM"] == made.memory.training["vLLM"] == WEIGHTS + 12 * GIB
    assert made.use.handover == HANDOVER  # nobody sleeps


def test_both_uses_of_the_gpus_are_compared(tmp_path: Path) -> None:
    sleeping = {"vllm_enable_sleep": "on"}
    shared, apart = shared_of(tmp_path, 8, **sleeping), shared_of(tmp_path, 8, **sleeping, engine="auto")
    assert shared.split == apart.alternative and apart.split == shared.alternative
    assert shared.split is not None and apart.split is not None
    assert shared.split.shared and not apart.split.shared
    assert apart.split.tokens_per_second > shared.split.tokens_per_second
    (note,) = [note for note in shared.notes if "would reach" in note]
    assert (apart.split.trainers, apart.split.servers) == (7, 1)
    assert note.startswith("7 trainers and 1 server (VLLM_URLS; emailrl serve) would reach")
    assert f"instead of {shared.split.tokens_per_second:,.0f}" in note
    assert not any("would reach" in note for note in apart.notes)


def test_a_slower_use_of_the_gpus_is_not_advised(tmp_path: Path) -> None:
    made = shared_of(tmp_path, 8, 125)
    assert made.split is not None and made.alternative is not None
    assert made.alternative.tokens_per_second < made.split.tokens_per_second
    (note,) = [note for note in made.notes if "would reach" in note]
    assert note.endswith(f"would reach only {made.alternative.tokens_per_second:,.0f} tokens/s")


def test_a_base_too_large_for_two_copies_is_divided_among_neighbors(tmp_path: Path) -> None:
    """Qwen3-32B on H200s: 61 GiB for the trainer, and vLLM's share beside it holds no whole copy."""
    values = {"model_name": "Qwen/Qwen3-32B"}
    made = shared_of(tmp_path, 8, **values)
    assert not made.runs and made.split is None and made.tokens.trajectories == 8 * 12
    assert made.verdict.endswith("; try VLLM_TENSOR_PARALLEL_SIZE=2")
    turned = shared_of(tmp_path, 8, **values, vllm_tensor_parallel_size=2)
    assert turned.runs and turned.split is not None and turned.split.servers == 4
    assert (made.ways[0].peak, made.ways[0].run_seconds) == (turned.memory.peak, turned.run_seconds)
    [larger] = [way for way in made.ways if way.text.startswith("--gpu")]
    assert larger.run_seconds == shared_of(tmp_path, 8, gpu=larger.text.removeprefix("--gpu "), **values).run_seconds
    three = shared_of(tmp_path, 3, **values).ways
    assert "VLLM_TENSOR_PARALLEL_SIZE=3" in [way.text for way in three]  # two do not divide three
    assert not any("PARALLEL" in way.text for way in shared_of(tmp_path, 1, **values).ways)


def test_ranks_in_the_settings_are_planned_as_they_train(tmp_path: Path) -> None:
    def made(**values: Any) -> Plan:
        return make_plan(settings_with(tmp_path, model_name="Qwen/Qwen3-4B", **values), H200)

    shared = made(engine="vllm", nproc=4, nnodes=2, vllm_tensor_parallel_size=2)
    assert shared.job.cluster.per_host == 4 and shared.split is not None and shared.split.shared
    assert (shared.split.trainers, shared.split.servers) == (8, 4)
    # Without an engine every rank samples with transformers, as in train.
    split = made(nproc=2).split
    assert split is not None and split.shared and split == made(nproc=2, engine="transformers").split
    served = made(engine="vllm", nproc=2, vllm_urls="http://one:8000")
    assert served.split is not None and not served.split.shared
    assert any(note.startswith("EMAILRL_NPROC counts only trainers") for note in served.notes)
    settings = settings_with(tmp_path, model_name="Qwen/Qwen3-4B", engine="vllm", nproc=4)
    assert make_plan(settings, H200, num_gpus=1).split is None
    assert make_plan(settings, find_device("CPU")).split is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vllm_tensor_parallel_size": 3}, "8 ranks on a host cannot be divided into engines"),
        ({"model_name": "Qwen/Qwen3-32B"}, "a sharded base model needs vLLM servers"),
    ],
)
def test_what_shared_gpus_cannot_do_is_said(values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    made = shared_of(tmp_path, 8, gpu="H100", **values)
    assert not made.runs and made.verdict.startswith(f"cannot run: {reason}")
    assert "too few for a trainer and a server" not in made.verdict
    assert made.alternative is not None and any(note.startswith(f"{made.alternative} would fit") for note in made.notes)
