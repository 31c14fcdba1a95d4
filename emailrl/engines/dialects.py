"""Tool-call dialects: a table of how model families write calls, and which of them a tokenizer's template asks for.
Facts from the families' documentation and templates, and vLLM's parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from emailrl.base.errors import UsageError
from emailrl.engines import calls as of
from emailrl.records.trajectory import Message, ToolCall

MARKUP: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tags with a meaning in Qwen / Hermes templates, whether or not they are control tokens."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way of writing calls."""

    signs: str  # a pattern of the text of templates that ask for it
    read: of.Reader  # of a text without its thoughts, but in harmony; raises ValueError
    write: Callable[[Sequence[ToolCall]], str]
    words: tuple[str, ...] = ()  # control words, beyond ``MARKUP``, that mail may not hold
    thought: tuple[str, str] = ("<think>", "</think>")
    field: str = "content"  # where templates take the thought of an earlier turn

    def split(self, text: str) -> tuple[str | None, str]:
        """The thought, None without one, and what the turn says besides."""
        if self.read is of.harmony:
            messages = list(of.harmony_messages(text))
            thought = [body for channel, to, body in messages if channel == "analysis" and not to]
            said = [body for channel, to, body in messages if channel != "analysis" and not to]
            return "\n".join(filter(None, thought)) if thought else None, "\n".join(filter(None, said))
        opens, closes = self.thought
        before, closed, rest = text.rpartition(closes)
        if not closed and opens not in text:
            return None, text
        rest, _, unfinished = rest.partition(opens)
        return before.partition(opens)[2] or before or unfinished, rest


def parse(text: str, dialect: str, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCall]:
    """Read the calls of an assistant's turn outside its thoughts, in order. ``tools`` are function schemas as chat
    templates take them; values that a dialect writes as plain text get the type of their parameter. Raises ValueError,
    for the model to read, if a call is begun and is not one."""
    spoken = DIALECTS[dialect]
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {each["name"]: (each.get("parameters") or {}).get("properties") or {} for each in functions}
    calls = spoken.read(text if spoken.read is of.harmony else spoken.split(text)[1], schemas)
    return [ToolCall(call.name, of.checked_arguments(call.arguments), call.id) for call in calls]


