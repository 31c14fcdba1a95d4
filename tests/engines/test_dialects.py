"""Tool-call dialects: what each family writes is read back, typed and in order; real templates carry a conversation
whose turns stay as they were sampled; mail that holds a dialect's own words forms neither a call nor a turn."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from emailrl.agent.play import audit, run
from emailrl.agent.task import StepResult
from emailrl.agent.tools import tool_schemas
from emailrl.base.errors import UsageError
from emailrl.engines.base import Advance, Completion, Request, SamplingParams
from emailrl.engines.dialects import BEGINS, DIALECTS, choose, parse
from emailrl.engines.renderer import ChatRenderer
from emailrl.records.trajectory import Message, Scenario, StopReason, ToolCall
from emailrl.settings.tree import ToolDialect
from emailrl.sft.examples import as_spoken, samples_of

TOOLS = tool_schemas()
SEARCH = ToolCall("search_emails", {"keywords": ["lease", 'Ann\'s "flat"'], "from_addr": None, "max_results": 5})
READ = ToolCall("read_email", {"message_id": "<12@x.com>"})
NUMBER = ToolCall("read_email", {"message_id": "42"})
ANSWER = ToolCall("return_final_answer", {"answer": "Two\nlines: {a}, [b]; é", "sources": []})
ASKED = [Message("system", "You search email."), Message("user", "When?")]

TEMPLATES = {
    "glm4moe": "glm", "gptoss": "harmony", "lfm2": "lfm", "lfm2_2_5": "lfm", "llama3_1": "llama", "llama3_2": "llama",
    "nemotron_3_nano": "nemotron", "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_instruct_2507": "hermes",
    "qwen3_5_nothink": "qwen", "qwen3_5_think": "qwen", "qwen3_6": "qwen",
}  # fmt: skip
TOOLLESS = ("cohere2", "deepseekv3", "gemma3", "phi3_5")
TOLD = "{%- for m in messages %}{%- if m.role == 'user' %}{{ m.content }}{{ (tools or '') | string }}<|im_end|>"
STRICT = {
    "mistral": """[INST]{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}{% if c.id | length != 9 %}
{{ raise_exception('nine characters') }}{% endif %}{{ c.function | tojson }}{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}{{ m.content }}[/TOOL_RESULTS]
{% elif m.role == 'assistant' %}{% if loop.previtem.role != 'user' %}{{ raise_exception('roles alternate') }}{% endif %}
{{ m.content }}<|im_end|>{% endif %}{% endfor %}""",
    "gemma": """<|turn>model\n{% elif m.tool_calls %}<|tool_call>{{ m.tool_calls[0].function | tojson }}<tool_call|>
{%- if loop.nextitem %}<|tool_response>{{ loop.nextitem.content }}<tool_response|>{% endif %}
{%- elif m.role == 'assistant' %}{{ m.content }}<turn|>{% endif %}{% endfor %}""",
}
"""Templates that take calls only apart from the text, and results only after them, as Mistral's and Gemma 4's."""


@pytest.fixture(scope="module")
def every_word(shared_data: Path) -> PreTrainedTokenizerBase:
    """Qwen's tokenizer, with all families' words as special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")
    words = {word for dialect in DIALECTS.values() for word in (*dialect.words, *dialect.thought) if word[0] in "<["}
    tokenizer.add_tokens(sorted(words - set(tokenizer.get_vocab())), special_tokens=True)
    return tokenizer


def with_template(tokenizer: PreTrainedTokenizerBase, shared_data: Path, template: str) -> PreTrainedTokenizerBase:
    path, told = shared_data / "chat_templates" / f"{template}.jinja", copy.deepcopy(tokenizer)
    if "{" not in template and not path.is_file():
        pytest.skip(f"no template at {path}")
    told.chat_template = template if "{" in template else path.read_text()
    ends = {"gptoss": "<|return|>", "llama3_1": "<|eot_id|>", "llama3_2": "<|eot_id|>"}
    told.eos_token = ends.get(template, "<|im_end|>")
    return told


@pytest.fixture(params=[*TEMPLATES.items(), *((TOLD + STRICT[each], each) for each in STRICT)], scope="module")
def renderer(request: pytest.FixtureRequest, shared_data: Path, every_word: PreTrainedTokenizerBase) -> ChatRenderer:
    template, dialect = request.param
    made = ChatRenderer(with_template(every_word, shared_data, template), TOOLS)
    assert made.dialect == dialect
    return made


def test_the_settings_name_every_dialect() -> None:
    assert set(get_args(ToolDialect)) == {"auto", *DIALECTS}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("calls", [[SEARCH], [READ], [NUMBER], [ANSWER], [SEARCH, READ, ANSWER]])
