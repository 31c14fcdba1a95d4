"""Rollouts ahead of the trainer, on HTTP servers with a tiny real model: overlap, ages, resume, failures."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from end_to_end.conftest import Options, serve
from engines.vllm_stub import BASE, VllmStub
from hang import must_end
from same_run import assert_same_run

from emailrl.base.errors import EmailRLError
from emailrl.engines.base import Advance, Completion, Request
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.vllm.servers import VllmServers
from emailrl.records import read_records
from emailrl.settings import Settings, load_settings
from emailrl.training.loop import TrainResult, train
from emailrl.training.update import Updater

STEPS, SERVED_PER_STEP = 5, 6
"""Of a step at least one completion for each of 2 questions x 3 rollouts."""


def run_on(server: VllmStub, options: Options, folder: Path, **changes: Any) -> Settings:
    """Settings of a run under a folder on the server."""
    served = {"engine": "vllm", "vllm_urls": server.url, "max_steps": STEPS, "eval_steps": 3, "lora_dropout": 0.0}
    return load_settings(options(folder, **served | {"vllm_return_timeout": 0, "save_steps": 1} | changes), environ={})


Start = Callable[..., TrainResult]


@pytest.fixture
def start(options: Options, stub: VllmStub, tmp_path: Path) -> Start:
    """Trains on the server, under a folder of that name."""

    def run(name: str, *, resume: str | None = None, say: Callable[[str], None] = print, **changes: Any) -> TrainResult:
        return train(run_on(stub, options, tmp_path / name, **changes), resume=resume, progress=say)

    return run


@pytest.fixture(scope="module")
def uninterrupted(options: Options, workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    server = serve(workplace)
    run = train(run_on(server, options, tmp_path_factory.mktemp("whole"))).run_dir
    server.close()
    return run


def metrics(run: Path) -> list[dict[str, Any]]:
    return list(read_records(run / "metrics.jsonl"))


def versions_served(stub: VllmStub) -> Counter[str]:
    """Completions by version."""
    found = (re.search(r"v-\d{6}", name) for name in list(stub.served))
    return Counter(version.group() for version in found if version)


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    until = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        until.wait(0.02)
    raise AssertionError("in vain")


def step_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("step-")]


def test_the_next_steps_rollouts_are_played_while_a_step_is_trained(
    start: Start, stub: VllmStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step t is trained on what the policy of step t - 2 sampled, and only once the server works on step t + 1."""
    original = Updater.train

    def train_once_the_next_is_under_way(self: Updater, *given: Any, step: int) -> Any:
        if step < STEPS:
            wait_for(lambda: versions_served(stub)[f"v-{step - 1:06d}"] > 0)
        return original(self, *given, step=step)

    monkeypatch.setattr(Updater, "train", train_once_the_next_is_under_way)
    steps = metrics(start("run", eval_steps=9).run_dir)
    assert [(step["policy_version_min"], step["policy_version_max"]) for step in steps] == [
        (0, 0), (0, 0), (1, 1), (2, 2), (3, 3)
    ]  # fmt: skip
    assert [step["policy_age_max"] for step in steps] == [0, 1, 1, 1, 1]
    assert [step["policy_age_mean"] for step in steps] == [0, 1, 1, 1, 1]
    assert [step["servers_up"] for step in steps] == [1] * STEPS
    for step in steps:
        assert {"trainer_wait", "sampler_wait"} <= set(step["seconds"])
        assert 0.5 <= step["correction_mean"] <= 5 and step["correction_min"] <= 1 <= step["correction_max"]
    assert list(stub.adapters) == [BASE] and step_threads() == []  # everything let go


