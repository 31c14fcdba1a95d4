"""Where a setting's value comes from, which source wins, and what a mistake is answered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emailrl.errors import UsageError
from emailrl.settings import Settings, load_settings
from emailrl.settings.names import leaves

Load = Callable[..., Settings]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`load_settings` in an empty directory, with an empty environment."""

    def call(overrides: dict[str, Any] | None = None, preset: str | None = None, **environ: str) -> Settings:
        return load_settings(overrides, preset, cwd=tmp_path, environ=environ)

    return call


@pytest.fixture
def refused(load: Load) -> Callable[..., str]:
    """The one line that a refused load ends with."""

    def call(*args: Any, **environ: str) -> str:
        with pytest.raises(UsageError) as caught:
            load(*args, **environ)
        assert caught.value.exit_code == 2
        return str(caught.value)

    return call


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
    (("SHOW_TRAJECTORY_DETAILS",), "benchmark.show_trajectory_details", False),
    (("ROLLOUT_CONCURRENCY",), "agent.rollout_concurrency", 10),
    (("LITELLM_TIMEOUT",), "rewards.litellm_timeout", 60),
    (("EMAILRL_DB",), "store.db", Path("data/enron_emails.db")),
]
# A value of each type other than any default, as the environment writes it and as the tree holds it.
WRITTEN = {int: ("7", 7), float: ("0.25", 0.25), bool: ("true", True), type(Path()): ("some/where", Path("some/where"))}


def at(settings: Settings, place: str) -> Any:
    section, field = place.split(".")
    return getattr(getattr(settings, section), field)


@pytest.mark.parametrize(("names", "place", "default"), SPECIFIED, ids=lambda value: str(value))
def test_every_specified_name_and_alias(
    load: Load, tmp_path: Path, names: tuple[str, ...], place: str, default: Any
) -> None:
    assert at(load(), place) == default
    text, value = {"WANDB_MODE": ("offline", "offline")}.get(names[0]) or WRITTEN.get(type(default), ("text", "text"))
    for name in names:
        found = at(load(**{name: text}), place)
        assert (found.get_secret_value() if name == "OPENROUTER_API_KEY" else found) == value
        (tmp_path / ".env").write_text(f"{name}={text}\n")
        found = at(load(), place)
        assert (found.get_secret_value() if name == "OPENROUTER_API_KEY" else found) == value
        (tmp_path / ".env").unlink()


def test_falling_precedence(load: Load, tmp_path: Path) -> None:
    """Each source in turn is taken away, and the next one below shows."""
    (tmp_path / ".env").write_text("MAX_TURNS=3\n")
    (tmp_path / "emailrl.toml").write_text("max_turns = 4\n")
    assert load({"max_turns": 1}, "quick", MAX_TURNS="2").agent.max_turns == 1
    assert load({"max_turns": None}, "quick", MAX_TURNS="2").agent.max_turns == 2
    assert load(None, "quick").agent.max_turns == 3
    (tmp_path / ".env").unlink()
    assert load(None, "quick").agent.max_turns == 4
    (tmp_path / "emailrl.toml").unlink()
    assert load(None, "quick").agent.max_turns == 5
    assert load().agent.max_turns == 10


