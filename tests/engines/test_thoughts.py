"""Where a thought ends, and which templates keep thoughts in the history, with those of ten families."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from emailrl.agent.tools import tool_schemas
from emailrl.base.errors import UsageError
from emailrl.engines.renderer import ChatRenderer
from emailrl.engines.thoughts import prefix_note, thought_of
from emailrl.model.template import with_arguments
from emailrl.settings import ModelSettings

KEPT, BROKEN, REFUSED, NO_SWITCH = "kept", "broken", "refused", None
FAMILIES = {  # template → with THINKING=auto, on, off
    "cohere2": (REFUSED, NO_SWITCH, NO_SWITCH),  # it knows no role but user and assistant
    "deepseekv3": (BROKEN, NO_SWITCH, NO_SWITCH),
    "gemma3": (REFUSED, NO_SWITCH, NO_SWITCH),
    "glm4moe": (KEPT, KEPT, KEPT),
    "lfm2": (KEPT, NO_SWITCH, NO_SWITCH),
    "lfm2_2_5": (KEPT, NO_SWITCH, NO_SWITCH),
    "llama3_1": (KEPT, NO_SWITCH, NO_SWITCH),
    "llama3_2": (KEPT, NO_SWITCH, NO_SWITCH),
    "phi3_5": (KEPT, NO_SWITCH, NO_SWITCH),
    "qwen2_5": (KEPT, NO_SWITCH, NO_SWITCH),
    "qwen3": (KEPT, KEPT, BROKEN),  # the empty thought of its prompt is missing from the history
    "qwen3_5_nothink": (KEPT, KEPT, KEPT),
    "qwen3_5_think": (KEPT, KEPT, KEPT),
    "qwen3_6": (KEPT, KEPT, KEPT),
    "qwen3_instruct_2507": (KEPT, NO_SWITCH, NO_SWITCH),
}
BY_DIALECT = {"gptoss", "nemotron_3_nano"}  # whether they keep it depends on how their own calls are told again
CONTROLS = [
    "<think>", "</think>", "<|eot_id|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|end|>",
    "<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<end_of_turn>", "<start_of_turn>",
    "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|assistant|>", "<|observation|>", "<｜end▁of▁sentence｜>",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> PreTrainedTokenizerBase:
    """Qwen's, with the control tokens of the other families."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")
    tokenizer.add_tokens(CONTROLS, special_tokens=True)
    return tokenizer


def renderer_of(tokenizer: PreTrainedTokenizerBase, template: str, model: ModelSettings) -> ChatRenderer:
    own = copy.copy(tokenizer)
    own.chat_template = template
    return ChatRenderer(with_arguments(own, model), tool_schemas())


def outcome(tokenizer: PreTrainedTokenizerBase, template: str, model: ModelSettings) -> str | None:
    try:
        note = prefix_note(renderer_of(tokenizer, template, model), model, 10)
    except UsageError:
        return NO_SWITCH
    if note is None:
        return KEPT
    return REFUSED if note.startswith("the chat template cannot render a tool's result: ") else BROKEN


def test_the_probe_knows_which_templates_keep_the_prefix(shared_data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    folder = shared_data / "chat_templates"
    if not folder.is_dir():
        pytest.skip(f"no chat templates at {folder}")
    templates = {file.stem: file.read_text() for file in folder.glob("*.jinja")}
    assert templates.keys() == FAMILIES.keys() | BY_DIALECT
    found = {
        name: tuple(outcome(tokenizer, templates[name], ModelSettings(thinking=way)) for way in ("auto", "on", "off"))
        for name in FAMILIES
    }
    assert found == FAMILIES


CHAT = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' and KEEP is false else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_the_note_names_the_cost_and_a_setting_that_was_tried(
    shared_data: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    def note(template: str, max_turns: int = 10, **settings: str) -> str | None:
        model = ModelSettings(**settings)
        return prefix_note(renderer_of(tokenizer, template, model), model, max_turns)

    strips = CHAT.replace("KEEP", "false")
    said = note(strips)
    assert said is not None and "earlier turns with a thought: " in said and "up to 10 a rollout" in said
    assert said.endswith("set a CHAT_TEMPLATE that keeps them")  # nothing else would help
    assert note(strips, max_turns=1) is None and note(CHAT.replace("KEEP", "true")) is None
    flag = CHAT.replace("KEEP", "(preserve_thinking is defined and preserve_thinking)")
    said = note(flag, chat_template_kwargs='{"a": 1}')
    assert said is not None and said.endswith("""set CHAT_TEMPLATE_KWARGS='{"a": 1, "preserve_thinking": true}'""")
    assert note(flag, chat_template_kwargs='{"preserve_thinking": true}') is None
    # A switch decides whether there are thoughts; the template's own default counts for auto.
    switch = (
        strips + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    )
    said = note(switch.replace("<think>\n\n</think>\n\n", "(quick)"))
    assert said is not None and "earlier turns: " in said
    if (qwen3 := shared_data / "chat_templates" / "qwen3.jinja").is_file():
        said = note(qwen3.read_text(), thinking="off")
        assert said is not None and "earlier turns: " in said and said.endswith("set THINKING=on")


@pytest.mark.parametrize(
    ("prompt", "sampled", "thought", "is_open"),
    [
        ("assistant\n", "", "", True),  # it may become one
        ("assistant\n", "<think>\nhm", "<think>\nhm", True),
        ("assistant\n<think>\n", "hm", "hm", True),
        ("assistant\n<think>\n", "hm\n</think>\n\nIn May", "hm\n</think>", False),
        ("assistant\n", "\n<think>hm</think>a</think>b", "\n<think>hm</think>", False),  # the first end
        ("assistant\n<think>\n\n</think>\n\n", "In May", "", False),
        ("assistant\n", "In <think>", "", False),
        ("assistant\n", "[THINK]hm[/THINK]In May", "[THINK]hm[/THINK]", False),
        ("assistant\n", "<|channel|>analysis<|message|>hm", "<|channel|>analysis<|message|>hm", True),
        ("a", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>May",
         "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("single", [True, False])
def test_a_thought_is_counted_in_tokens_whether_or_not_its_end_is_one_token(
    tokenizer: PreTrainedTokenizerBase, qwen: PreTrainedTokenizerBase, single: bool,
    prompt: str, sampled: str, thought: str, is_open: bool,
) -> None:  # fmt: skip
    renderer = ChatRenderer(tokenizer if single else qwen)
    # As sampled: a token may be split where the tokenizer would not.
    ids = [*renderer.tokenize(thought), *renderer.tokenize(sampled.removeprefix(thought))]
    assert thought_of(renderer, prompt, ids) == (len(renderer.tokenize(thought)), is_open)