def test_how_long_loading_takes_changes_no_weight(start: Start, stub: VllmStub, uninterrupted: Path) -> None:
    stub.before_loading = lambda name: time.sleep(0.5)
    slow = start("slow").run_dir
    assert_same_run(uninterrupted, slow)
    seconds = [step["seconds"] for step in metrics(slow)]
    assert seconds[2]["adapter_load"] > 0.5 and all(0 < each["handover"] < each["total"] for each in seconds)
    files = {path.name for path in (slow / "policy/v-000005").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("wrong", "value", "eval_steps"), [("list_loaded", False, 9), ("ignore_adapters", True, 9), ("untempered", True, 2)]
)
def test_a_version_that_fails_while_a_step_trains_ends_the_run_with_that_step_saved(
    start: Start, stub: VllmStub, wrong: str, value: bool, eval_steps: int
) -> None:
    """The policy after step 1 is loaded while step 2 trains, which may be followed by an evaluation."""
    said: list[str] = []
    stub.before_loading = lambda name: setattr(stub, wrong, value) if "v-000001" in name else None
    server = f"{stub.url.removesuffix('/v1')} (did not load|is not sampling|returns log-prob)"
    with must_end(), pytest.raises(EmailRLError, match=server):
        start("run", say=said.append, eval_steps=eval_steps, save_steps=9, temperature=0.5, learning_rate=0.05)
    assert "Stopped after step 2, saved in" in said[-1] and step_threads() == []
    directory = Path(said[-1].split("saved in ")[1].split(";")[0]).parent
    assert [step["step"] for step in metrics(directory)] == [1, 2]
    if wrong != "untempered":  # found later, but before anything is trained on it
        assert not (directory / "trajectories/step-000003.jsonl").exists()


class OneByOne(TransformersEngine):
    """Samples in process as the server does: every turn by itself, nothing kept between two."""

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        waiting, ended = list(requests), list[Completion]()
        for request in waiting:
            fresh = f"{request.trajectory_id}-{len(ended)}"
            [completion] = super().generate([replace(request, trajectory_id=fresh)])
            completion.trajectory_id = request.trajectory_id
            ended.append(completion)
            if advance is not None and (following := advance(completion)) is not None:
                waiting.append(following)
        return ended


def test_without_staleness_the_bits_are_those_of_taking_turns(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    on_server = start("server", max_staleness=0, importance_correction="off").run_dir
    monkeypatch.setattr("emailrl.engines.local.engine.TransformersEngine", OneByOne)
    how = {"engine": "transformers", "vllm_urls": "", "max_batch_trajectories": 1}
    in_process = start("process", importance_correction="off", **how).run_dir
    for name in ("final", "checkpoint-4"):
        weights = [(run / name / "adapter_model.safetensors").read_bytes() for run in (on_server, in_process)]
        assert weights[0] == weights[1]
    steps = metrics(on_server)
    assert [(step["policy_version_min"], step["policy_age_max"]) for step in steps] == [(n, 0) for n in range(STEPS)]
    assert all("trainer_wait" not in step["seconds"] for step in steps)


def test_an_interrupted_run_goes_on_as_if_uninterrupted(start: Start, uninterrupted: Path, tmp_path: Path) -> None:
    """Stopped after step 3, when step 4's rollouts had ended: they are sampled again from the same policy."""
    directory = tmp_path / "parts/grpo_masked"

    def stop(line: str) -> None:
        if line.startswith(f"Step 3/{STEPS}"):
            wait_for((directory / "trajectories/step-000004.jsonl").exists)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        start("parts", say=stop)
    resumed = start("parts", resume="latest")
    assert_same_run(uninterrupted, resumed.run_dir)


def test_a_run_killed_between_two_checkpoints_goes_on_as_if_uninterrupted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in step 6 after the checkpoint of step 3: step 4 is played by the policy after step 1 again."""
    how = {"save_steps": 3, "max_steps": 6, "eval_steps": 99, "max_staleness": 2}
    whole, original = start("whole", **how).run_dir, Updater.train

    def die(self: Updater, *given: Any, step: int) -> Any:
        if step == 6:
            raise RuntimeError("killed")
        return original(self, *given, step=step)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(Updater, "train", die)
        start("parts", **how)
    assert len(list((whole.parents[1] / "parts/grpo_masked/policy").iterdir())) <= 6
    assert_same_run(whole, start("parts", resume="latest", **how).run_dir)


def test_a_server_killed_in_mid_step_and_coming_back_costs_nothing(
    start: Start, stub: VllmStub, uninterrupted: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def die(line: str) -> None:
        if line.startswith("Step 2/"):
            stub.dies_after = len(stub.served) + 3
            stub.adapters = {BASE: None}

    def back(engine: VllmServers, *given: Any) -> Any:
        stub.dies_after = None
        return waits(engine, *given)

    waits = VllmServers.wait_for_any
    monkeypatch.setattr(VllmServers, "wait_for_any", back)
    stub.served.clear()
    assert_same_run(uninterrupted, start("run", say=die, vllm_return_timeout=300).run_dir)
    told = capsys.readouterr().err
    assert "No vLLM server is left" in told and "is back in use" in told
