"""What a run recorded, as a source of settings: below flags and environment, above files; nothing that could harm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from emailrl.base.errors import UsageError
from emailrl.settings import Settings, load_settings, trust_folder


def record(**changes: Any) -> dict[str, dict[str, Any]]:
    """What a run with these settings records, ``section__name=value``."""
    values = Settings().public()
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values[section][name] = value
    return values


def test_it_stands_below_flags_and_environment_and_above_files(tmp_path: Path) -> None:
    (tmp_path / "emailrl.toml").write_text("max_steps = 1\nmax_tokens = 1\nseed = 1\nbeta = 0.5\n")
    (tmp_path / ".env").write_text("PATIENCE=1\n")
    recorded = record(training__max_steps=9, training__seed=9, evaluation__patience=9, agent__max_turns=9)
    settings = load_settings({"max_steps": 5}, "quick", cwd=tmp_path, environ={"SEED": "7"}, recorded=recorded)
    assert (settings.training.max_steps, settings.training.seed) == (5, 7)
    assert (settings.evaluation.patience, settings.agent.max_turns) == (9, 9)
    # What the run had by default it keeps, whatever a file or a preset would make of it now.
    assert settings.agent.max_tokens == Settings().agent.max_tokens
    assert settings.algorithm.beta == Settings().algorithm.beta and settings.training.num_generations == 3
    assert "top_p" not in settings.agent.model_fields_set  # and what nobody gave is as if not given


@pytest.mark.parametrize(
    ("key", "value", "flag"),
    [
        ("rewards__reward", "pwn.py:f", "reward"),
        ("rewards__reward", "https://evil.example/score", "reward"),
        ("agent__environment", "pwn:task", "environment"),
        ("model__attn_implementation", "evil/kernel", "attn_implementation"),
        ("vllm__vllm_urls", "http://evil.example:8000", "vllm_urls"),
        ("openai__openai_base_url", "http://evil.example/v1", "openai_base_url"),
        ("rewards__judge_base_url", "http://evil.example/v1", "judge_base_url"),
        ("generation__generator_base_url", "http://evil.example/v1", "generator_base_url"),
    ],
)
def test_code_and_addresses_must_be_given_again(tmp_path: Path, key: str, value: str, flag: str) -> None:
    section, _, name = key.partition("__")

    def taken(given: dict[str, Any], environ: dict[str, str]) -> str:
        settings = load_settings(given, cwd=tmp_path, environ=environ, recorded=record(**{key: value}))
        return str(getattr(getattr(settings, section), name))

    with pytest.raises(UsageError, match=r"a run's folder may not set\. Set it again") as caught:
        taken({}, {})
    assert f"={value}, which" in str(caught.value)
    assert taken({flag: value}, {}) == value
    assert taken({flag: "art_e"}, {}) == "art_e"
    (tmp_path / "emailrl.toml").write_text(f'{flag} = "{value}"\n')
    trust_folder(tmp_path)
    assert taken({}, {}) == value


def test_a_credential_that_the_record_lacks_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "emailrl.toml").write_text('reward = "http://ann:hush@rewards.example/score"\n')
    trust_folder(tmp_path)
    settings = load_settings(cwd=tmp_path, environ={}, recorded=record(rewards__reward="http://rewards.example/score"))
    assert settings.rewards.reward == "http://ann:hush@rewards.example/score"


def test_where_files_are_written_is_never_the_records_to_decide(tmp_path: Path) -> None:
    recorded = record(
        output__output_dir="/etc", output__export_dir="/etc", output__resume="/etc", tracking__tensorboard_dir="/etc",
        rewards__judge_cache="/etc/cache", generation__generator_cache="/etc/cache",
    )  # fmt: skip
    assert load_settings(cwd=tmp_path, environ={}, recorded=recorded) == Settings()
    recorded = record(rewards__reward="heuristic", model__attn_implementation="eager", model__name="nano")
    settings = load_settings(cwd=tmp_path, environ={}, recorded=recorded)  # names and plain words are taken
    assert settings.public() == recorded


def test_wrong_values_are_told_with_their_origin_and_unknown_ones_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"MAX_STEPS='many' \(recorded by the run\): should be a valid integer"):
        load_settings(cwd=tmp_path, environ={}, recorded=record(training__max_steps="many"))
    recorded = record() | {"later": {"invention\x1b[2J": 1}}
    assert load_settings(cwd=tmp_path, environ={}, recorded=recorded) == Settings()
    assert capsys.readouterr().err == "warning: the run recorded unknown settings: invention [2J\n"
