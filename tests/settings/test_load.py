"""Where a setting's value comes from, and which source wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from settings.conftest import Load, at

from emailrl.settings import trust_folder
from emailrl.settings.names import leaves

# SPEC's table, name by name: (environment names, where it stands, default).
SPECIFIED: list[tuple[tuple[str, ...], str, Any]] = [
    (("MODEL_NAME",), "model.name", "OpenPipe/Qwen3-14B-Instruct"),
    (("SEED",), "training.seed", 42),
    (("TRAIN_DATASET_SIZE", "TRAINING_DATASET_SIZE"), "data.train_dataset_size", 3000),
    (("EVAL_DATASET_SIZE", "VAL_SET_SIZE"), "data.eval_dataset_size", 100),
    (("MAX_STEPS",), "training.max_steps", 200),
    (("LEARNING_RATE",), "training.learning_rate", 1e-5),
    (("PER_DEVICE_TRAIN_BATCH_SIZE", "GROUPS_PER_STEP"), "training.per_device_train_batch_size", 4),
    (("NUM_TRAIN_EPOCHS", "NUM_EPOCHS"), "training.num_train_epochs", 2),
    (("GRADIENT_ACCUMULATION_STEPS",), "training.gradient_accumulation_steps", 1),
    (("MAX_GRAD_NORM",), "training.max_grad_norm", 1.0),
    (("NUM_GENERATIONS", "TRAJECTORIES_PER_GROUP"), "training.num_generations", 3),
    (("BETA",), "algorithm.beta", 0.01),
    (("EVAL_STEPS",), "evaluation.eval_steps", 10),
    (("SAVE_STEPS",), "output.save_steps", 10),
    (("WARMUP_STEPS",), "training.warmup_steps", 10),
    (("SAVE_TOTAL_LIMIT",), "output.save_total_limit", 3),
    (("TARGET_ACCURACY",), "evaluation.target_accuracy", 0.95),
    (("PATIENCE",), "evaluation.patience", 5),
    (("MAX_TURNS",), "agent.max_turns", 10),
    (("MAX_TOKENS",), "agent.max_tokens", 4096),
    (("TEMPERATURE",), "agent.temperature", 0.7),
    (("MIN_GROUP_STD",), "algorithm.min_group_std", 0.05),
    (("VERBOSE",), "output.verbose", False),
    (("OUTPUT_DIR",), "output.output_dir", Path("outputs/grpo")),
    (("WANDB_PROJECT",), "tracking.wandb_project", "email-agent-grpo"),
    (("WANDB_ENTITY",), "tracking.wandb_entity", None),
    (("WANDB_NAME",), "tracking.wandb_name", "grpo-{mode}"),
    (("WANDB_MODE",), "tracking.wandb_mode", "online"),
    (("OPENROUTER_API_KEY",), "rewards.openrouter_api_key", None),
    (("TEST_SET_SIZE",), "data.test_set_size", 100),
    (("BENCH_SEQUENTIAL",), "benchmark.bench_sequential", False),
    (("SHOW_TRAJECTORY_DETAILS",), "output.show_trajectory_details", False),
    (("ROLLOUT_CONCURRENCY",), "agent.rollout_concurrency", 10),
    (("LITELLM_TIMEOUT",), "rewards.litellm_timeout", 60),
    (("EMAILRL_DB",), "store.db", Path("data/enron_emails.db")),
]


# A value of each type other than any default, as the environment writes it and as the tree holds it.
WRITTEN = {int: ("7", 7), float: ("0.25", 0.25), bool: ("true", True), type(Path()): ("some/where", Path("some/where"))}


@pytest.mark.parametrize(("names", "place", "default"), SPECIFIED, ids=lambda value: str(value))
def test_every_specified_name_and_alias(
    load: Load, tmp_path: Path, names: tuple[str, ...], place: str, default: Any
) -> None:
    assert at(load(), place) == default
    text, value = {"WANDB_MODE": ("offline", "offline")}.get(names[0]) or WRITTEN.get(type(default), ("text", "text"))
    for name in names:
        (tmp_path / ".env").write_text(f"{name}={text}\n")
        trust_folder(tmp_path)
        found = [at(load(), place)]
        (tmp_path / ".env").unlink()
        found.append(at(load(**{name: text}), place))
        assert [getattr(each, "get_secret_value", lambda each=each: each)() for each in found] == [value, value]


def test_falling_precedence(load: Load, tmp_path: Path) -> None:
    """Each source in turn is taken away, and the next one below shows."""
    (tmp_path / ".env").write_text("MAX_TURNS=3\n")
    (tmp_path / "emailrl.toml").write_text("max_turns = 4\n")
    assert load({"max_turns": 1}, "quick", MAX_TURNS="2").agent.max_turns == 1
    assert load({"max_turns": None}, "quick", MAX_TURNS="2").agent.max_turns == 2
    assert load(None, "quick").agent.max_turns == 3
    (tmp_path / ".env").write_text("NUM_TRAIN_EPOCHS=5\n")
    assert load(NUM_EPOCHS="3").training.num_train_epochs == 3  # an alias of a higher source
    assert load(None, "quick").agent.max_turns == 4
    (tmp_path / "emailrl.toml").unlink()
    assert load(None, "quick").agent.max_turns == 5
    assert load().agent.max_turns == 10


def test_empty_variables_count_as_not_set(load: Load, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MAX_STEPS=9\nWANDB_ENTITY=\nSEED\n")
    settings = load(MAX_STEPS="", OPENROUTER_API_KEY="")
    assert (settings.training.max_steps, settings.training.seed) == (9, 42)
    assert settings.tracking.wandb_entity is None and settings.rewards.openrouter_api_key is None


def test_none_empties_an_optional_setting_and_only_such(load: Load, tmp_path: Path, refused: Any) -> None:
    (tmp_path / "emailrl.toml").write_text("clip_low = 0.1\n")
    assert load(CLIP_LOW="none").algorithm.clip_low is None
    assert "BETA='none'" in refused(BETA="none")


def test_dotenv_reads_what_shells_write(load: Load, tmp_path: Path) -> None:
    lines = "\ufeff# comment\nexport MAX_STEPS=8\n\nMAX_TURNS=4      # turns\nSEED=1\nSEED=2\n"
    (tmp_path / ".env").write_text(lines + 'WANDB_NAME="run #1 ${X}"\n', encoding="utf-8")
    settings = load()
    assert (settings.training.max_steps, settings.agent.max_turns, settings.training.seed) == (8, 4, 2)
    assert settings.tracking.wandb_name == "run #1 ${X}"


def test_flags(load: Load, refused: Any) -> None:
    assert load({"model_name": "nano", "db": "x.db", "max_steps": None}).model.name == "nano"
    assert load({"model": "nano"}).model.name == "nano"
    assert refused({"max_steps": 0}).startswith("max_steps='0' (command line): should be greater")
    assert refused({"model_name": ["a"]}).startswith("model_name=\"['a']\" (command line): should be a valid string")
    assert refused({"max_step": 1}) == "unknown setting 'max_step' (command line). Did you mean max_steps?"


def test_every_setting_reads_its_own_default_back(load: Load, tmp_path: Path) -> None:
    """What metadata shows can be written into any source: text of the environment, or a value of the file."""
    written = {leaf: load().public()[leaf.section][leaf.field] for leaf in leaves() if not leaf.secret}
    environ = {leaf.env_names[-1]: str(value) for leaf, value in written.items()}
    assert load(**environ) == load()
    lines = (f"{leaf.key} = {json.dumps(value)}" for leaf, value in written.items() if value is not None)
    (tmp_path / "emailrl.toml").write_text("\n".join(lines))
    settings = load().public()
    for leaf, value in written.items():
        expected = str(tmp_path / value) if leaf.is_path and value is not None else value
        assert settings[leaf.section][leaf.field] == expected
