"""What a mistake in a setting is answered with, and what looks like one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from settings.conftest import Load

from emailrl.base.errors import UsageError
from emailrl.settings import load_settings, trust_folder
from emailrl.settings.names import leaves


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"MAX_STEPS": "many"}, "MAX_STEPS='many' (environment): should be a valid integer"),
        ({"MAX_STEPS": "0"}, "MAX_STEPS='0' (environment): should be greater than or equal to 1."),
        ({"SEED": "9" * 26}, "(environment): should be less than 9223372036854775808."),
        ({"TEMPERATURE": "1e-320"}, "TEMPERATURE='1e-320' (environment): should be 0 (greedy) or at least 0.001."),
        ({"LEARNING_RATE": "nan"}, "LEARNING_RATE='nan' (environment): should be a finite number."),
        ({"CLIP_HIGH": "1e300"}, "CLIP_HIGH='1e300' (environment): should be at most 1e30 in magnitude."),
        ({"NUM_GENERATIONS": "1000000000"}, "should be less than or equal to 10000."),
        ({"LORA_RANK": "1000000"}, "LORA_RANK='1000000' (environment): should be less than or equal to 4096."),
        ({"VERBOSE": "perhaps"}, "VERBOSE='perhaps' (environment): should be a valid boolean"),
        ({"VAL_SET_SIZE": "x"}, "VAL_SET_SIZE='x' (environment)"),
        ({"WANDB_MODE": "ofline"}, "should be 'online', 'offline' or 'disabled'. Did you mean offline?"),
        ({"SEED": "a", "MAX_STEPS": "b", "BETA": "c"}, "2 more to fix."),
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
    (tmp_path / ".env").write_text("\n\n# c\nMAX_STEPS=many")
    assert ".env line 4)" in refused()
    (tmp_path / ".env").write_bytes(b"SEED=\xff\n")
    assert refused().startswith(".env cannot be read: it is not UTF-8 text.")


@pytest.mark.parametrize("name", [".env", "emailrl.toml"])
def test_a_settings_file_that_never_ends_is_not_read(refused: Any, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("#" * 2**20)
    assert load_settings(cwd=tmp_path, environ={})
    file.write_text("#" * (2**20 + 1))
    assert refused().startswith(f"{name} is larger than 1 MiB.")
    file.unlink()
    file.symlink_to("/dev/null")
    assert refused().startswith(f"{name} is not a file.")
    file.unlink()
    os.mkfifo(file)
    assert refused().startswith(f"{name} is not a file.")
    file.unlink()
    file.mkdir()
    assert refused().startswith(f"{name} cannot be read: Is a directory. Fix or remove /")


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        (".env line 2: MAX_STEP", "MAX_STEPS"),
        (".env line 2: TRAJECTORY_PER_GROUP", "TRAJECTORIES_PER_GROUP"),
        (".env line 2: OPENROUTER_KEY", "OPENROUTER_API_KEY"),
        (".env line 2: MODE", "EMAILRL_MODE"),
        (".env line 2: EMAILRL_DATABASE", "EMAILRL_DB"),
        ("EMAILRL_MAX_STEPS in the environment", "MAX_STEPS"),
        ("EMAILRL_GAMA in the environment", "EMAILRL_GAMMA"),
    ],
)
def test_near_misses_are_warned_of(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], told: str, meant: str
) -> None:
    name = told.removeprefix(".env line 2: ").removesuffix(" in the environment")
    (tmp_path / ".env").write_text(f"SEED=1\n{name}=3\n" if told.startswith(".env") else "SEED=1\n")
    given = {} if told.startswith(".env") else {name: "0.5"}
    settings = load(**given)
    assert capsys.readouterr().err == f"warning: {told} is not a setting; did you mean {meant}?\n"
    assert settings == load(SEED="1")


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


def test_names_of_other_programs_pass_in_silence(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = "WANDB_API_KEY HF_TOKEN OPENAI_API_KEY CUDA_VISIBLE_DEVICES OMP_NUM_THREADS PATH HF_HOME PORT DEBUG"
    (tmp_path / ".env").write_text("".join(f"{name}=x\n" for name in others.split()))
    trust_folder(tmp_path)
    load(WANDB_API_KEY="x", HOME="/root", PATH="/bin", MAX_STEP="3", NAME="host", MODEL="x")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ('{"api_key": "hush-1"}', "api_key"),
        ('{"api_k": "hush-1"}', "api_k"),  # vLLM's command line takes abbreviations
        ('{"hf_token":"hush-1"}', "hf_token"),
        ('{"kv_transfer_config": {"access_key": "hush-1"}}', "access_key"),
        ("--api-key=hush-1", "api_key"),
        ('{"api_key": "hush-1', "api_key"),
    ],
)
def test_a_secret_among_engine_arguments_is_refused_without_its_value(load: Load, given: str, name: str) -> None:
    with pytest.raises(UsageError) as error:
        load(VLLM_ENGINE_ARGS=given)
    assert f"VLLM_ENGINE_ARGS cannot hold a secret ({name})" in str(error.value) and "hush" not in str(error.value)
    given = '{"tokenizer": "x", "max_num_batched_tokens": 4096, "hf_overrides": {"eos_token_id": 3}}'
    assert load(VLLM_ENGINE_ARGS=given).vllm.vllm_engine_args == given  # about tokens, no secret
