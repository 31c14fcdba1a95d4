"""What the settings tell a chat template, with the templates of ten families."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from emailrl.agent.tools import tool_schemas
from emailrl.base.errors import UsageError
from emailrl.model.template import with_arguments
from emailrl.settings import ModelSettings

THOUGHT = "<think>\nhm\n</think>\n\nIn May."
ASKED = [{"role": "user", "content": "When?"}]
LATER = [*ASKED, {"role": "assistant", "content": THOUGHT}, {"role": "user", "content": "So?"}]
KWARGS = """{"enable_thinking": false, "preserve_thinking": true, "truncate_history_thinking": false,
    "reasoning_effort": "high", "own": {"%} é😀'": ["\\n\\"", 1.5, null, {"a": {}}]}}"""
READS = dict.fromkeys(
    ["glm4moe", "nemotron_3_nano", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"], "enable_thinking"
) | {"gptoss": "reasoning_effort"}
"""Template → what it reads for thinking on and off; the others have no switch."""
STRICT = "{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('') }}{% endif %}{{ reasoning_effort }}"


def test_a_template_with_defaults_renders_as_with_arguments(shared_data: Path, tmp_path: Path) -> None:
    tokenizer, folder = AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer"), shared_data / "chat_templates"
    if not folder.is_dir():
        pytest.skip(f"no chat templates at {folder}")
    templates = {file.stem: file.read_text() for file in folder.glob("*.jinja")}
    assert templates.keys() > READS.keys()
    templates |= {"line": "\n  {{ own | tojson }} {% if 1 %}x{% endif %}\n", "block": "  {% if 1 %}x\n{% endif %}"}
    model, how = ModelSettings(chat_template_kwargs=KWARGS), {"tokenize": False, "tools": tool_schemas()}

    def with_template(template: str) -> PreTrainedTokenizerBase:
        own = copy.copy(tokenizer)
        own.chat_template = template
        return own

    def render(tokenizer: PreTrainedTokenizerBase, **arguments: Any) -> list[Any]:
        return [
            tokenizer.apply_chat_template(chat, add_generation_prompt=end, **how, **arguments)
            for chat in (ASKED, LATER)
            for end in (True, False)
        ]

    for name, template in templates.items():
        plain, other = with_template(template), {"enable_thinking": True, "reasoning_effort": "low"}
        told, given = with_arguments(plain, model), model.template_arguments
        assert render(told) == render(plain, **given) and plain.chat_template == template
        assert render(told, **other) == render(plain, **given | other)  # whoever renders has the last word
        assert with_arguments(plain, ModelSettings()) is plain
        for way in ("on", "off"):
            if name not in READS:
                with pytest.raises(UsageError, match=f"^THINKING={way} has no effect.*enable_thinking, thinking, reas"):
                    with_arguments(plain, ModelSettings(thinking=way))
                continue
            value = {"on": "medium", "off": "low"}[way] if name == "gptoss" else way == "on"
            assert render(with_arguments(plain, ModelSettings(thinking=way))) == render(plain, **{READS[name]: value})
    told = with_arguments(with_template(templates["qwen3"]), ModelSettings(thinking="off"))
    told.save_pretrained(tmp_path)  # as with a checkpoint
    assert render(AutoTokenizer.from_pretrained(tmp_path)) == render(told)
    # DeepSeek's and Granite's switch, which CHAT_TEMPLATE_KWARGS overrides; Mistral's, which refuses other values.
    for template, thinking, kwargs, text in (
        ("{{ thinking }}", "on", "", "True"), ("{{ thinking }}", "on", '{"thinking": 7}', "7"),
        (STRICT, "off", "", "none"),
    ):  # fmt: skip
        model = ModelSettings(thinking=thinking, chat_template_kwargs=kwargs)
        assert set(render(with_arguments(with_template(template), model))) == {text}
