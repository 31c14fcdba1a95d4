"""Where a run begins, which checkpoint resumes it, what the two must agree on, and what going back removes."""

from __future__ import annotations

import fcntl
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from runs.run_files import settings, write
from tiny import make_checkpoint, make_model

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import METADATA, find_checkpoint, list_checkpoints, read_checkpoint, sha256_of
from emailrl.model.policy import load_policy
from emailrl.questions.load import fingerprint
from emailrl.records.trajectory import Scenario
from emailrl.runs.folder import held
from emailrl.runs.resume import check_agrees, find_start, lost_metrics, resumed, rewind, run_to_resume, with_lora
from emailrl.runs.run import load_state, restore, seed_generators, versions
from emailrl.settings import OutputSettings, Settings, load_settings
from emailrl.training.state import Cursor, RunState


def chosen(wanted: Settings, resume: str, *, overwrite: bool = True) -> tuple[str, int | None] | None:
    """The run that is gone on with, and its checkpoint's step."""
    training, output_dir = wanted.training, wanted.output.output_dir
    any_mode = "mode" not in training.model_fields_set
    directory = run_to_resume(resume, output_dir, training.mode, any_mode=any_mode)
    if directory is None:
        return None
    with resumed(resume, directory, overwrite=overwrite) as checkpoint:
        return directory.name, checkpoint and checkpoint.metadata.step


def test_what_resume_means(tmp_path: Path) -> None:
    wanted = settings(tmp_path / "grpo")
    assert chosen(wanted, "auto") is None
    for which in ("latest", "best"):
        with pytest.raises(EmailRLError, match=r"No .*run has a checkpoint"):
            chosen(wanted, which)
    run = tmp_path / "grpo_masked"
    write(run / "best_model", "best", step=4)
    write(run / "checkpoint-6", step=6)
    for which, step in {"auto": 6, "latest": 6, "best": 4, str(run): 6, str(run / "best_model"): 4}.items():
        assert chosen(wanted, which) == ("grpo_masked", step)
    for which in ("auto", "latest", str(run), str(run / "checkpoint-6")):
        assert chosen(wanted, which, overwrite=False) == ("grpo_masked", 6)
    for which in ("best", str(run / "best_model")):
        with pytest.raises(UsageError, match=r"from step 4 removes .*: steps 5 to 6, checkpoint-6\."):
            chosen(wanted, which, overwrite=False)
    (run / "checkpoint-6" / "trainer_state.pt").rename(tmp_path / "away")
    with pytest.raises(EmailRLError, match=r"checkpoint-6 is missing trainer_state\.pt"):
        chosen(wanted, str(run / "checkpoint-6"))


def test_auto_is_latest_or_a_new_run_also_before_its_first_checkpoint(tmp_path: Path) -> None:
    """Whether a mode was named or not: of that mode, or of any; never a run of sft."""
    any_mode, masked = Settings(output=OutputSettings(output_dir=tmp_path / "grpo")), settings(tmp_path / "grpo")
    with held(tmp_path / "grpo_masked"):
        pass
    assert chosen(any_mode, "auto") == chosen(masked, "auto") == ("grpo_masked", None)
    write(tmp_path / "grpo_masked/final", "final", step=2)
    write(tmp_path / "grpo_simple/final", "final", step=3, mode="simple")
    for resume in ("auto", "latest"):
        assert chosen(any_mode, resume) == ("grpo_simple", 3) and chosen(masked, resume) == ("grpo_masked", 2)
    second = tmp_path / "grpo_masked-2"
    with held(second), pytest.raises(EmailRLError, match=r"Another process is training in .*grpo_masked-2"):
        chosen(masked, "auto")
    assert chosen(any_mode, "auto") == ("grpo_masked-2", None)  # begun after the simple run was written
    assert chosen(masked, "auto") == ("grpo_masked-2", None) and chosen(masked, "latest") == ("grpo_masked", 2)
    write(tmp_path / "grpo_simple/final", "final", step=4, mode="simple")
    assert chosen(any_mode, "auto") == ("grpo_simple", 4)