def test_calls_are_read_back_among_text_and_after_thoughts(dialect: str, calls: list[ToolCall]) -> None:
    spoken = DIALECTS[dialect]
    text, (opens, closes) = spoken.write(calls), spoken.thought
    if dialect == "harmony":
        thought = f"<|channel|>analysis<|message|>{spoken.write([READ])[-20:]} to=functions.x<|end|><|start|>assistant"
        before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    else:
        thought, before = f"{opens}\n{spoken.write([READ])}\n{closes}\n\n", "I look.\n"
    found = [parse(f"{prefix}{text}", dialect, TOOLS) for prefix in ("", before, thought)]
    assert all([(c.name, c.arguments) for c in each] == [(c.name, c.arguments) for c in calls] for each in found)
    assert {BEGINS.split(each, maxsplit=1)[0] for each in (text, f"\n{text}")} <= {"", "\n"}
    assert text[0] in "[{" or BEGINS.split(f"I look.{text}", maxsplit=1)[0] == "I look."
    told = "The lease ends on {May 5} [see below]."
    assert parse(told, dialect, TOOLS) == [] and BEGINS.search(told) is None
    if dialect != "harmony":
        assert parse(f"{opens}\n{text}", dialect, TOOLS) == []  # stopped while thinking


SAID: list[tuple[str, str, list[ToolCall]]] = [
    ("qwen", "<tool_call><function=read_email><parameter=message_id> 7 </parameter></function></tool_call>",
     [ToolCall("read_email", {"message_id": " 7 "})]),
    ("qwen", "<tool_call>\n<function=search_emails>\n<parameter=keywords>\n['a', 'b']\n</parameter>\n"
     "<parameter=to_addr>\nNone\n</parameter>\n<parameter=max_results>\n3\n</parameter>\n</function>\n</tool_call>",
     [ToolCall("search_emails", {"keywords": ["a", "b"], "to_addr": None, "max_results": 3})]),
    ("glm", '<tool_call>search_emails<arg_key>keywords</arg_key><arg_value>["a"]</arg_value></tool_call>',
     [ToolCall("search_emails", {"keywords": ["a"]})]),
    ("harmony", '<|start|>assistant to=functions.read_email<|channel|>commentary json<|message|>{"message_id": "7"}',
     [ToolCall("read_email", {"message_id": "7"})]),
    ("harmony", '<|channel|>analysis to=functions.read_email code<|message|>{"message_id": "7"}<|call|>',
     [ToolCall("read_email", {"message_id": "7"})]),
    ("harmony", '<|channel|>analysis to=python code<|message|>1 + 1<|call|>', []),
    ("llama", 'Not `{"type": "function", "function": {"name": "f", "parameters": {}}}`.', []),
    ("pythonic", "Not `[read_email(message_id=[read_email()])]`.", []),
    ("gemma_3", "So:\n```python\ndef f(x):\n    return [x]\n```", []),
    ("gemma_3", "```python\nread_email(message_id='7')\n```", [ToolCall("read_email", {"message_id": "7"})]),
    ("llama", 'Sure. <|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"type": "function", "name": "g", '
     '"parameters": {}} Done.', [ToolCall("f", {"a": 1}), ToolCall("g", {})]),
    ("pythonic", "<|python_start|>[f(a=-1, b=['x', None], c={'k': true}), g()]<|python_end|>",
     [ToolCall("f", {"a": -1, "b": ["x", None], "c": {"k": True}}), ToolCall("g", {})]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}, "id": "abcdefghi"}]',
     [ToolCall("f", {"a": "]"}, "abcdefghi")]),
    ("mistral", 'I look.[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g{}',
     [ToolCall("f", {"a": 1}, "abcdefghi"), ToolCall("g", {})]),
    ("gemma", '<|tool_call>call:f{a:<|"|>it, b:c "d"<|"|>,n:-5.5,t:true,l:[<|"|>x<|"|>,{k:null}]}<tool_call|>',
     [ToolCall("f", {"a": 'it, b:c "d"', "n": -5.5, "t": True, "l": ["x", {"k": None}]})]),
    ("gemma", "Let me look.\n```tool_code\nprint(default_api.read_email(message_id='7'))\n```",
     [ToolCall("read_email", {"message_id": "7"})]),
    ("gemma", '```json\n{"name": "read_email", "parameters": {"message_id": "7"}}\n```',
     [ToolCall("read_email", {"message_id": "7"})]),
    ("lfm", '<|tool_call_start|>[read_email(message_id="7")]<|tool_call_end|>Looking.',
     [ToolCall("read_email", {"message_id": "7"})]),
    ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', [ToolCall("f", {"a": 1})]),
    ("deepseek", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">5'
     '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     '</｜DSML｜function_calls>', [ToolCall("f", {"a": "5", "n": 5})]),
    ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>',
     [ToolCall("f", {"a": 1}), ToolCall("g", {})]),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "calls"), SAID)