def test_an_alias_of_a_higher_source_wins_over_the_main_name_of_a_lower_one(load: Load, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("NUM_TRAIN_EPOCHS=5\n")
    assert load(NUM_EPOCHS="3").training.num_train_epochs == 3


def test_empty_variables_count_as_not_set(load: Load, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MAX_STEPS=9\nWANDB_ENTITY=\nSEED\n")
    settings = load(MAX_STEPS="", OPENROUTER_API_KEY="")
    assert settings.training.max_steps == 9
    assert settings.training.seed == 42
    assert settings.tracking.wandb_entity is None
    assert settings.rewards.openrouter_api_key is None


def test_none_empties_an_optional_setting_and_only_such(load: Load, tmp_path: Path, refused: Any) -> None:
    (tmp_path / "emailrl.toml").write_text("clip_low = 0.1\n")
    assert load(CLIP_LOW="none").algorithm.clip_low is None
    assert "BETA='none'" in refused(BETA="none")


def test_dotenv_reads_what_shells_write(load: Load, tmp_path: Path) -> None:
    lines = [
        "\ufeff# comment",
        "export MAX_STEPS=8",
        "",
        "MAX_TURNS=4      # turns",
        'WANDB_NAME="run #1 ${X}"',
        "SEED=1",
        "SEED=2",
    ]
    (tmp_path / ".env").write_text("\n".join(lines), encoding="utf-8")
    settings = load()
    assert (settings.training.max_steps, settings.agent.max_turns, settings.training.seed) == (8, 4, 2)
    assert settings.tracking.wandb_name == "run #1 ${X}"


# Mistakes


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"MAX_STEPS": "many"}, "MAX_STEPS='many' (environment): should be a valid integer"),
        ({"MAX_STEPS": "0"}, "MAX_STEPS='0' (environment): should be greater than or equal to 1."),
        ({"SEED": "9" * 26}, "(environment): should be less than or equal to 9223372036854775807."),
        ({"SEED": "-1"}, "SEED='-1' (environment): should be greater than or equal to 0."),
        ({"TARGET_ACCURACY": "95"}, "TARGET_ACCURACY='95' (environment): should be less than or equal to 1."),
        ({"TEMPERATURE": "1e-320"}, "TEMPERATURE='1e-320' (environment): should be 0 (greedy) or at least 0.001."),
        ({"LEARNING_RATE": "nan"}, "LEARNING_RATE='nan' (environment): should be a finite number."),
        ({"VERBOSE": "perhaps"}, "VERBOSE='perhaps' (environment): should be a valid boolean"),
        ({"VAL_SET_SIZE": "x"}, "VAL_SET_SIZE='x' (environment)"),
        ({"WANDB_MODE": "ofline"}, "should be 'online', 'offline' or 'disabled'. Did you mean offline?"),
        ({"SEED": "a", "MAX_STEPS": "b", "BETA": "c"}, "2 more to mend."),
    ],
)
def test_unreadable_values(refused: Any, environ: dict[str, str], line: str) -> None:
    assert line in refused(**environ)


def test_two_aliases_that_differ_in_one_source(load: Load, refused: Any, tmp_path: Path) -> None:
    assert load(NUM_GENERATIONS="6", TRAJECTORIES_PER_GROUP="6").training.num_generations == 6
    line = refused(NUM_GENERATIONS="6", TRAJECTORIES_PER_GROUP="8")
    assert line.startswith("NUM_GENERATIONS and TRAJECTORIES_PER_GROUP (environment) are the same setting")
    (tmp_path / ".env").write_text("GROUPS_PER_STEP=2\nPER_DEVICE_TRAIN_BATCH_SIZE=3\n")
    assert "(.env line 2)" in refused()


