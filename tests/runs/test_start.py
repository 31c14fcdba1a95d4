"""Where a run's weights begin, and what a resumed run must have in common with its checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs.run_files import write
from tiny import make_checkpoint, make_model

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import METADATA, find_checkpoint, read_checkpoint, sha256_of
from emailrl.model.load import load_policy
from emailrl.model.policy import Policy
from emailrl.questions import fingerprint
from emailrl.records.trajectory import Scenario
from emailrl.runs.start import check_agrees, find_start, with_lora
from emailrl.settings import Settings, load_settings


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 4 on a tiny model, step 7 of the run ``grpo_masked``."""
    folder = tmp_path_factory.mktemp("adapter")
    return make_checkpoint(folder / "checkpoint-7", make_model(folder / "model")).path


def settings(folder: Path, **changes: Any) -> Settings:
    return load_settings({"adapter": folder} | changes, environ={}, cwd=folder.parent)


def test_a_checkpoints_weights_are_known_by_run_and_step(adapter: Path) -> None:
    start = find_start(settings(adapter))
    assert (start.adapter, start.parent) == (adapter, "grpo_masked:7")
    assert start.settings.model.name == str(adapter.parent / "model")
    assert "the adapter's base" in start.notes[1]
    named = find_start(settings(adapter, model_name="nano"))
    assert named.settings.model.name == "nano"  # load_policy refuses it: another base