def said_in(message: Message, first: str, tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """The dialect in which a message's text holds its calls, tried first in ``first``; None if it holds none."""
    meant = [(call.name, call.arguments) for call in message.tool_calls]
    for dialect in (first, *DIALECTS):
        try:
            if meant and [(call.name, call.arguments) for call in parse(message.content, dialect, tools)] == meant:
                return dialect
        except ValueError:
            continue
    return None


def before_calls(text: str, dialect: str) -> str:
    """What a turn in this dialect says before its calls."""
    return re.split("|".join(map(re.escape, ("<tool_call>", *DIALECTS[dialect].words))), text)[0].rstrip()


_TAGS: Final = ("<tool_call>", "</tool_call>")
_XML: Final = of.each_as(
    "<tool_call>\n<function=%N>\n%A</function>\n</tool_call>", "\n",
    arguments=of.tagged("<parameter={}>\n{}\n</parameter>\n"),
)  # fmt: skip
_XML_WORDS: Final = ("<function=", "</function>", "<parameter=", "</parameter>")
_NEMOTRON: Final = of.marked((*_TAGS, of.function), ("<TOOLCALL>", "</TOOLCALL>", of.objects), alone="<function=")
_NEMOTRON_WORDS: Final = (*_XML_WORDS, "<TOOLCALL>", "</TOOLCALL>", "<TOOL_RESPONSE>", "</TOOL_RESPONSE>")
_PYTHON: Final = of.each_as("%N(%A)", ", ", ("[", "]"), of.keywords)
_LLAMA_WORDS: Final = (
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|header_start|>", "<|header_end|>", "<|begin_of_text|>"),
)
_BRACKETED: Final = "TOOL_CALLS TOOL_RESULTS TOOL_CONTENT AVAILABLE_TOOLS INST SYSTEM_PROMPT THINK ARGS CALL_ID"
_MISTRAL_WORDS: Final = tuple(f"[{slash}{word}]" for word in _BRACKETED.split() for slash in ("", "/"))
_THINK: Final = ("[THINK]", "[/THINK]")
_JSON: Final = "<|constrain|>json"
_OBJECT: Final = '{"name": "%N", "arguments": %A}'
_DEEPSEEK: Final = of.marked(
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", of.deepseek),
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", of.dsml),
    alone="<｜tool▁calls▁begin｜>",
)
_CALLS: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_WORDS: Final = (
    *(f"<｜tool▁{kind}▁{end}｜>" for kind in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
    *(
        "<｜tool▁sep｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "｜DSML｜",
    ),
)
_GEMMA: Final = of.marked(
    ("<|tool_call>", "<tool_call|>", of.gemma), ("<start_function_call>", "<end_function_call>", of.gemma),
    outside=of.gemma_3,
)  # fmt: skip
_GEMMA_WORDS: Final = (
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|turn>", "<turn|>", "<|tool>"),
    *("<tool|>", "<|channel>", "<channel|>", "<|think|>", "<escape>", "<start_of_turn>", "<end_of_turn>"),
    *(f"<{end}_function_{kind}>" for kind in ("call", "response", "declaration") for end in ("start", "end")),
)

DIALECTS: Final[dict[str, Dialect]] = {
    "harmony": Dialect(
        r"<\|channel\|>", of.harmony,
        of.each_as(f"<|channel|>commentary to=functions.%N {_JSON}<|message|>%A", "<|call|><|start|>assistant"),
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        field="thinking",
    ),
    "gemma": Dialect(
        r"<\|tool_call>", _GEMMA, of.each_as("<|tool_call>call:%N%A<tool_call|>", arguments=of.quoted), _GEMMA_WORDS,
        ("<|channel>thought", "<channel|>"), "reasoning_content",
    ),
    "functiongemma": Dialect(
        "<start_function_call>", _GEMMA,
        of.each_as(
            "<start_function_call>call:%N%A<end_function_call>", arguments=partial(of.quoted, quote="<escape>")
        ),
        _GEMMA_WORDS,
    ),
    "gemma_3": Dialect("<start_of_turn>", _GEMMA, _PYTHON, _GEMMA_WORDS),
    "lfm": Dialect(
        r"<\|tool_call_start\|>|<\|tool_list_start\|>",
        of.marked(("<|tool_call_start|>", "<|tool_call_end|>", of.python_list)),
        of.each_as("%N(%A)", ", ", ("<|tool_call_start|>[", "]<|tool_call_end|>"), of.keywords),
        tuple(f"<|tool_{kind}_{end}|>" for kind in ("call", "list", "response") for end in ("start", "end")),
    ),
    "deepseek": Dialect(
        r"(?s)tool▁call▁begin.*```json", _DEEPSEEK,
        of.each_as(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%N\n```json\n%A\n```<｜tool▁call▁end｜>", "\n", _CALLS
        ),
        _DEEPSEEK_WORDS,
    ),
    "deepseek_v31": Dialect(
        "tool▁call▁begin", _DEEPSEEK,
        of.each_as("<｜tool▁call▁begin｜>%N<｜tool▁sep｜>%A<｜tool▁call▁end｜>", "", _CALLS), _DEEPSEEK_WORDS,
    ),
    "mistral_args": Dialect(r"\[ARGS\]", of.mistral, of.each_as("[TOOL_CALLS]%N[ARGS]%A"), _MISTRAL_WORDS, _THINK),
    "mistral": Dialect(
        r"\[TOOL_CALLS\]", of.mistral, of.each_as(_OBJECT, ", ", ("[TOOL_CALLS][", "]")), _MISTRAL_WORDS, _THINK
    ),
    "glm": Dialect(
        "<arg_key>", of.marked((*_TAGS, of.keys)),
        of.each_as(
            "<tool_call>%N\n%A</tool_call>", "\n",
            arguments=of.tagged("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
        ),
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|observation|>", "<|user|>", "<|assistant|>"),
    ),
    "nemotron_json": Dialect(
        "<TOOLCALL>", _NEMOTRON, of.each_as(_OBJECT, ", ", ("<TOOLCALL>[", "]</TOOLCALL>")), _NEMOTRON_WORDS
    ),
    "nemotron": Dialect("truncate_history_thinking", _NEMOTRON, _XML, _NEMOTRON_WORDS),
    "qwen": Dialect(
        r"<tool_call>(?:\\n|\s)*<function=", of.marked((*_TAGS, of.function), alone="<function="), _XML, _XML_WORDS
    ),
    "hermes": Dialect(
        "<tool_call>", of.marked((*_TAGS, of.one_object)), of.each_as(f"<tool_call>\n{_OBJECT}\n</tool_call>", "\n")
    ),
    "pythonic": Dialect(r"func_name1\(|python list", of.loose_lists, _PYTHON, _LLAMA_WORDS),
    "llama": Dialect(
        r'"name": function name|<\|python_tag\|>', of.loose_objects,
        of.each_as('{"name": "%N", "parameters": %A}', "; "), _LLAMA_WORDS,
    ),
}  # fmt: skip
"""By name, in the order in which their signs are looked for."""
BEGINS: Final = re.compile(
    r"<\|?tool_call|<TOOLCALL>|<function=|\[TOOL_CALLS\]|<｜(?:tool▁|DSML)|<\|python_|<start_function_call>"
    r"|(?:<\|start\|>assistant)?<\|channel\|>commentary to=|\A\s*(?:\{|\[(?!THINK))"
)
"""Where the markup of calls begins, in any dialect; bare lists and objects only at the start."""


def choose(tokenizer: Any, tools: Sequence[Mapping[str, Any]], setting: str = "auto") -> str:
    """The dialect of a tokenizer: the setting, else by its response template, else by its chat template's text. Raises
    UsageError if that is none of these."""
    if setting != "auto":
        return setting
    response = getattr(tokenizer, "response_template", None)
    for text in (json.dumps(response, ensure_ascii=False) if response else "", tokenizer.get_chat_template()):
        for name, dialect in DIALECTS.items():
            if re.search(dialect.signs, text):
                return name
    if not tools:
        return "hermes"
    hint = f"Set TOOL_DIALECT to what the model writes ({', '.join(DIALECTS)}), or CHAT_TEMPLATE."
    raise UsageError("The chat template asks for tool calls in no form that emailrl knows, or for none.", hint)
