"""``emailrl.toml``: sections and top level, paths, and every way to get a key wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from emailrl.base.errors import UsageError
from emailrl.settings import Settings, load_settings

Read = Callable[[str], Settings]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The settings that the text of one ``emailrl.toml`` gives."""

    def call(text: str) -> Settings:
        (tmp_path / "emailrl.toml").write_text(text)
        return load_settings(cwd=tmp_path, environ={})

    return call


@pytest.mark.parametrize(
    "text",
    [
        'algorithm = "grpo"\nmax_steps = 7',  # a key named like a section
        "[training]\nmax_steps = 7\nnum_epochs = 9\n[model]\n",
        "training = {max_steps = 7}",
        "training.max_steps = 7",
    ],
)
def test_a_key_stands_in_its_section_or_at_the_top(read: Read, text: str) -> None:
    assert read(text).training.max_steps == 7


@pytest.mark.parametrize("text", ['model_name = "nano"', 'model = "nano"', '[model]\nname = "nano"'])
def test_the_names_of_the_model(read: Read, text: str) -> None:
    assert read(text).model.name == "nano"


@pytest.mark.parametrize(("value", "meant"), [("true", "on"), ("false", "off"), ('"auto"', "auto")])
def test_settings_that_are_on_off_or_automatic_take_booleans(read: Read, value: str, meant: str) -> None:
    assert read(f"vllm_enable_sleep = {value}").vllm.vllm_enable_sleep == meant


def test_template_arguments_are_json_or_a_table(read: Read) -> None:
    table = "[model]\nthinking = false\n[model.chat_template_kwargs]\npreserve_thinking = true\nlevels = [1, 2.5]\n"
    model = read(table).model
    assert (model.thinking, model.chat_template_kwargs) == ("off", '{"preserve_thinking": true, "levels": [1, 2.5]}')
    text = """chat_template_kwargs = '{"é": null, "a": {}}'"""
    assert read(text).model.template_arguments == {"é": None, "a": {}} and read("").model.template_arguments == {}
    for wrong in ('"[1]"', '"{"', "'{\"tools\": []}'", "'{\"a b\": 1}'", "'{\"a\": NaN}'", "3", "{ a = 2020-01-01 }"):
        with pytest.raises(UsageError, match=r"^chat_template_kwargs=.*: should be "):
            read(f"[model]\nchat_template_kwargs = {wrong}")


def test_relative_paths_belong_to_the_directory_of_the_file(read: Read, tmp_path: Path) -> None:
    settings = read('db = "mail.db"\nquestions = "/abs/q.jsonl"\n[model]\nchat_template = "~/mine.jinja"\n')
    assert settings.store.db == tmp_path / "mail.db"
    assert settings.data.questions == Path("/abs/q.jsonl") and read("").store.db == Path("data/enron_emails.db")
    assert settings.model.chat_template == Path.home() / "mine.jinja"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("max_step = 7", "unknown key 'max_step' in emailrl.toml. Did you mean max_steps?"),
        ("[training]\nmax_step = 7", "unknown key 'training.max_step' in emailrl.toml. Did you mean max_steps?"),
        ("[training]\nmax_turns = 7", "unknown key 'training.max_turns' in emailrl.toml. max_turns belongs in [ag"),
        ("[trainin]\nmax_steps = 7", "unknown section [trainin] in emailrl.toml. Did you mean training?"),
        ("[max_steps]\nx = 7", "unknown section [max_steps] in emailrl.toml."),
        ("zzzzzz = 7", "unknown key 'zzzzzz' in emailrl.toml. See docs/reference/settings.md."),
        ("max_steps = 'many'", "max_steps='many' (emailrl.toml): should be a valid integer"),
        ("max_steps = true", "max_steps = true in emailrl.toml is not a valid value."),
        ("max_steps = [1]", "max_steps='[1]' (emailrl.toml): should be a valid integer"),
        ("questions = ''", 'questions = "" in emailrl.toml is not a valid value.'),
        ("max_steps = 1\n[training]\nmax_steps = 2", "max_steps and max_steps (emailrl.toml) are the same setting"),
        ("num_epochs = 1\nnum_train_epochs = 2", "num_epochs and num_train_epochs (emailrl.toml) are the same setting"),
        ("max_steps =", "emailrl.toml cannot be read: Invalid value (at end of document)."),
        ("a = " + "[" * 5000, "emailrl.toml cannot be read: it is nested too deeply"),
        ('db = "~no such user/mail.db"', "~no such user/mail.db: no such user"),
    ],
)
def test_mistakes(read: Read, text: str, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    assert str(caught.value).startswith(line)
