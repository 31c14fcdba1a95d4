"""Where a thought ends, and which templates keep thoughts in the history, with those of ten families."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from emailrl.agent.tools import tool_schemas
from emailrl.base.errors import UsageError
from emailrl.engines.renderer import ChatRenderer
from emailrl.engines.thoughts import prefix_note, template_notes, thought_of
from emailrl.model.template import with_arguments
from emailrl.settings import ModelSettings

KEPT, BROKEN, NO_SWITCH = "kept", "broken", None
FAMILIES = {  # template → with THINKING=auto, on, off
    **dict.fromkeys(("glm4moe", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), (KEPT, KEPT, KEPT)),
    "qwen3": (KEPT, KEPT, BROKEN),  # the empty thought of its prompt is missing from the history
    **dict.fromkeys(
        ("lfm2", "lfm2_2_5", "llama3_1", "llama3_2", "qwen2_5", "qwen3_instruct_2507"),
        (KEPT, NO_SWITCH, NO_SWITCH),
    ),
    "gptoss": (KEPT, KEPT, KEPT),
    "nemotron_3_nano": (KEPT, KEPT, KEPT),
}
WITHOUT_TOOLS = {"cohere2", "deepseekv3", "gemma3", "phi3_5"}
CONTROLS = [
    "<think>", "</think>", "<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|end|>",
    "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<end_of_turn>", "<start_of_turn>",
    "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|assistant|>", "<|observation|>", "<｜end▁of▁sentence｜>",
]  # fmt: skip
CHAT = """<tool_call>{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not KEEP else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> PreTrainedTokenizerBase:
    """Qwen's, with the control tokens of the other families."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")
    tokenizer.add_tokens(CONTROLS, special_tokens=True)
    return tokenizer


def note(tokenizer: PreTrainedTokenizerBase, template: str, turns: int = 10, **settings: str) -> str | None:
    own, model = copy.copy(tokenizer), ModelSettings(**settings)
    own.chat_template = template
    return prefix_note(ChatRenderer(with_arguments(own, model), tool_schemas()), model, turns)


def test_the_probe_knows_which_templates_keep_the_prefix(shared_data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    folder = shared_data / "chat_templates"
    if not folder.is_dir():
        pytest.skip(f"no chat templates at {folder}")
    templates = {file.stem: file.read_text() for file in folder.glob("*.jinja")}
    assert templates.keys() == FAMILIES.keys() | WITHOUT_TOOLS

    def outcome(template: str, way: str) -> str | None:
        try:
            said = note(tokenizer, template, thinking=way)
        except UsageError:
            return NO_SWITCH
        return KEPT if said is None else BROKEN

    for name, known in FAMILIES.items():
        assert tuple(outcome(templates[name], way) for way in ("auto", "on", "off")) == known, name
    for name in WITHOUT_TOOLS:
        with pytest.raises(UsageError, match="shows the model no tools"):
            note(tokenizer, templates[name])
    said = note(tokenizer, templates["qwen3"], thinking="off")
    assert said is not None and "earlier turns: " in said and said.endswith("set THINKING=on")


def test_the_note_names_the_cost_and_a_setting_that_was_tried(tokenizer: PreTrainedTokenizerBase) -> None:
    strips, flag = CHAT.replace("KEEP", "false"), CHAT.replace("KEEP", "preserve_thinking")
    said = note(tokenizer, strips)
    assert said is not None and "earlier turns with a thought: " in said and "up to 10 a rollout" in said
    assert said.endswith("set a CHAT_TEMPLATE that keeps them")  # nothing else would help
    assert note(tokenizer, strips, turns=1) is None and note(tokenizer, CHAT.replace("KEEP", "true")) is None
    said = note(tokenizer, flag, chat_template_kwargs='{"a": 1}')
    assert said is not None and said.endswith("""set CHAT_TEMPLATE_KWARGS='{"a": 1, "preserve_thinking": true}'""")
    assert note(tokenizer, flag, chat_template_kwargs='{"preserve_thinking": true}') is None


def test_another_dialect_and_arguments_that_the_template_does_not_read_are_noted(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    own, tools = copy.copy(tokenizer), tool_schemas()
    own.chat_template = CHAT.replace("KEEP", "preserve_thinking")

    def notes(dialect: str, **arguments: object) -> list[str]:
        model = ModelSettings(tool_dialect=dialect, chat_template_kwargs=json.dumps(arguments))
        renderer = ChatRenderer(with_arguments(own, model), tools, dialect)
        return template_notes(renderer, model)

    assert notes("auto") == notes("hermes") == notes("hermes", preserve_thinking=True) == []
    [dialect, unread] = notes("llama", preserve_thinking=True, preserve=1, thinking=False)
    assert "TOOL_DIALECT=llama" in dialect and "hermes" in dialect
    assert unread.endswith("read preserve, thinking")


HARMONY = "<|channel|>analysis<|message|>hm"


@pytest.mark.parametrize(
    ("prompt", "thought", "rest", "is_open"),
    [
        ("a\n", "", "", True),  # it may become one
        ("a\n", "<think>\nhm", "", True), ("a\n<think>\n", "hm", "", True), ("a\n", HARMONY, "", True),
        ("a\n<think>\n", "hm\n</think>", "\n\nIn May", False),
        ("a\n", "\n<think>hm</think>", "b</think>c", False),  # the first end
        ("a\n<think>\n\n</think>\n\n", "", "In <think>", False), ("a\n", "", "In May", False),
        ("a\n", "[THINK]hm[/THINK]", "In May", False),
        ("a", "", "<|channel|>commentary to=functions.f<|message|>{}", False),
        ("a", "", " to=functions.f<|channel|>commentary<|message|>{}", False),
        ("a", HARMONY + "<|end|><|start|>assistant<|channel|>final", "<|message|>May", False),
    ],
)  # fmt: skip
def test_a_thought_is_counted_in_tokens_whether_or_not_its_end_is_one(
    tokenizer: PreTrainedTokenizerBase,
    qwen: PreTrainedTokenizerBase,
    prompt: str,
    thought: str,
    rest: str,
    is_open: bool,
) -> None:
    for renderer in map(ChatRenderer, (tokenizer, qwen)):
        ids = renderer.tokenize(thought)
        assert thought_of(renderer, prompt, [*ids, *renderer.tokenize(rest)]) == (len(ids), is_open)
