"""Several GPUs, by hand: collectives, trainers and servers, a sharded base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plan.planned import H200, settings_with

from emailrl.cli.app import app
from emailrl.plan import Known, Plan, find_device, make_plan
from emailrl.plan.several import Cluster, Split
from emailrl.plan.time import HANDED_OVER, HANDOVER

H100 = find_device("H100")
A_TOKEN = 7_266_631_680 / 791.2e12
"""Seconds to read one: 2 · 36 · 100,925,440 operations of Qwen3-4B on an H200."""


def plan_of(tmp_path: Path, num_gpus: int, nodes: int = 1, **values: Any) -> Plan:
    settings = settings_with(tmp_path, **({"model_name": "Qwen/Qwen3-4B"} | values))
    return make_plan(settings, H200, known=Known(4000), num_gpus=num_gpus, nodes=nodes)


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
    seconds = split.seconds
    assert seconds.rollout == split.sampling > 24 * 14.4e-3 and seconds.handover == HANDED_OVER
    assert seconds.train == pytest.approx(alone.seconds.train / 0.98)
    assert seconds.score == pytest.approx(alone.seconds.score / 0.98)
    # 33,030,144 float32 numbers.
    assert seconds.reduce == pytest.approx(132_120_576 / 200e9 + 20e-6)
    training = seconds.score + seconds.train + seconds.reduce
    assert seconds.step == seconds.rollout > HANDED_OVER + training > HANDED_OVER
    assert split.tokens_per_second == pytest.approx(24 * 4000 / seconds.step)
    assert seconds.run == pytest.approx(200 * seconds.step + 22 * seconds.evaluation)
    assert made.seconds == seconds and made.run_seconds == seconds.run and alone.split is None
    turns = plan_of(tmp_path, 3, max_staleness=0).seconds
    assert turns.step == pytest.approx(turns.rollout + HANDOVER + training)
    # The trainer saves the adapter, so a faster server does not hide that.
    often = plan_of(tmp_path, 3, update_epochs=9).seconds
    assert often.rollout < often.step == pytest.approx(HANDED_OVER + often.score + often.train + often.reduce)


def test_servers_share_the_trajectories(tmp_path: Path) -> None:
    """More servers shorten the reading, not the longest conversation."""
    made = plan_of(tmp_path, 2)
    assert made.split is not None and made.split.servers == 1
    assert made.split.sampling == pytest.approx(36_000 * (13 / 15) * A_TOKEN + 1000 * 36 * 0.53e-3, rel=1e-5)
    many = plan_of(tmp_path, 8, 125)
    assert many.split is not None and many.split.trainers + many.split.servers == 1000
    assert many.split.sampling > 1000 * 36 * 0.53e-3


def test_rank_0_plays_so_many_and_no_more(tmp_path: Path) -> None:
    """It takes 14.4 ms for a trajectory of 4,000 tokens, so more than 278,000 tokens a second are out of reach."""
    few, many = plan_of(tmp_path, 8, 8), plan_of(tmp_path, 8, 125)
    assert few.split is not None and many.split is not None
    assert few.split.playing == pytest.approx(few.split.tokens.trajectories * 0.69 / 48)
    assert few.split.playing < few.split.sampling
    assert many.seconds.rollout == max(many.split.playing, many.split.sampling)
    assert 0.8 * 4000 / (0.69 / 48) < many.split.tokens_per_second < 1.0001 * 4000 / (0.69 / 48)
    assert any("rank 0" in note for note in many.notes) and not any("rank 0" in note for note in few.notes)


def served(tmp_path: Path, **values: Any) -> Split:
    """One trainer and one server of the 4B shape: 12 × 8 completions of 764 tokens to prompts of 770."""
    given = {"per_device_train_batch_size": 12, "num_generations": 8, "max_turns": 1, "max_tokens": 768} | values
    settings = settings_with(tmp_path, model_name="Qwen/Qwen3-4B", vllm_urls="http://server", engine="vllm", **given)
    made = make_plan(settings, H200, known=Known(1535, 0.498), num_gpus=2)
    assert made.split is not None and (made.split.trainers, made.split.servers) == (1, 1)
    return made.split


def test_a_trainer_and_a_server_as_measured(tmp_path: Path) -> None:
    """H200s, two machines: rollouts with loading the adapter 9.8 and 12.2 s, updates 5.2 and 5.3 s, steps in turns 15.2
    and 17.7 s, overlapping 9.2 and 11.6 s. A new adapter took 1.7 s then."""
    turns, ahead = served(tmp_path, max_staleness=0).seconds, served(tmp_path, max_staleness=1).seconds
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
    assert made.seconds.step - made.seconds.handover + 3.2 == pytest.approx(seconds, rel=0.15)


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
    once, often = plan_of(tmp_path, 3).seconds, plan_of(tmp_path, 3, num_mini_batches=2, update_epochs=2).seconds
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
    assert split.seconds.gather == pytest.approx(gathered - split.seconds.train)


def test_too_few_gpus(tmp_path: Path) -> None:
    made = make_plan(settings_with(tmp_path, model_name="Qwen/Qwen3-32B"), H100, num_gpus=2)
    assert made.split is None and not made.runs
    assert made.verdict == "does not fit: 2 GPUs are too few for a trainer and a server; use more"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    app(
        ["plan", "--gpu", "H200", "--model", "Qwen/Qwen3-14B", "--num-gpus", "8", "--nodes", "2", "--json"],
        standalone_mode=False,
    )
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["num_gpus"] == 16 and found["runs"]
    assert found["split"]["trainers"] + found["split"]["servers"] == 16
    assert found["split"]["tokens_per_second"] == found["tokens_per_second"] > 0


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


def test_the_command_counts_gpus_in_english(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_TENSOR_PARALLEL_SIZE", "2")
    app(["plan", "--gpu", "H200", "--model", "Qwen/Qwen3-4B", "--num-gpus", "3"], standalone_mode=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "trainers 1 emailrl train" in lines and "servers 1 emailrl serve, 2 GPUs" in lines
