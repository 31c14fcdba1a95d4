"""The tree itself, and the presets of sizes: unique names, no secret that leaves it, the root of a mode's runs."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from settings.conftest import Load

from emailrl.base.errors import UsageError
from emailrl.checkpoints import run_root
from emailrl.settings import PRESETS, Settings, beyond_defaults, load_settings
from emailrl.settings.names import by_name, leaves, nearest
from emailrl.training.algorithms import num_epochs, questions_per_step

SECRET = "sk-or-v1-do-not-show"
PLAIN_WORDS = {"SHARD", "SEED", "BETA", "REFERENCE", "PATIENCE", "TEACHER", "TEMPERATURE", "THINKING", "VERBOSE"}


def test_every_name_belongs_to_one_setting() -> None:
    keys = Counter(name for leaf in leaves() for name in {leaf.key, *leaf.env_names, *leaf.names})
    shared = {name for name, count in keys.items() if count > 1}
    # `name` is a field of [model] alone today; a second one would be told apart by its section.
    assert shared == set() and all(leaf.description for leaf in leaves())
    # Single words of the environment are prefixed unless specified.
    assert {name for leaf in leaves() for name in leaf.env_names if "_" not in name} == PLAIN_WORDS


def test_secrets_stay_inside(tmp_path: Path) -> None:
    urls = {"judge_base_url": "https://me:pass@host/v1"}
    settings = load_settings(urls, cwd=tmp_path, environ={"OPENROUTER_API_KEY": SECRET})
    assert settings.public()["rewards"]["judge_base_url"] == "https://host/v1"
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


def test_public_is_json_and_reads_back(tmp_path: Path) -> None:
    settings = load_settings({"max_steps": 5, "db": "x.db"}, "quick", cwd=tmp_path, environ={})
    assert Settings.model_validate(json.loads(json.dumps(settings.public()))) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("output_dir", "mode", "root"),
    [
        ("outputs/grpo", "masked", "outputs/grpo_masked"),
        ("outputs/grpo_masked", "masked", "outputs/grpo_masked"),
        ("outputs/masked", "masked", "outputs/masked"),
        ("outputs/grpo_masked", "simple", "outputs/grpo_masked_simple"),
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


@pytest.mark.parametrize(
    ("preset", "epochs"),
    # guide and quick make the epochs they name; the default's and paper's steps are the seeds'.
    [
        ("quick", 2.0),
        ("guide", 4.0),
        ("full", 200 / 750),
        ("paper", 200 / 375),
        ("small", 8.0),
        ("medium", 0.8),
        ("recommended", 200 / 375),
    ],
)
def test_presets_set_what_they_say_and_repeat_their_questions(load: Load, preset: str, epochs: float) -> None:
    training, questions = load(None, preset).training, load(None, preset).data.train_dataset_size
    assert num_epochs(training.max_steps, questions_per_step(training), questions) == pytest.approx(epochs)
    assert training.warmup_steps <= training.max_steps / 4
    settings = load(None, preset).public()  # the values themselves are pinned by the page of settings
    changed = {name: settings[by_name()[name].section][by_name()[name].field] for name in PRESETS[preset]}
    assert changed == PRESETS[preset]


def test_an_unknown_preset_names_the_nearest(refused: Callable[..., str]) -> None:
    line = refused(None, "qick")
    assert (
        line
        == "Unknown preset 'qick'. Did you mean quick? Presets: recommended, quick, small, medium, full, paper, guide."
    )


def test_a_preset_gives_way_to_another_algorithm_and_to_no_refills(load: Load) -> None:
    def clip_and_filter(**environ: str) -> tuple[float | None, str | None]:
        wanted = load(None, "recommended", **environ).algorithm
        return wanted.clip_high, wanted.filter_on

    assert clip_and_filter() == clip_and_filter(EMAILRL_ALGORITHM="grpo") == (0.28, "spread")
    assert clip_and_filter(EMAILRL_ALGORITHM="gspo") == (None, "spread")
    assert clip_and_filter(EMAILRL_ALGORITHM="gspo", CLIP_HIGH="0.1") == (0.1, "spread")
    assert clip_and_filter(DYNAMIC_FILTERING="false") == (0.28, None)


def test_what_overrules_a_typed_preset_is_named_once(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "emailrl.toml").write_text(
        "temperature = 0.7\nmax_turns = 3\nbeta = 0\n[training]\nlearning_rate = 2e-5\nnum_generations = 8\n"
    )
    settings = load({"lr_scheduler": "cosine"}, "recommended", NUM_MINI_BATCHES="3")
    assert (settings.training.learning_rate, settings.training.num_mini_batches) == (2e-5, 3)
    [line] = capsys.readouterr().err.splitlines()
    names = re.findall(r"(\w+)=(\S+) \((.*?)\)", line)
    assert sorted(names) == [  # neither equal values, nor what is typed too, nor what the preset does not set
        ("NUM_MINI_BATCHES", "3", "environment"),
        ("learning_rate", "2e-05", "emailrl.toml"),
        ("temperature", "0.7", "emailrl.toml"),
    ]
    load(None, None), load({"temperature": 1.0, "learning_rate": "auto"}, "recommended")
    assert capsys.readouterr().err == ""


def test_a_rate_is_a_number_or_auto(load: Load, refused: Callable[..., str]) -> None:
    assert load(None, LEARNING_RATE="2e-5").training.learning_rate == 2e-5
    assert load({"learning_rate": "auto"}).training.learning_rate == "auto"
    assert "Did you mean auto?" in (line := refused(None, LEARNING_RATE="aut")) and "more to fix" not in line
    assert "1 more to fix" in refused(None, LEARNING_RATE="2", MAX_STEPS="none")
    assert "LEARNING_RATE" not in beyond_defaults(load({"learning_rate": 1e-5}))
    assert beyond_defaults(load(None, "recommended")) == ""
    assert "TEMPERATURE=1.0, LEARNING_RATE=auto," in beyond_defaults(load())