def test_a_damaged_later_checkpoint_is_named_and_removed_only_on_request(tmp_path: Path) -> None:
    wanted, run = settings(tmp_path / "grpo"), tmp_path / "grpo_masked"
    for step in (1, 2):
        write(run / f"checkpoint-{step}", step=step)
    damaged = run / "checkpoint-2"
    (damaged / "trainer_state.pt").unlink()
    why = f"{damaged} is missing trainer_state.pt."
    with pytest.raises(UsageError) as raised:
        chosen(wanted, "latest", overwrite=False)
    assert raised.value.message == f"{why} Resuming from step 1 removes later work in {run}: step 2, checkpoint-2."
    assert "--overwrite" in raised.value.hint and damaged.is_dir()
    assert chosen(wanted, "latest") == ("grpo_masked", 1)
    assert rewind(run, RunState(step=1)) == [f"removed checkpoint-2, which is damaged: {why}"]
    assert chosen(wanted, "latest", overwrite=False) == ("grpo_masked", 1)  # asked once


@pytest.mark.parametrize("resume", ["auto", "latest", "run", "path"])
def test_the_checkpoint_is_chosen_after_the_run_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str
) -> None:
    """Another process that held the run until now has gone on from step 2 to its end."""
    run = tmp_path / "grpo_masked"
    write(run / "checkpoint-2", step=2)
    flock = fcntl.flock

    def first_another(descriptor: int, operation: int) -> None:
        write(run / "final", "final", step=4)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", first_another)
    named = {"run": str(run), "path": str(run / "final")}
    if resume == "path":
        write(run / "final", "final", step=3)
    assert chosen(settings(tmp_path / "grpo"), named.get(resume, resume)) == ("grpo_masked", 4)


