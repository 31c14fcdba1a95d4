"""Rollouts ahead of the trainer, on HTTP servers with a tiny real model: overlap, ages, resume, failures."""

from __future__ import annotations

import errno
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

from emailrl import engines
from emailrl.base.errors import EmailRLError
from emailrl.engines.base import Advance, Completion, Request
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.renderer import stop_ids
from emailrl.model.policy import Policy
from emailrl.records import read_records
from emailrl.settings import Settings, load_settings
from emailrl.training import rollouts
from emailrl.training.loop import TrainResult, train
from emailrl.training.update import Updater

STEPS, SERVED_PER_STEP = 5, 6
"""Of a step at least one completion for each of 2 questions x 3 rollouts."""


def run_on(server: VllmStub, options: Options, folder: Path, **changes: Any) -> Settings:
    """Settings of a run under a folder on the server."""
    served = {"engine": "vllm", "vllm_urls": server.url, "max_steps": STEPS, "eval_steps": 3, "lora_dropout": 0.0}
    return load_settings(options(folder, **served | {"vllm_return_timeout": 0, "save_steps": 1} | changes), environ={})


Start = Callable[..., TrainResult]
Whole = tuple[Path, Counter[int]]


@pytest.fixture
def start(options: Options, stub: VllmStub, tmp_path: Path) -> Start:
    """Trains on the server, under a folder of that name."""

    def run(name: str, *, resume: str | None = None, say: Callable[[str], None] = print, **changes: Any) -> TrainResult:
        return train(run_on(stub, options, tmp_path / name, **changes), resume=resume, progress=say)

    return run