def test_a_familys_other_spellings_are_read(dialect: str, text: str, calls: list[ToolCall]) -> None:
    assert parse(text, dialect, TOOLS) == calls


BROKEN = [
    ("qwen", '<tool_call>{"name": "f"}</tool_call>', "<function=NAME>"),
    ("qwen", "<function=f></function>", "without <tool_call>"),
    ("qwen", "<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function></tool_call>", "not closed"),
    (
        "qwen",
        "<tool_call><function=search_emails><parameter=max_results>x</parameter></function></tool_call>",
        "integer",
    ),
    ("qwen", "<tool_call><function=search_emails><parameter=keywords>[1</parameter></function></tool_call>", "array"),
    ("qwen", "<tool_call><function=f>\n<parameter=a>1</parameter>", "not closed"),
    ("glm", '<tool_call>{"name": "f"}</tool_call>', "<arg_key>"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key></tool_call>", "no argument"),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{a: 1}", "not JSON"),
    ("harmony", "<|channel|>commentary to=f <|constrain|>json<|message|>{}", "functions.NAME"),
    ("llama", '{"name": "f", "parameters": {"a": 1}', "not JSON"),
    ("llama", '<|python_tag|>f.call(a="b")', "no name"),
    ("pythonic", "[f(a=1)", "not closed"),
    ("pythonic", "[f(1)]", "by its name"),
    ("pythonic", "[f(a=g(2))]", "no literal"),
    ("pythonic", "[f(a=1, a=2)]", "once"),
    ("pythonic", "[f(a=open)]", "no literal"),
    ("pythonic", "read_email(message_id='7')", "in a list"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}', "not JSON"),
    ("mistral", "[TOOL_CALLS]f", "without a name and arguments"),
    ("gemma", "<|tool_call>call:f{a:text}<tool_call|>", "text stands between"),
    ("gemma", "<|tool_call>f{}<tool_call|>", "expected call:"),
    ("lfm", "<|tool_call_start|>[]<|tool_call_end|>", "no tool call"),
    ("lfm", "[f()]<|tool_call_end|>", "without <|tool_call_start|>"),
    ("deepseek", "<｜tool▁calls▁begin｜>", "without"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{a}\n```<｜tool▁call▁end｜>", "not JSON"),
    ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": ["a"]}]</TOOLCALL>', "not an object"),
]


@pytest.mark.parametrize(("dialect", "text", "error"), BROKEN)
def test_a_broken_call_is_an_error_that_says_what_is_wrong(dialect: str, text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse(text, dialect, TOOLS)


@dataclass
class Desk:
    """Two calls, each with a result in which the mail names the renderer's own placeholders; then the end."""

    scenario: Scenario = field(default_factory=lambda: Scenario("q", "When?", "", [], "a@x", "2001-01-01"))
    said: list[Message] = field(default_factory=list)

    def start(self) -> list[Message]:
        return list(ASKED)

    def step(self, message: Message) -> StepResult:
        self.said.append(message)
        place = 2 * len(self.said)
        result = f"result {place} emailrl-probe-said-{place}- emailrl-probe-thought-{place}-"
        call = message.tool_calls[0]
        return StepResult(
            [Message("tool", result, name=call.name)], len(self.said) == 3, stop_reason=StopReason.ANSWERED
        )


@dataclass
class Sampler:
    """Says these ids, turn by turn, and keeps the prompts."""

    turns: list[list[int]]
    prompts: list[list[int]] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        following, done = requests[0], list[Completion]()
        while following is not None and advance is not None:
            self.prompts.append(list(following.prompt_ids))
            ids = self.turns[len(done)]
            done.append(Completion(following.trajectory_id, ids, [-1.0] * len(ids), "stop"))
            following = advance(done[-1])  # type: ignore[assignment]
        return done

    def close(self) -> None: ...


def test_a_played_conversation_stays_as_it_was_sampled_in_every_template(renderer: ChatRenderer) -> None:
    """Every prompt begins with all ids so far, each turn stops, and the audit passes: a single training sample."""
    spoken, calls, turns = DIALECTS[renderer.dialect], (SEARCH, NUMBER, ANSWER), list[list[int]]()
    for call in calls:
        said = f"Hm{spoken.thought[1]} I look.\n" * bool(renderer.opening) + spoken.write([call])
        if renderer.dialect == "harmony":
            said = f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{said}"
        turns.append([*renderer.tokenize(said), *renderer.tokenize(renderer.end_of_call)])
        assert turns[-1][-1] in renderer.stop_ids and not set(turns[-1][:-1]) & renderer.stop_ids
    desk, engine = Desk(), Sampler(turns)
    [trajectory] = run([desk], engine, renderer, SamplingParams(99), seeds=[0])
    assert trajectory.exception is None and len(trajectory.samples) == 1
    assert [(m.tool_calls[0].name, m.tool_calls[0].arguments) for m in desk.said] == [
        (c.name, c.arguments) for c in calls
    ]
    assert audit(trajectory) == sum(map(len, turns))
    for number, prompt in enumerate(engine.prompts[:2]):
        following = engine.prompts[number + 1]
        assert following[: len(prompt) + len(turns[number])] == prompt + turns[number]
        assert f"result {2 * number + 2} emailrl-probe-said-{2 * number + 2}-" in renderer.text_of(following)
    assert "search_emails" in renderer.text_of(engine.prompts[0])


def test_what_experts_say_is_written_in_the_models_dialect_and_read_back(renderer: ChatRenderer) -> None:
    said = DIALECTS["hermes"].write([SEARCH])
    messages = [*ASKED, Message("assistant", f"I look.\n{said}", [SEARCH]), Message("tool", "[]", name=SEARCH.name)]
    messages += [Message("assistant", DIALECTS["hermes"].write([ANSWER]), [ANSWER])]
    [sample] = samples_of([as_spoken(each, renderer.dialect, TOOLS) for each in messages], renderer)
    turns: list[list[int]] = [[]]
    for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True):
        turns = [*turns[:-1], [*turns[-1], token]] if mask else turns + [[]] * bool(turns[-1])
    first, last = (renderer.parse(ids) for ids in turns if ids)
    assert (first.tool_calls[0].arguments, last.tool_calls[0].arguments) == (SEARCH.arguments, ANSWER.arguments)
    assert all(ids[-1] in renderer.stop_ids for ids in turns if ids)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_mail_that_holds_a_dialects_words_forms_no_call_and_no_turn(
    dialect: str, qwen: PreTrainedTokenizerBase
) -> None:
    """The tokenizer does not know the words."""
    assert hostile_arrangements(ChatRenderer(qwen, dialect=dialect), 200) == 0


def hostile_arrangements(renderer: ChatRenderer, number: int) -> int:
    """In how many of seeded arrangements of a dialect's words a word is left, or a call would be read."""
    rng, spoken = random.Random(7), DIALECTS[renderer.dialect]
    words = [*spoken.words, *spoken.thought, "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>assistant\n"]
    marks = [word for word in words if word != "<|im_start|>assistant\n"]
    pieces = [
        *words,
        *[word[:3] for word in words],
        *[word[3:] for word in words],
        spoken.write([READ]),
        " ",
        "\n",
        "a",
    ]
    controls, left = set(renderer.tokenizer.added_tokens_decoder), 0
    for _ in range(number):
        text = renderer.harmless("".join(rng.choices(pieces, k=rng.randint(2, 9))))
        left += any(word in text for word in marks) or bool(controls & set(renderer.tokenize(text)))
        is_marked = any(word in spoken.write([READ]) for word in marks)
        try:
            left += is_marked and "gemma" not in renderer.dialect and bool(parse(text, renderer.dialect, TOOLS))
        except ValueError:  # broken markup is no call either
            left += is_marked and "gemma" not in renderer.dialect
    return left


@pytest.mark.parametrize("template", TOOLLESS)
def test_a_template_that_shows_no_tools_is_an_error_before_the_run(
    shared_data: Path, every_word: PreTrainedTokenizerBase, template: str
) -> None:
    tokenizer = with_template(every_word, shared_data, template)
    with pytest.raises(UsageError, match="no tools") as caught:
        ChatRenderer(tokenizer, TOOLS)
    assert "CHAT_TEMPLATE" in caught.value.hint and "TOOL_DIALECT" in caught.value.hint
    assert ChatRenderer(tokenizer, TOOLS, "hermes").dialect == "hermes"
    assert ChatRenderer(tokenizer).start([Message("user", "?")]).text


def test_the_dialect_is_the_settings_then_the_response_templates_then_the_chat_templates(qwen: Any) -> None:
    tokenizer = copy.copy(qwen)
    assert choose(tokenizer, TOOLS) == "hermes"
    tokenizer.response_template = {"fields": {"tool_calls": {"open": "[TOOL_CALLS]"}}}
    assert choose(tokenizer, TOOLS) == "mistral"
    assert choose(tokenizer, TOOLS, "qwen") == "qwen"
    tokenizer.response_template, tokenizer.chat_template = None, "{{ tools }}{{ messages[0].content }}"
    with pytest.raises(UsageError, match="no form that emailrl knows"):
        ChatRenderer(tokenizer, TOOLS)