def test_a_model_that_nobody_named_is_the_checkpoints_own(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-1")
    checkpoint = read_checkpoint(tmp_path / "checkpoint-1")
    unnamed = load_settings({}, environ={}, cwd=tmp_path)
    assert unnamed.model.name != "nano"
    start = find_start(unnamed, checkpoint)
    assert start.settings.model.name == "nano" and start.notes == ["no model given: using nano, as in the checkpoint"]
    named = load_settings({"model_name": "Qwen/Qwen3-0.6B"}, environ={}, cwd=tmp_path)
    assert find_start(named, checkpoint).settings.model == named.model
    assert find_start(unnamed).settings.model == unnamed.model


# -- state


def test_state_and_generators_come_back_as_they_were(tmp_path: Path) -> None:
    state = RunState(step=3, cursor=Cursor(1, 4), best_accuracy=0.25, best_step=2, recent_accuracies=[0.1, 0.2])
    seed_generators(11)
    random.random(), np.random.random(), torch.rand(1)
    write(tmp_path / "checkpoint-3", step=3, state=state)
    drawn = random.random(), np.random.random(), torch.rand(3).tolist()
    seed_generators(99)
    checkpoint, updater = read_checkpoint(tmp_path / "checkpoint-3"), Mock()
    restore(checkpoint, updater)
    updater.load_state_dict.assert_called_once_with({"kl_coef": 0.5})
    assert load_state(checkpoint, RunState) == state
    assert (random.random(), np.random.random(), torch.rand(3).tolist()) == drawn


def test_a_trainer_state_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    write(tmp_path / "checkpoint-1")
    torch.save({"state": Payload()}, tmp_path / "checkpoint-1" / "trainer_state.pt")
    with pytest.raises(EmailRLError, match=r"other than tensors and plain values") as refused:
        load_state(read_checkpoint(tmp_path / "checkpoint-1"), RunState)
    assert "weights_only" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


# -- going back


def test_what_lies_beyond_the_step_is_removed(tmp_path: Path) -> None:
    records = ("trajectories/step", "trajectories/eval", "training/step")
    kept = {f"{name}-00000{step}.jsonl" for name in records for step in (3, 4)}
    kept |= {"policy/v-000004", "skipped/step-000004-1.json", "training/thesis.txt"}
    later = {f"{name}-000005.jsonl" for name in records} | {"policy/v-000005", "policy/.v-000005"}
    later |= {"trajectories/.step-000004.jsonl.77", "skipped/.step-000004-2.json"}
    later |= {"skipped/step-000005-1.json", "skipped/step-000005-1.safetensors"}
    for path in (tmp_path / name for name in kept | later):
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if path.parent.name == "policy" else path.touch()
    for step in (2, 4, 6):
        write(tmp_path / f"checkpoint-{step}", step=step)
    write(tmp_path / "final", "final", step=6)
    said = rewind(tmp_path, RunState(step=4))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*") if "checkpoint" not in str(path)}
    assert left == kept
    assert [item.path.name for item in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    assert said == [f"removed {name}, which is after step 4" for name in ("checkpoint-6", "final")]
    write(tmp_path / "final", "final", step=4)
    (tmp_path / "final" / "metadata.json").unlink()
    (told,) = rewind(tmp_path, RunState(step=4))
    assert told.startswith("removed final, which is damaged and will be written again at the end: ")
    assert not (tmp_path / "final").exists() and rewind(tmp_path, RunState(step=4)) == []


def test_a_best_model_from_beyond_is_put_back_from_the_best_step_where_that_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "checkpoint-2", step=2)
    write(tmp_path / "best_model", "best", step=6)
    (said,) = rewind(tmp_path, RunState(step=4, best_accuracy=0.5, best_step=2))
    best = read_checkpoint(tmp_path / "best_model")
    assert (best.metadata.kind, best.metadata.step) == ("best", 2) and "restored to step 2" in said
    assert (best.path / "adapter_model.safetensors").read_text() == "weights of step 2"
    write(tmp_path / "best_model", "best", step=6)
    (said,) = rewind(tmp_path, RunState(step=4, best_accuracy=0.5, best_step=0))
    assert "is from the later step 6" in said and read_checkpoint(tmp_path / "best_model").metadata.step == 6


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_a_best_model_that_is_gone_is_restored_or_selected_anew(tmp_path: Path, how: str) -> None:
    best, of_its_step = tmp_path / "best_model", tmp_path / "checkpoint-2"
    weights = "adapter_model.safetensors"
    write(of_its_step, step=2)
    if how == "damaged":
        write(best, "best", step=2)
        (best / weights).write_text("weights of step 9")
    state = RunState(step=4, best_accuracy=0.5, best_step=2, best_interval=(0.1, 0.9))
    (said,) = rewind(tmp_path, state)
    assert said.startswith(f"best_model, which was {how}, is restored from the checkpoint of its step: ")
    assert read_checkpoint(best).metadata.step == state.best_step == 2
    assert (best / weights).read_text() == "weights of step 2"
    shutil.rmtree(best) if how == "missing" else (best / weights).unlink()
    shutil.rmtree(of_its_step) if how == "missing" else (of_its_step / weights).write_text("weights of step 9")
    (said,) = rewind(tmp_path, state)
    assert said.startswith(f"best_model is {how}, and only a later evaluation selects another: ")
    assert state.best_step is None and state.best_accuracy is None and state.best_interval is None


def test_steps_without_a_line_in_metrics_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step":{step}}}\n' for step in (1, 3, 4, 6)))
    assert lost_metrics(tmp_path, 1) == []
    assert lost_metrics(tmp_path, 5) == [f"{path} has no line of 2 steps (2, 5); curves and reports lack their numbers"]
    path.unlink()
    (said,) = lost_metrics(tmp_path, 12)
    assert "no line of 12 steps (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...)" in said and lost_metrics(tmp_path, 0) == []


# -- where it starts, and what it must have in common with its checkpoint


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 4 on a tiny model, step 7 of the run ``grpo_masked``."""
    folder = tmp_path_factory.mktemp("adapter")
    return make_checkpoint(folder / "checkpoint-7", make_model(folder / "model")).path


def starting(folder: Path, **changes: Any) -> Settings:
    return load_settings({"adapter": folder} | changes, environ={}, cwd=folder.parent)


def test_an_adapters_run_is_told_what_it_was_unless_told_otherwise(tmp_path: Path) -> None:
    own = {"short_message_ids": "true", "tool_dialect": "hermes"}
    folder = make_checkpoint(tmp_path / "checkpoint-7", make_model(tmp_path / "model"), **own).path
    start = find_start(starting(folder, tool_dialect="qwen", count_matches=True))
    agent = start.settings.agent
    assert (agent.short_message_ids, agent.count_matches, start.settings.model.tool_dialect) == (True, True, "qwen")
    told = [note for note in start.notes if "was trained with" in note]
    assert len(told) == 2 and "TOOL_DIALECT=hermes, not qwen" in told[0] and "COUNT_MATCHES=False, not True" in told[1]
    file = folder / "metadata.json"
    file.write_text(file.read_text().replace('"tool_dialect": "hermes"', '"tool_dialect": "loud"'))
    with pytest.raises(UsageError, match="TOOL_DIALECT is not a value"):
        find_start(starting(folder))


def test_a_checkpoints_weights_are_known_by_run_and_step(adapter: Path) -> None:
    start = find_start(starting(adapter))
    assert (start.adapter, start.parent) == (adapter, "grpo_masked:7")
    assert start.settings.model.name == str(adapter.parent / "model")
    assert "the adapter's base" in start.notes[1]
    named = find_start(starting(adapter, model_name="nano"))
    assert named.settings.model.name == "nano"  # load_policy refuses it: another base
    found = find_checkpoint(adapter, adapter)
    resumed = find_start(starting(adapter), replace(found, metadata=replace(found.metadata, parent="sft-1:200")))
    assert (resumed.adapter, resumed.parent) == (adapter, "sft-1:200")


def test_another_programs_adapter_is_known_by_path_and_hash(adapter: Path, tmp_path: Path) -> None:
    plain = shutil.copytree(adapter, tmp_path / "plain")
    (plain / METADATA).unlink()
    assert find_start(starting(plain)).parent == f"{plain} sha256:{sha256_of(plain / 'adapter_model.safetensors')}"


def test_a_model_that_a_run_made_is_the_parent_too(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / METADATA).write_text(json.dumps(json.loads((adapter / METADATA).read_text()) | {"files": {}}))
    assert find_start(load_settings({"model_name": str(tmp_path)}, environ={}, cwd=tmp_path)).parent == "grpo_masked:7"
    with pytest.raises(UsageError, match="is a model, not an adapter"):
        find_start(starting(tmp_path))


def test_a_damaged_adapter_is_refused(adapter: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(adapter, tmp_path / "copy")
    (copy / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(EmailRLError, match="is damaged"):
        find_start(starting(copy))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora_rank": 8}, "LORA_RANK is 8, but the adapter in .* has 4"),
        ({"target_modules": "q_proj"}, "TARGET_MODULES is q_proj, but the adapter in .* has down_proj,gate_proj"),
    ],
)
def test_a_setting_that_says_otherwise_than_the_adapter_is_an_error(
    adapter: Path, given: dict[str, Any], said: str
) -> None:
    start = find_start(starting(adapter, **given))
    with pytest.raises(UsageError, match=said) as refused:
        load_policy(start.settings, adapter=start.adapter, trainable=True)
    assert "an adapter keeps its own" in refused.value.hint


def test_the_adapters_own_settings_are_recorded(adapter: Path) -> None:
    start = find_start(starting(adapter, lora_rank=4, target_modules="all-linear"))
    lora = with_lora(Settings(), load_policy(start.settings, adapter=start.adapter, trainable=True).lora).lora
    modules = "down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj"
    assert (lora.lora_rank, lora.lora_alpha, lora.target_modules) == (4, 32, modules)


def test_the_reference_is_the_base_or_the_start_and_the_adapter_comes_back(adapter: Path) -> None:
    for given, named in (({"reference": "base"}, "base"), ({"beta": 0.0}, "base"), ({}, "start")):
        settings = find_start(starting(adapter, **given)).settings
        assert settings.algorithm.reference == named
    policy, ids = load_policy(settings, adapter=adapter, trainable=True), torch.tensor([[5, 6, 7, 8]])
    parameters = [parameter for _, parameter in policy.trainable_parameters()]
    with torch.no_grad():
        begun = policy.model(input_ids=ids).logits
        for parameter in parameters:
            parameter.add_(0.05)
        moved = policy.model(input_ids=ids).logits
        with pytest.raises(ZeroDivisionError), policy.reference():
            assert torch.equal(policy.model(input_ids=ids).logits, begun)
            raise ZeroDivisionError
        assert torch.equal(policy.model(input_ids=ids).logits, moved) and not torch.allclose(moved, begun, atol=1e-3)
    assert [parameter for _, parameter in policy.trainable_parameters()] == parameters


def scenario(number: int, split: str) -> Scenario:
    return Scenario(f"q{number}", f"Q{number}?", "A", [f"<{number}@x>"], f"{split}@x.org", "2001-05-04", 1.0, split)


TRAIN = [scenario(number, "train") for number in range(4)]
VAL = [scenario(number, "val") for number in range(4, 8)]


def resume(
    folder: Path, train: list[Scenario] = TRAIN, val: list[Scenario] = VAL[:2], database: str = "d", **changes: Any
) -> list[str]:
    """Resume a run on all training and the first two validation questions, with these questions and settings."""
    write(folder / "run" / "checkpoint-1")
    given = {"model_name": "nano", "questions": folder / "questions.jsonl", "db": folder / "mail.db"}
    before, now = (load_settings(given | more, environ={}, cwd=folder) for more in ({}, changes))
    written = read_checkpoint(folder / "run" / "checkpoint-1")
    recorded = replace(
        written.metadata, settings=before.public(), questions_fingerprint=fingerprint([*TRAIN, *VAL[:2]]),
        versions={"emailrl": "0.1.0"}, git_commit="0123456789abcdef",
    )  # fmt: skip
    prints = {"database": database, "questions": fingerprint([*train, *val]), "source": "questions.jsonl"}
    return check_agrees(replace(written, metadata=recorded), now, now.training.mode, **prints)


def test_harmless_changes_are_listed(tmp_path: Path) -> None:
    assert resume(tmp_path) == []
    assert sorted(resume(tmp_path, learning_rate=1e-4, test_set_size=3)) == [
        "changed since the checkpoint: learning_rate 1e-05 -> 0.0001",
        "changed since the checkpoint: test_set_size 100 -> 3",
    ]


def test_an_edited_file_of_the_users_own_is_named(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def score(trajectory): return 1.0")
    settings = load_settings({"reward": f"{mine}:score"}, environ={}, cwd=tmp_path)
    before = versions(settings)
    write(tmp_path / "run" / "checkpoint-1")
    written = read_checkpoint(tmp_path / "run" / "checkpoint-1")
    recorded = replace(written.metadata, settings=settings.public(), versions=before)
    prints = {"database": "d", "questions": recorded.questions_fingerprint, "source": "q.jsonl"}
    checkpoint = replace(written, metadata=replace(recorded, base_model=settings.model.name, database_fingerprint="d"))
    assert check_agrees(checkpoint, settings, recorded.mode, **prints) == []
    mine.write_text("def score(trajectory): return 2.0")
    said = check_agrees(checkpoint, settings, recorded.mode, **prints)
    assert said == ["changed since the checkpoint: the content of REWARD"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_name": "Qwen/Qwen3-0.6B"}, "Resume with --model nano"),
        ({"mode": "simple"}, "Resume with --mode masked"),
        ({"adapter": "elsewhere"}, "was not started from elsewhere"),
        ({"lora_rank": 4}, "Resume with LORA_RANK=16"),
        ({"database": "b"}, r"The database .* has changed since .*gen-db --append and --overwrite"),
        ({"database": "b", "db": Path("b.db")}, r"the database .*mail\.db, not on b\.db\. Resume with --db .*mail\.db"),
        ({"train": TRAIN[:3], "questions": Path("b.jsonl")}, r"QUESTIONS was .*questions\.jsonl, now b\.jsonl"),
    ],
)
def test_what_a_resumed_run_keeps_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resume(tmp_path, **changes)


def test_settings_that_choose_other_questions_are_named(tmp_path: Path) -> None:
    changes = {"train_dataset_size": 3, "seed": 7, "learning_rate": 1e-4, "test_set_size": 3}
    with pytest.raises(UsageError) as refused:
        resume(tmp_path, train=TRAIN[:3], **changes)
    named = refused.value.message.partition("was trained on other questions: ")[2].removesuffix(".").split("; ")
    assert sorted(named) == ["SEED was 42, now 7", "TRAIN_DATASET_SIZE was 3000, now 3"]


def test_changed_questions_are_named_with_the_version_that_drew_them(tmp_path: Path) -> None:
    for changed in ({"train": [replace(TRAIN[0], answer="B"), *TRAIN[1:]]}, {"val": VAL[2:]}):
        with pytest.raises(UsageError, match=r"trained on other questions than .* now gives") as refused:
            resume(tmp_path, **changed)
        assert "emailrl 0.1.0, commit 0123456789ab" in refused.value.hint