@pytest.fixture(scope="module")
def uninterrupted(options: Options, workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run's folder, and the completions it asked for."""
    server = serve(workplace)
    run = train(run_on(server, options, tmp_path_factory.mktemp("whole"))).run_dir
    server.close()
    return run, seeds_asked(server)


def metrics(run: Path) -> list[dict[str, Any]]:
    return list(read_records(run / "metrics.jsonl"))


def versions_served(stub: VllmStub) -> Counter[str]:
    """Completions by version."""
    found = (re.search(r"v-\d{6}", name) for name in list(stub.served))
    return Counter(version.group() for version in found if version)


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        until.wait(0.02)
    raise AssertionError("in vain")


def seeds_asked(stub: VllmStub) -> Counter[int]:
    """Completions asked for; the seed stands for trajectory and turn."""
    return Counter(body["seed"] for path, body in stub.http.requests if "prompt" in body and body["seed"])


HUNG: set[threading.Thread] = set()
"""Threads that tests before this one left."""


@pytest.fixture(autouse=True)
def _hung_before() -> None:
    HUNG.update(threading.enumerate())


def step_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("step-") and thread not in HUNG]


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
    for step in steps:
        assert {"trainer_wait", "sampler_wait"} <= set(step["seconds"])
        assert 0.5 <= step["correction_mean"] <= 5 and step["correction_min"] <= 1 <= step["correction_max"]
    assert list(stub.adapters) == [BASE] and step_threads() == []  # everything let go


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_the_next_version_is_loaded_while_a_step_is_trained(
    start: Start, stub: VllmStub, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    """The server loads the policy after step t - 1 only once the update of step t has begun."""
    last, begun = 4, [threading.Event() for _ in range(STEPS)]
    original, in_vain = Updater.train, list[str]()

    def train_and_tell(self: Updater, *given: Any, step: int) -> Any:
        begun[step].set()
        return original(self, *given, step=step)

    def wait(name: str) -> None:
        version = int(re.findall(r"v-(\d{6})", name)[0])
        if 0 < version < last and not begun[version + 1].wait(30):  # the first and the last are evaluated
            in_vain.append(name)

    monkeypatch.setattr(Updater, "train", train_and_tell)
    stub.before_loading = wait
    steps = metrics(start("run", eval_steps=9, max_steps=last, max_staleness=staleness).run_dir)
    assert not in_vain and [step["policy_age_max"] for step in steps] == [min(n, staleness) for n in range(last)]


def test_how_long_loading_takes_changes_no_weight(start: Start, stub: VllmStub, uninterrupted: Whole) -> None:
    stub.before_loading = lambda name: time.sleep(0.5)
    slow = start("slow").run_dir
    assert_same_run(uninterrupted[0], slow)
    seconds = [step["seconds"] for step in metrics(slow)]
    assert seconds[2]["adapter_load"] > 0.5 and all(0 < each["handover"] < each["total"] for each in seconds)
    files = {path.name for path in (slow / "policy/v-000005").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("wrong", "eval_steps"),
    [
        ({"list_loaded": False}, 2),
        ({"list_loaded": False}, 9),
        ({"ignore_adapters": True}, 9),
        ({"untempered": True}, 2),
    ],
)
def test_a_version_that_fails_while_a_step_trains_ends_the_run_with_that_step_saved(
    start: Start, stub: VllmStub, wrong: dict[str, bool], eval_steps: int
) -> None:
    """The policy after step 1 is loaded while step 2 trains, which may be followed by an evaluation."""
    said: list[str] = []

    def fail(name: str) -> None:
        for attribute, value in wrong.items():
            if "v-000001" in name:
                setattr(stub, attribute, value)

    stub.before_loading = fail
    with (
        must_end(60),
        pytest.raises(
            EmailRLError, match=f"{stub.url.removesuffix('/v1')} (did not load|is not sampling|returns log-prob)"
        ),
    ):
        start("run", say=said.append, eval_steps=eval_steps, save_steps=9, temperature=0.5, learning_rate=0.05)
    assert "Stopped after step 2, saved in" in said[-1] and step_threads() == []
    directory = Path(said[-1].split("saved in ")[1].split(";")[0]).parent
    assert [step["step"] for step in metrics(directory)] == [1, 2]
    if "untempered" not in wrong:  # found later, but before anything is trained on it
        assert not (directory / "trajectories/step-000003.jsonl").exists()


def test_a_version_that_fails_during_the_last_step_of_the_last_epoch_ends_the_run_too(
    start: Start, stub: VllmStub, tmp_path: Path
) -> None:
    """Step 2 replaces its groups, all of one reward, by all questions left; step 3's rollouts are never needed."""
    reward = tmp_path / "first_step.py"
    reward.write_text("def varied(trajectory):\n    return float(trajectory.step == 1 and trajectory.id[-1] == '0')\n")
    dapo = {"algorithm": "dapo", "filter_on": "reward", "overlong_buffer": 0}
    said: list[str] = []

    def fail(name: str) -> None:
        if "v-000001" in name:
            wait_for(lambda: any(line.startswith("Step 2: no groups left") for line in said))
            stub.list_loaded = False

    stub.before_loading = fail
    with must_end(60), pytest.raises(EmailRLError, match=r"did not load the adapter .*v-000001"):
        start("run", say=said.append, mode="rollout", num_train_epochs=1, reward=f"{reward}:varied", **dapo)
    assert "Stopped after step 2, saved in" in said[-1]


def test_ctrl_c_while_a_version_is_loaded_ends_the_run_at_once_with_the_step_saved(
    start: Start, stub: VllmStub
) -> None:
    said, over = list[str](), threading.Event()
    stub.before_loading = lambda name: over.wait(60 if "v-000001" in name else 0)

    def stop(line: str) -> None:
        said.append(line)
        if line.startswith("Step 2/"):
            os.kill(os.getpid(), signal.SIGINT)

    with must_end(20), pytest.raises(KeyboardInterrupt):
        start("run", say=stop, eval_steps=9)
    over.set()
    assert "Stopped after step 2, which is saved" in said[-1] and step_threads() == []
    stub.before_loading = lambda name: None
    assert start("run", resume="latest").steps == STEPS


class OneByOne:
    """Samples in process as the server does: every turn by itself, nothing kept between two."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        waiting, ended = list(requests), list[Completion]()
        while waiting:
            request = waiting.pop(0)
            fresh = f"{request.trajectory_id}-{len(ended)}"
            [completion] = self._engine.generate([replace(request, trajectory_id=fresh)])
            completion.trajectory_id = request.trajectory_id
            ended.append(completion)
            if advance is not None and (following := advance(completion)) is not None:
                waiting.append(following)
        return ended


def test_without_staleness_the_bits_are_those_of_taking_turns(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    on_server = start("server", max_staleness=0, importance_correction="off")

    def build(settings: Settings, policy: Policy) -> Any:
        return OneByOne(TransformersEngine(policy.model, stop_ids(policy.tokenizer), max_rows=1))

    monkeypatch.setattr(engines, "build_engine", build)
    in_process = start("process", engine="transformers", vllm_urls="", importance_correction="off")
    for name in ("final", "checkpoint-4"):
        weights = [(run.run_dir / name / "adapter_model.safetensors").read_bytes() for run in (on_server, in_process)]
        assert weights[0] == weights[1]
    steps = metrics(on_server.run_dir)
    assert [(step["policy_version_min"], step["policy_age_max"]) for step in steps] == [(n, 0) for n in range(STEPS)]
    assert all("trainer_wait" not in step["seconds"] for step in steps)


def test_an_interrupted_run_goes_on_as_if_uninterrupted(start: Start, uninterrupted: Whole, tmp_path: Path) -> None:
    """Stopped after step 3, when step 4's rollouts had ended: they are sampled again from the same policy."""
    directory = tmp_path / "parts/grpo_masked"

    def stop(line: str) -> None:
        if line.startswith(f"Step 3/{STEPS}"):
            wait_for((directory / "trajectories/step-000004.jsonl").exists)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        start("parts", say=stop)
    resumed = start("parts", resume="latest")
    assert_same_run(uninterrupted[0], resumed.run_dir)


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


def test_questions_that_depend_on_outcomes_are_asked_once_an_epoch(start: Start) -> None:
    result = start("run", dynamic_filtering=True, filter_on="reward", max_refill_rounds=2)
    asked = [
        record["scenario"]["id"]
        for path in sorted((result.run_dir / "trajectories").glob("step-*.jsonl"))
        for record in read_records(path)
        if record["id"].endswith("-0")
    ]
    epoch = len(set(asked))
    assert len(asked) >= 2 * STEPS and len(set(asked[:epoch])) == epoch
    assert [step["policy_age_max"] for step in metrics(result.run_dir)] == [0, 1, 1, 1, 1]


def test_a_server_killed_in_mid_step_and_coming_back_costs_nothing(
    start: Start, stub: VllmStub, uninterrupted: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(line: str) -> None:
        if line.startswith("Step 2/"):
            stub.dies_after = len(stub.served) + 3
            stub.adapters = {BASE: None}
            threading.Timer(3.0, come_back).start()

    def come_back() -> None:
        stub.dies_after = None

    stub.served.clear()
    assert_same_run(uninterrupted[0], start("run", say=die, vllm_return_timeout=60).run_dir)
    told = capsys.readouterr().err
    assert "No vLLM server is left" in told and "is back in use" in told


def test_a_hung_server_ends_the_run_in_bounded_time_with_the_last_step_saved(start: Start, stub: VllmStub) -> None:
    said: list[str] = []

    def hang(line: str) -> None:
        said.append(line)
        if line.startswith("Step 2/"):
            stub.http.delay = 60

    try:
        with must_end(60), pytest.raises(EmailRLError, match=r"Every rollout failed|No vLLM server available"):
            start("run", say=hang, vllm_timeout=5.0, vllm_retries=0)
    finally:
        stub.http.delay = 0
    assert re.search(r"Stopped after step [23], (saved in|which is saved)", said[-1])
    assert step_threads() == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit("the end"), r"step 3 were ended: the end\. Use --resume latest"),
        (OSError(errno.ENOSPC, "No space left on device", "step-000003.jsonl"), r"No space left .*step-000003\.jsonl"),
    ],
    ids=["dead", "full disk"],
)
def test_what_ends_the_rollouts_of_a_step_ends_the_run_with_the_steps_before_saved(
    start: Start, monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
) -> None:
    original, lines = rollouts.write_trajectories, list[str]()

    def write(path: Path, trajectories: Any) -> None:
        if path.name == "step-000003.jsonl":
            raise error
        original(path, trajectories)

    monkeypatch.setattr(rollouts, "write_trajectories", write)
    with must_end(60), pytest.raises((EmailRLError, OSError), match=said):
        start("run", say=lines.append)
    assert "Stopped after step 2" in lines[-1] and step_threads() == []
    monkeypatch.undo()
    assert start("run", resume="latest").steps == STEPS
