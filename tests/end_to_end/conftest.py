"""A policy of a few thousand random weights, a small demo mailbox and settings on them: runs that take seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engines.vllm_stub import VllmStub
from tiny import make_model

from emailrl.mail.build import build_database
from emailrl.mail.demo import ask, make_world
from emailrl.model.policy import load_policy
from emailrl.questions.load import write_scenarios
from emailrl.settings import Settings, load_settings, trust_folder
from emailrl.training import report
from emailrl.training.loop import TrainResult, train

REWARD = '''
def share_of_even_ids(trajectory):
    """A reward that random completions differ in, and that depends on the sampled ids alone."""
    ids = [token for turn in trajectory.turns for token in turn.completion_ids]
    return sum(token % 2 == 0 for token in ids) / len(ids)
'''


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model/``, ``mail.db``, ``questions.jsonl`` and ``reward.py``."""
    folder = tmp_path_factory.mktemp("workplace")
    worlds = [make_world(7, split, number) for number, split in enumerate(["train", "train", "val"])]
    build_database((email for world in worlds for email in world.emails), folder / "mail.db")
    rng = random.Random(7)
    write_scenarios(folder / "questions.jsonl", [ask(world, fact, rng) for world in worlds for fact in world.facts[:5]])
    (folder / "reward.py").write_text(REWARD)
    texts = [email.body for world in worlds for email in world.emails]
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
    make_model(folder / "model", texts=texts, seed=7, tie_word_embeddings=False, **shape)
    return folder


def options_of(workplace: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings by name for a run of 6 steps of 2 questions x 3 rollouts of 8 tokens, evaluated every 2 steps."""
    own = {"model_name": str(workplace / "model"), "output_dir": folder / "grpo", "wandb_mode": "disabled"}
    own |= {"emailrl_db": workplace / "mail.db", "questions": workplace / "questions.jsonl"}
    own |= {"reward": f"{workplace / 'reward.py'}:share_of_even_ids", "min_group_std": 0.0, "temperature": 1.0}
    own |= {"max_steps": 6, "per_device_train_batch_size": 2, "num_generations": 3, "max_tokens": 8, "max_turns": 2}
    own |= {"learning_rate": 1e-2, "warmup_steps": 2, "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.1}
    own |= {"kl_target": 0.01, "kl_horizon": 20, "num_mini_batches": 2, "eval_dataset_size": 3, "eval_steps": 2}
    return own | {"save_steps": 2, "save_total_limit": 2, "patience": 50} | changes


def settle(folder: Path, options: dict[str, Any]) -> None:
    """Put settings into the ``emailrl.toml`` of a folder, and trust it."""
    folder.mkdir(exist_ok=True)
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    (folder / "emailrl.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in shown.items()))
    trust_folder(folder)


COMMON = {"lora_dropout": 0.0, "warmup_steps": 0, "learning_rate": 1e-3, "max_steps": 3, "num_mini_batches": 1}
"""Dropout draws otherwise on each rank; all else is the same however many there are."""

Options = Callable[..., dict[str, Any]]
MakeSettings = Callable[..., Settings]


@pytest.fixture(scope="session")
def options(workplace: Path) -> Options:
    """Settings by name for runs under a folder: ``options(folder, max_steps=3)``."""
    return partial(options_of, workplace)


@pytest.fixture
def make_settings(options: Options, tmp_path: Path) -> MakeSettings:
    """Settings on the workplace with runs under the test's own folder; keywords change them by name."""

    def make(**changes: Any) -> Settings:
        return load_settings(options(tmp_path, **changes))

    return make


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the figures, a third of a short run; ``training/test_loop.py`` checks that a run draws them."""

    def draw_curves(run_dir: Path, settings: Settings) -> list[Path]:
        (run_dir / "curve.svg").touch()
        return [run_dir / "curve.png", run_dir / "curve.svg"]

    monkeypatch.setattr(report, "draw_curves", draw_curves)


@pytest.fixture(scope="session")
def finished(options: Options, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """An uninterrupted run."""
    return train(load_settings(options(tmp_path_factory.mktemp("finished"))))


def serve(workplace: Path) -> VllmStub:
    """A server that samples from the workplace's model."""
    return VllmStub(load_policy(load_settings({"model_name": str(workplace / "model")}, environ={}, cwd=workplace)))


@pytest.fixture
def stub(workplace: Path) -> Iterator[VllmStub]:
    """The same, for a test."""
    server = serve(workplace)
    yield server
    server.close()


SettingsAt = Callable[..., Settings]


@pytest.fixture
def settings_at(options: Options, tmp_path: Path) -> SettingsAt:
    """Settings of a run on ranks under a folder of its own: the same however many there are."""

    def make(name: str, **changes: Any) -> Settings:
        return load_settings(options(tmp_path / name, **COMMON | changes), environ={}, cwd=tmp_path)

    return make