def test_an_unreadable_line_of_dotenv(refused: Any, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SEED=1\n'oops\n")
    assert refused().startswith(".env line 2 cannot be read.")
    (tmp_path / ".env").write_bytes(b"SEED=\xff\n")
    assert refused().startswith(".env cannot be read: it is not UTF-8 text.")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MAX_STEP", "MAX_STEPS"),
        ("LEARNINGRATE", "LEARNING_RATE"),
        ("max_turns", "MAX_TURNS"),
        ("TRAJECTORY_PER_GROUP", "TRAJECTORIES_PER_GROUP"),
        ("OPENROUTER_KEY", "OPENROUTER_API_KEY"),
        ("MODE", "EMAILRL_MODE"),
        ("EMAILRL_DATABASE", "EMAILRL_DB"),
    ],
)
def test_near_misses_in_dotenv_are_warned_of(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, meant: str
) -> None:
    (tmp_path / ".env").write_text(f"SEED=1\n{name}=3\n")
    assert load() == load(SEED="1")
    assert f"warning: .env line 2: {name} is not a setting; did you mean {meant}?\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("GAMMA", "GAMMA in the environment is not read; the setting is EMAILRL_GAMMA."),
        ("MODE", "MODE in the environment is not read; the setting is EMAILRL_MODE."),
        ("EMAILRL_MAX_STEPS", "EMAILRL_MAX_STEPS in the environment is not a setting; did you mean MAX_STEPS?"),
        ("EMAILRL_GAMA", "EMAILRL_GAMA in the environment is not a setting; did you mean EMAILRL_GAMMA?"),
    ],
)
def test_a_variable_that_only_its_prefix_keeps_from_being_read_is_warned_of(
    load: Load, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    assert load(**{name: "0.5"}) == load()
    assert capsys.readouterr().err == f"warning: {told}\n"


def test_every_single_word_that_is_not_read_is_warned_of(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    words = [leaf.field.upper() for leaf in leaves() if leaf.env_names[0] == f"EMAILRL_{leaf.field.upper()}"]
    assert len(words) >= 15
    load(**dict.fromkeys(words, "x"))
    warned = capsys.readouterr().err.splitlines()
    assert sorted(warned) == sorted(
        f"warning: {word} in the environment is not read; the setting is EMAILRL_{word}." for word in words
    )
    load(GAMMA="0.5", EMAILRL_GAMMA="0.9", MODE="")  # who sets the right one knows it; an empty one is not set
    assert capsys.readouterr().err == ""


def test_names_of_other_programs_in_the_environment_pass_in_silence(
    load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    load(WANDB_API_KEY="x", HOME="/root", PATH="/bin", MAX_STEP="3", NAME="host", MODEL="x")
    assert capsys.readouterr().err == ""


def test_names_of_other_programs_pass_in_silence(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = (
        "WANDB_API_KEY HF_TOKEN OPENAI_API_KEY CUDA_VISIBLE_DEVICES OMP_NUM_THREADS PATH HF_HOME WANDB_DIR PORT DEBUG"
    )
    (tmp_path / ".env").write_text("".join(f"{name}=x\n" for name in others.split()))
    load()
    assert capsys.readouterr().err == ""


def test_flags(load: Load, refused: Any) -> None:
    assert load({"model_name": "nano", "db": "x.db", "max_steps": None}).model.name == "nano"
    assert load({"model": "nano"}).model.name == "nano"
    assert refused({"max_steps": 0}).startswith("max_steps='0' (command line): should be greater")
    assert refused({"model_name": ["a"]}).startswith("model_name=\"['a']\" (command line): should be a valid string")
    assert refused({"max_step": 1}) == "unknown setting 'max_step' (command line). Did you mean max_steps?"


# Presets


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
                "training.num_train_epochs": 2,
                "training.max_steps": 10,
            },
        ),
        ("small", {"data.train_dataset_size": 100, "data.eval_dataset_size": 20, "evaluation.eval_steps": 5}),
        ("medium", {"data.train_dataset_size": 1000, "data.eval_dataset_size": 50, "evaluation.eval_steps": 20}),
        ("full", {}),
        (
            "paper",
            {
                "model.name": "unsloth/Qwen3-14B-Base",
                "training.per_device_train_batch_size": 8,
                "training.num_generations": 6,
                "evaluation.eval_steps": 30,
                "agent.max_turns": 4,
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
                "training.num_train_epochs": 4,
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


def test_an_unknown_preset_names_the_nearest(refused: Any) -> None:
    line = refused(None, "qick")
    assert line == "unknown preset 'qick'. Did you mean quick? Presets: quick, small, medium, full, paper, guide."


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


@pytest.mark.parametrize(
    ("text", "line"), [("MAX_STEPS=many\n", 1), ("SEED=1\n\nMAX_STEPS=many\n", 3), ("\n\n# c\nMAX_STEPS=many", 4)]
)
def test_a_mistake_in_dotenv_names_its_line_whatever_blank_lines_stand_before(
    tmp_path: Path, text: str, line: int
) -> None:
    (tmp_path / ".env").write_text(text)
    with pytest.raises(UsageError, match=rf"\.env line {line}\)"):
        load_settings(cwd=tmp_path, environ={})
