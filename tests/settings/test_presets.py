"""Presets of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from settings.places import at

from emailrl.settings import Settings
from emailrl.training.algorithms import num_epochs, questions_per_step

Load = Callable[..., Settings]


@pytest.mark.parametrize(
    ("preset", "values"),
    [
        (
            "quick",
            {
                "data.train_dataset_size": 10,
                "data.eval_dataset_size": 5,
                "training.per_device_train_batch_size": 2,
                "training.num_generations": 2,
                "agent.max_turns": 5,
                "agent.max_tokens": 512,
                "evaluation.eval_steps": 1,
                "evaluation.patience": 4,
                "training.num_train_epochs": 2,
                "training.max_steps": 10,
                "training.warmup_steps": 2,
            },
        ),
        (
            "small",
            {
                "data.train_dataset_size": 100,
                "data.eval_dataset_size": 20,
                "evaluation.eval_steps": 5,
                "evaluation.patience": 8,
            },
        ),
        (
            "medium",
            {
                "data.train_dataset_size": 1000,
                "data.eval_dataset_size": 50,
                "evaluation.eval_steps": 20,
                "evaluation.patience": 3,
            },
        ),
        ("full", {}),
        (
            "paper",
            {
                "model.name": "unsloth/Qwen3-14B-Base",
                "training.per_device_train_batch_size": 8,
                "training.num_generations": 6,
                "evaluation.eval_steps": 30,
                "evaluation.patience": 2,
                "agent.max_turns": 4,
                "agent.search_without_keywords": False,
            },
        ),
        (
            "guide",
            {
                "data.train_dataset_size": 4000,
                "data.eval_dataset_size": 100,
                "training.per_device_train_batch_size": 8,
                "training.num_generations": 6,
                "evaluation.eval_steps": 30,
                "evaluation.patience": 10,
                "training.num_train_epochs": 4,
                "training.max_steps": 2000,
                "agent.max_tokens": 2048,
            },
        ),
    ],
)
def test_presets_set_what_they_say_and_nothing_else(load: Load, preset: str, values: dict[str, Any]) -> None:
    settings, default = load(None, preset).public(), load().public()
    changed = {
        f"{section}.{name}": value
        for section, fields in settings.items()
        for name, value in fields.items()
        if default[section][name] != value
    }
    assert changed == {place: value for place, value in values.items() if at(load(), place) != value}
    assert all(at(load(None, preset), place) == value for place, value in values.items())


@pytest.mark.parametrize(
    ("preset", "epochs"),
    # guide and quick make the epochs they name; the default's and paper's steps are the seeds'.
    [("quick", 2.0), ("guide", 4.0), ("full", 200 / 750), ("paper", 200 / 375), ("small", 8.0), ("medium", 0.8)],
)
def test_how_often_a_preset_goes_through_its_questions(load: Load, preset: str, epochs: float) -> None:
    training, questions = load(None, preset).training, load(None, preset).data.train_dataset_size
    assert num_epochs(training.max_steps, questions_per_step(training), questions) == pytest.approx(epochs)
    assert training.warmup_steps <= training.max_steps / 4


def test_an_unknown_preset_names_the_nearest(refused: Any) -> None:
    line = refused(None, "qick")
    assert line == "Unknown preset 'qick'. Did you mean quick? Presets: quick, small, medium, full, paper, guide."
