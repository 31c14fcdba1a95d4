"""The tree itself, and the presets of sizes: unique names, no secret that leaves it, the root of a mode's runs."""

from __future__ import annotations

import json
import pickle
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from settings.places import at

from emailrl.base.errors import UsageError
from emailrl.settings import Settings, load_settings, run_root
from emailrl.settings.names import leaves, nearest
from emailrl.training.algorithms import num_epochs, questions_per_step

SECRET = "sk-or-v1-do-not-show"
PLAIN_WORDS = {"SHARD", "SEED", "BETA", "REFERENCE", "PATIENCE", "TEMPERATURE", "VERBOSE"}


def test_every_name_belongs_to_one_setting() -> None:
    keys = Counter(name for leaf in leaves() for name in {leaf.key, *leaf.env_names, *leaf.names})
    shared = {name for name, count in keys.items() if count > 1}
    # `name` is a field of [model] alone today; a second one would be told apart by its section.
    assert shared == set()


def test_single_words_of_the_environment_are_prefixed_unless_specified() -> None:
    bare = {name for leaf in leaves() for name in leaf.env_names if "_" not in name}
    assert bare == PLAIN_WORDS


def test_every_setting_is_described() -> None:
    assert [leaf.key for leaf in leaves() if not leaf.description] == []


def test_secrets_stay_inside(tmp_path: Path) -> None:
    settings = load_settings(cwd=tmp_path, environ={"OPENROUTER_API_KEY": SECRET})
    key = settings.rewards.openrouter_api_key
    assert key is not None and key.get_secret_value() == SECRET
    dumps = [repr(settings), str(settings), settings.model_dump_json(), json.dumps(settings.public())]
    assert not any(SECRET in text for text in dumps)
    assert "openrouter_api_key" not in settings.public()["rewards"]


def test_a_secret_is_not_quoted_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "emailrl.toml").write_text("openrouter_api_key = 12345678\n")
    with pytest.raises(UsageError) as caught:
        load_settings(cwd=tmp_path, environ={})
    assert str(caught.value) == "openrouter_api_key (emailrl.toml): should be a valid string."
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_public_drops_the_credentials_of_urls(tmp_path: Path) -> None:
    settings = load_settings({"judge_base_url": "https://me:pass@host/v1"}, cwd=tmp_path, environ={})
    assert settings.public()["rewards"]["judge_base_url"] == "https://host/v1"


def test_public_is_json_and_reads_back(tmp_path: Path) -> None:
    settings = load_settings({"max_steps": 5, "db": "x.db"}, "quick", cwd=tmp_path, environ={})
    assert Settings.model_validate(json.loads(json.dumps(settings.public()))) == settings


def test_the_tree_is_frozen_and_crosses_processes() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.training.max_steps = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("output_dir", "mode", "root"),
    [
        ("outputs/grpo", "masked", "outputs/grpo_masked"),
        ("outputs/grpo", "simple", "outputs/grpo_simple"),
        ("outputs/grpo/", "rollout", "outputs/grpo_rollout"),
        ("outputs/grpo_masked", "masked", "outputs/grpo_masked"),
        ("outputs/masked", "masked", "outputs/masked"),
        ("outputs/grpo_masked", "simple", "outputs/grpo_masked_simple"),
        ("masked/grpo", "masked", "masked/grpo_masked"),
        ("outputs/v1.2", "masked", "outputs/v1.2_masked"),
        ("outputs/unmasked", "masked", "outputs/unmasked_masked"),
        (".", "masked", "masked"),
        ("..", "masked", "../masked"),
    ],
)
def test_run_root_appends_the_mode_once(output_dir: str, mode: str, root: str) -> None:
    assert run_root(Path(output_dir), mode) == Path(root)


def test_nearest() -> None:
    names = ["MAX_STEPS", "MAX_TURNS", "SEED"]
    assert nearest("max-step", names) == "MAX_STEPS"
    assert nearest("MAXTURN", names) == "MAX_TURNS"
    assert nearest("unlike anything", names) is None
    # 3 letters of 4 stand in order in both; all four occur in grpo alone.
    assert nearest("gpro", ["gspo", "grpo"]) == nearest("gpro", ["grpo", "gspo"]) == "grpo"


Load = Callable[..., Settings]
EXPECTED = tomllib.loads("""
[quick]
data = {train_dataset_size = 10, eval_dataset_size = 5}
training.per_device_train_batch_size = 2
training.num_generations = 2
training.num_train_epochs = 2
training.max_steps = 10
training.warmup_steps = 2
agent = {max_turns = 5, max_tokens = 512}
evaluation = {eval_steps = 1, patience = 4}
[small]
data = {train_dataset_size = 100, eval_dataset_size = 20}
evaluation = {eval_steps = 5, patience = 8}
[medium]
data = {train_dataset_size = 1000, eval_dataset_size = 50}
evaluation = {eval_steps = 20, patience = 3}
[full]
[paper]
model = {name = "unsloth/Qwen3-14B-Base"}
training = {per_device_train_batch_size = 8, num_generations = 6}
evaluation = {eval_steps = 30, patience = 2}
agent = {max_turns = 4, search_without_keywords = false}
[guide]
data = {train_dataset_size = 4000, eval_dataset_size = 100}
training = {per_device_train_batch_size = 8, num_generations = 6, num_train_epochs = 4, max_steps = 2000}
evaluation = {eval_steps = 30, patience = 10}
agent = {max_tokens = 2048}
""")


@pytest.mark.parametrize("preset", EXPECTED)
def test_presets_set_what_they_say_and_nothing_else(load: Load, preset: str) -> None:
    settings, default = load(None, preset).public(), load().public()
    values = {
        f"{section}.{name}": value for section, given in EXPECTED[preset].items() for name, value in given.items()
    }
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


def test_an_unknown_preset_names_the_nearest(refused: Callable[..., str]) -> None:
    line = refused(None, "qick")
    assert line == "Unknown preset 'qick'. Did you mean quick? Presets: quick, small, medium, full, paper, guide."
