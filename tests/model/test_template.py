"""What the settings tell a chat template, with the templates of ten families."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from emailrl.agent.tools import tool_schemas
from emailrl.base.errors import UsageError
from emailrl.model.template import server_arguments, with_arguments
from emailrl.settings import ModelSettings

ASKED = [{"role": "user", "content": "When?"}]
LATER = [
    *ASKED,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIn May."},
    {"role": "user", "content": "So?"},
]
KWARGS = """{"enable_thinking": false, "preserve_thinking": true, "truncate_history_thinking": false,
    "reasoning_effort": "high", "own": {"%} é😀'": ["\\n\\"", 1.5, null, {"a": {}}]}}"""
READS = {  # template → what it reads for thinking on and off
    "glm4moe": "enable_thinking", "nemotron_3_nano": "enable_thinking", "qwen3": "enable_thinking",
    "qwen3_5_nothink": "enable_thinking", "qwen3_5_think": "enable_thinking", "qwen3_6": "enable_thinking",
    "gptoss": "reasoning_effort",
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen(shared_data: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")


@pytest.fixture(scope="module")
def templates(shared_data: Path) -> dict[str, str]:
    folder = shared_data / "chat_templates"
    if not folder.is_dir():
        pytest.skip(f"no chat templates at {folder}")
    return {file.stem: file.read_text() for file in folder.glob("*.jinja")}


def with_template(tokenizer: PreTrainedTokenizerBase, template: Any) -> PreTrainedTokenizerBase:
    own = copy.copy(tokenizer)
    own.chat_template = template
    return own


def test_defaults_at_the_head_are_arguments_in_all_templates(
    qwen: PreTrainedTokenizerBase, templates: dict[str, str]
) -> None:
    model = ModelSettings(chat_template_kwargs=KWARGS)
    given = model.template_arguments
    for template in [
        *templates.values(),
        "\n  {{ own | tojson }} {% if enable_thinking %}x{% endif %}\n",
        "  {% if 1 %}x\n{% endif %}",
    ]:
        plain = with_template(qwen, template)
        told = with_arguments(plain, model)
        assert plain.chat_template == template  # the caller's is left alone
        for conversation in (ASKED, LATER):
            for end in (True, False):
                how: dict[str, Any] = {"tools": tool_schemas(), "tokenize": False, "add_generation_prompt": end}
                text = plain.apply_chat_template(conversation, **how, **given)
                assert told.apply_chat_template(conversation, **how) == text
                other = {"enable_thinking": True, "reasoning_effort": "low"}  # whoever renders has the last word
                asked = plain.apply_chat_template(conversation, **how, **given | other)
                assert told.apply_chat_template(conversation, **how, **other) == asked
    assert with_arguments(plain, ModelSettings()) is plain
    named = with_arguments(
        with_template(qwen, {"default": "{{ x }}", "tool_use": "{{ x }}!"}),
        ModelSettings(chat_template_kwargs='{"x": 7}'),
    )
    assert named.apply_chat_template(ASKED, chat_template=named.chat_template["tool_use"], tokenize=False) == "7!"


def test_thinking_is_what_the_template_reads_and_a_template_that_reads_nothing_is_refused(
    qwen: PreTrainedTokenizerBase, templates: dict[str, str], tmp_path: Path
) -> None:
    how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    assert templates.keys() >= READS.keys()
    for name, template in templates.items():
        plain = with_template(qwen, template)
        for way in ("on", "off"):
            model = ModelSettings(thinking=way)
            if name not in READS:
                with pytest.raises(UsageError, match=f"^THINKING={way} has no effect.*enable_thinking, thinking, reas"):
                    with_arguments(plain, model)
                continue
            value = {"on": "medium", "off": "low"}[way] if READS[name] == "reasoning_effort" else way == "on"
            text = plain.apply_chat_template(ASKED, **how, **{READS[name]: value})
            told = with_arguments(plain, model)
            assert told.apply_chat_template(ASKED, **how) == text
            if name == "qwen3_5_think":  # saved with a checkpoint, it renders as it did
                told.save_pretrained(tmp_path / way)
                assert AutoTokenizer.from_pretrained(tmp_path / way).apply_chat_template(ASKED, **how) == text
    # Others' names and values: DeepSeek's and Granite's, and Mistral's, which refuses values that it does not know.
    granite = with_template(qwen, "{% if thinking %}deep{% else %}quick{% endif %}")
    told = with_arguments(granite, ModelSettings(thinking="on"))
    assert told.apply_chat_template(ASKED, tokenize=False) == "deep"
    strict = "{% if effort not in ['none', 'high'] %}{{ raise_exception('no') }}{% endif %}{{ effort }}"
    mistral = with_template(qwen, strict.replace("effort", "reasoning_effort"))
    assert with_arguments(mistral, ModelSettings(thinking="off")).apply_chat_template(ASKED, tokenize=False) == "none"
    over = ModelSettings(thinking="on", chat_template_kwargs='{"thinking": false}')
    assert with_arguments(granite, over).apply_chat_template(ASKED, tokenize=False) == "quick"


def test_a_chat_server_is_told_the_switches() -> None:
    assert server_arguments(ModelSettings()) == {}
    model = ModelSettings(thinking="off", chat_template_kwargs='{"thinking": true, "a": 1}')
    assert server_arguments(model) == {"enable_thinking": False, "thinking": True, "a": 1}