def test_another_programs_adapter_is_known_by_path_and_hash(adapter: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (plain / name).write_bytes((adapter / name).read_bytes())
    assert find_start(settings(plain)).parent == f"{plain} sha256:{sha256_of(plain / 'adapter_model.safetensors')}"


def test_a_model_that_a_run_made_is_the_parent_too(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / METADATA).write_text(json.dumps(json.loads((adapter / METADATA).read_text()) | {"files": {}}))
    assert find_start(load_settings({"model_name": str(tmp_path)}, environ={}, cwd=tmp_path)).parent == "grpo_masked:7"
    with pytest.raises(UsageError, match="is a model, not an adapter"):
        find_start(settings(tmp_path))


def test_what_is_no_adapter_or_damaged_is_refused(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No checkpoint at"):
        find_start(settings(tmp_path / "gone"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in adapter.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(EmailRLError, match="is damaged"):
        find_start(settings(copy))


def test_resuming_keeps_the_parent(adapter: Path) -> None:
    found = find_checkpoint(adapter, adapter)
    checkpoint = replace(found, metadata=replace(found.metadata, parent="sft-1:200"))
    start = find_start(settings(adapter), checkpoint)
    assert (start.adapter, start.parent) == (adapter, "sft-1:200")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora_rank": 8}, "LORA_RANK is 8, but the adapter in .* has 4"),
        ({"lora_alpha": 8}, "LORA_ALPHA is 8, but the adapter in .* has 32"),
        ({"lora_dropout": 0.1}, "LORA_DROPOUT is 0.1, but the adapter in .* has 0.0"),
        ({"target_modules": "q_proj"}, "TARGET_MODULES is q_proj, but the adapter in .* has down_proj,gate_proj"),
    ],
)
def test_a_setting_that_says_otherwise_than_the_adapter_is_an_error(
    adapter: Path, given: dict[str, Any], said: str
) -> None:
    start = find_start(settings(adapter, **given))
    with pytest.raises(UsageError, match=said) as refused:
        load_policy(start.settings, adapter=start.adapter, trainable=True)
    assert "an adapter keeps its own" in refused.value.hint


def test_settings_that_agree_are_taken_and_the_adapters_own_recorded(adapter: Path) -> None:
    start = find_start(settings(adapter, lora_rank=4, target_modules="all-linear"))
    policy = load_policy(start.settings, adapter=start.adapter, trainable=True)
    lora = with_lora(find_start(settings(adapter)).settings, policy.lora).lora
    assert (lora.lora_rank, lora.lora_alpha) == (4, 32)
    assert lora.target_modules == "down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj"


def test_the_reference_is_the_adapter_one_starts_from(adapter: Path) -> None:
    def reference(**given: Any) -> str:
        return find_start(settings(adapter, **given)).settings.algorithm.reference

    assert reference(beta=0.01) == "start" and reference(reference="base", beta=0.01) == "base"
    assert reference(beta=0.0) == find_start(Settings()).settings.algorithm.reference == "base"


def test_the_reference_is_the_base_or_the_start_and_the_adapter_comes_back(adapter: Path) -> None:
    base, policy = (
        load_policy(find_start(settings(adapter, reference=which)).settings, adapter=adapter, trainable=True)
        for which in ("base", "start")
    )
    ids = torch.tensor([[5, 6, 7, 8]])

    def logits(one: Policy = policy) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = one.model(input_ids=ids).logits
        return result

    begun = logits()
    with base.reference():
        assert base.start is None and not torch.allclose(begun, logits(base), atol=1e-3)
    parameters = [parameter for _, parameter in policy.trainable_parameters()]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.05)
    moved = logits()
    with policy.reference():
        assert torch.equal(logits(), begun)
    assert torch.equal(logits(), moved) and not torch.allclose(moved, begun, atol=1e-3)
    with pytest.raises(ZeroDivisionError), policy.reference():
        raise ZeroDivisionError
    assert torch.equal(logits(), moved)
    assert [parameter for _, parameter in policy.trainable_parameters()] == parameters


def scenario(number: int, split: str) -> Scenario:
    return Scenario(f"q{number}", f"Q{number}?", "A", [f"<{number}@x>"], f"{split}@x.org", "2001-05-04", 1.0, split)


TRAIN = [scenario(number, "train") for number in range(4)]
VAL = [scenario(number, "val") for number in range(4, 8)]


@dataclass
class Run:
    """A run on all training and the first two validation questions."""

    folder: Path

    def __post_init__(self) -> None:
        write(self.folder / "run" / "checkpoint-1")

    @property
    def file(self) -> Path:
        return self.folder / "questions.jsonl"

    def resume(
        self, train: list[Scenario] = TRAIN, val: list[Scenario] = VAL[:2], database: str = "d", **changes: Any
    ) -> list[str]:
        """Resume with these questions and changed settings."""
        given = {"model_name": "nano", "questions": self.file, "db": self.folder / "mail.db"}
        before, now = (load_settings(given | more, environ={}, cwd=self.folder) for more in ({}, changes))
        written = read_checkpoint(self.folder / "run" / "checkpoint-1")
        recorded = replace(
            written.metadata, settings=before.public(), questions_fingerprint=fingerprint([*TRAIN, *VAL[:2]]),
            versions={"emailrl": "0.1.0"}, git_commit="0123456789abcdef",
        )  # fmt: skip
        questions = fingerprint([*train, *val])
        return check_agrees(
            replace(written, metadata=recorded), now, now.training.mode,
            database=database, questions=questions, source=str(self.file),
        )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_harmless_changes_are_listed(run: Run) -> None:
    assert run.resume() == []
    assert sorted(run.resume(learning_rate=1e-4, test_set_size=3)) == [
        "changed since the checkpoint: learning_rate 1e-05 -> 0.0001",
        "changed since the checkpoint: test_set_size 100 -> 3",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_name": "Qwen/Qwen3-0.6B"}, "Resume with --model nano"),
        ({"mode": "simple"}, "Resume with --mode masked"),
        ({"adapter": "elsewhere"}, "was not started from elsewhere"),
        ({"lora_rank": 4}, "Resume with LORA_RANK=16"),
    ],
)
def test_what_a_resumed_run_keeps_is_named(run: Run, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run.resume(**changes)


def test_another_database_is_told_from_a_changed_one(run: Run) -> None:
    with pytest.raises(UsageError, match=r"The database .* has changed since .*gen-db --append and --overwrite"):
        run.resume(database="other")
    with pytest.raises(UsageError, match=r"on the database .*mail\.db, not on .*new\.db\. Resume with --db .*mail\.db"):
        run.resume(database="other", db=run.folder / "new.db")


def test_settings_that_choose_other_questions_are_named(run: Run) -> None:
    changes = {"train_dataset_size": 3, "seed": 7, "learning_rate": 1e-4, "test_set_size": 3}
    with pytest.raises(UsageError) as refused:
        run.resume(train=TRAIN[:3], **changes)
    named = refused.value.message.partition("was trained on other questions: ")[2].removesuffix(".").split("; ")
    assert sorted(named) == ["SEED was 42, now 7", "TRAIN_DATASET_SIZE was 3000, now 3"]
    with pytest.raises(UsageError, match=r"QUESTIONS was .*questions\.jsonl, now .*b\.jsonl"):
        run.resume(train=TRAIN[:3], questions=run.folder / "b.jsonl")


def test_changed_questions_are_named_with_the_version_that_drew_them(run: Run) -> None:
    for changed in ({"train": [replace(TRAIN[0], answer="B"), *TRAIN[1:]]}, {"val": VAL[2:]}):
        with pytest.raises(UsageError, match=r"trained on other questions than .* now gives") as refused:
            run.resume(**changed)
        assert "emailrl 0.1.0, commit 0123456789ab" in refused.value.hint
