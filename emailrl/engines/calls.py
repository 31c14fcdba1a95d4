"""Reading and writing tool calls: JSON, tags around plain text, Python, and Gemma's own form. Where vLLM's parsers mend
broken calls, an error says what is wrong, so that a policy learns the form its template asks for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from emailrl.records.trajectory import ToolCall

MAX_DEPTH = 64  # maximum nesting of a call's arguments; Python's own JSON parser stops at some hundreds
Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each parameter, by tool and name."""
Reader = Callable[[str, Schemas], list[ToolCall]]
Body = Callable[[str, Schemas, bool], list[ToolCall]]
"""Reads what stands between two tags, the last of which may be missing at the end of a text (False)."""
as_json: Final = partial(json.dumps, ensure_ascii=False)


def checked_arguments(value: Any) -> dict[str, Any]:
    """A call's arguments; ValueError if they are not an object, or nested too deep to be recorded."""
    if not isinstance(value, dict):
        raise ValueError("tool call's arguments are not an object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]
        level = [item for item in level if isinstance(item, (dict, list))]
    if level:
        raise ValueError("tool call's arguments are nested too deep")
    return value


def _is_quoted(text: str, start: int) -> bool:
    """Whether a backtick stands before this place."""
    return text[start - 1 : start] == "`"


def nothing(text: str, schemas: Schemas) -> list[ToolCall]:
    return []


def marked(*ways: tuple[str, str, Body], alone: str = "", outside: Reader = nothing) -> Reader:
    """Reads the calls between tags (each way: opening, closing, what stands between); without any, those ``outside``,
    where ``alone`` may not occur. A complete last call may omit its closing tag at the end of the text: base models end
    so, and vLLM's parsers accept it."""

    def read(text: str, schemas: Schemas) -> list[ToolCall]:
        calls = list[tuple[int, ToolCall]]()
        for opening, closing, between in ways:
            bodies = list(re.finditer(f"{re.escape(opening)}(.*?)({re.escape(closing)}|\\Z)", text, re.DOTALL))
            for found in bodies:
                try:
                    calls += [(found.start(), call) for call in between(found[1], schemas, bool(found[2]))]
                except ValueError as error:
                    if found[2]:
                        raise
                    raise ValueError(f"{opening} is not closed, and what there is of it is no call") from error
            if not bodies and closing in text:
                raise ValueError(f"{closing} without {opening}")
        if not calls and alone and alone in text:
            raise ValueError(f"{alone} without {ways[0][0]}")
        return [call for _, call in sorted(calls, key=lambda each: each[0])] or outside(text, schemas)

    return read


# -- JSON


def _decoded(text: str, start: int | None = None) -> tuple[Any, int]:
    """A JSON value and where it ends; the whole text must be one unless it starts at ``start``."""
    try:
        return (json.loads(text), len(text)) if start is None else json.JSONDecoder().raw_decode(text, start)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"tool call is not JSON: {error}") from error


def _object(call: Any, *, is_closed: bool = True) -> ToolCall:
    """``{"name": …, "arguments": {…}}``, where ``parameters``, as Llama 3 spells it, means ``arguments``."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("tool call has no name")
    given = [call[key] for key in ("arguments", "parameters") if key in call]
    # Some models write the arguments as a JSON string.
    given = [_decoded(value)[0] if isinstance(value, str) else value for value in given]
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError("tool call has both arguments and parameters, and they differ: give arguments only")
    if not given and call.keys() - {"name", "id", "type"}:
        raise ValueError('tool call has no "arguments"')
    return ToolCall(call["name"], checked_arguments(given[0] if given else {} if is_closed else None))


def objects(body: str, schemas: Schemas, is_closed: bool) -> list[ToolCall]:
    value, _ = _decoded(body)
    if value == []:
        raise ValueError("no tool call in the list")
    return [_object(each, is_closed=is_closed) for each in (value if isinstance(value, list) else [value])]


def one_object(body: str, schemas: Schemas, is_closed: bool) -> list[ToolCall]:
    return [_object(_decoded(body)[0], is_closed=is_closed)]


_OBJECT = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function"|(?:parameters|arguments)"\s*:\s*\{)')


def loose_objects(text: str, schemas: Schemas) -> list[ToolCall]:
    """Objects with a name anywhere in the text, as Llama 3 writes them, but after a backtick: a quotation."""
    _, tagged, after = text.partition("<|python_tag|>")
    text, calls, end = after if tagged else text, list[ToolCall](), 0
    while (found := _OBJECT.search(text, end)) is not None:
        value, end = _decoded(text, found.start())
        calls += [] if _is_quoted(text, found.start()) else [_object(value)]
    if not calls and (tagged or text.lstrip().startswith(("{", "[{"))):
        raise ValueError('tool call has no name: expected {"name": …, "parameters": {…}}')
    return calls


_NAMED = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")


def mistral(text: str, schemas: Schemas) -> list[ToolCall]:
    """``[TOOL_CALLS]`` before a list of objects, or before each name with its arguments."""
    calls = list[ToolCall]()
    for part in text.split("[TOOL_CALLS]")[1:]:
        if part.lstrip().startswith(("[", "{")):
            value, _ = _decoded(part.lstrip(), 0)
            listed = value if isinstance(value, list) else [value]
            made = [_object(each) for each in listed]
            ids = [each.get("id") for each in listed]
            calls += [ToolCall(one.name, one.arguments, its or None) for one, its in zip(made, ids, strict=True)]
        elif (named := _NAMED.match(part)) is not None:
            calls.append(ToolCall(named[1], _decoded(part, named.end())[0], named[2]))
        else:
            raise ValueError("[TOOL_CALLS] without a name and arguments as a JSON object")
    if not calls and ("[TOOL_CALLS]" in text or "[ARGS]" in text):
        raise ValueError("no tool call after [TOOL_CALLS]")
    return calls


_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony_messages(text: str) -> Iterator[tuple[str, str, str | None]]:
    """Channel, recipient and content of each message of a turn."""
    for part in text.split("<|start|>"):
        header, begun, body = part.partition("<|message|>")
        channel, to = _CHANNEL.search(header), _TO.search(header)
        body = re.split(r"<\|(?:call|end|return)\|>", body)[0]
        if begun or channel or re.match(r"(?:assistant)?\s*to=", header):  # else text without any markup
            yield channel[1] if channel else "", to[1] if to else "", body if begun else None
        else:
            yield "final", "", part


def harmony(text: str, schemas: Schemas) -> list[ToolCall]:
    """gpt-oss: messages to functions; in ``analysis`` too, where it writes some, beside those to its own tools."""
    calls = list[ToolCall]()
    for channel, recipient, body in harmony_messages(text):
        if recipient.startswith("functions.") or (channel != "analysis" and recipient):
            _, function, name = recipient.rpartition("functions.")
            if not function or body is None:
                form = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}"
                raise ValueError(f"a call is written {form}")
            calls.append(ToolCall(name, _decoded(body)[0]))
    return calls


_FENCED = re.compile(r"\s*(?:function)?\s*(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)


def deepseek(body: str, schemas: Schemas, is_closed: bool) -> list[ToolCall]:
    """``function<｜tool▁sep｜>NAME`` and fenced arguments (V3, R1), or ``NAME<｜tool▁sep｜>{…}`` (V3.1)."""
    kind, separated, rest = body.partition("<｜tool▁sep｜>")
    fenced = _FENCED.fullmatch(rest)
    name, arguments = (fenced[1], fenced[2]) if fenced else (kind.strip(), rest)
    if not separated or not name or (fenced and kind.strip() != "function"):
        raise ValueError("a call is written NAME<｜tool▁sep｜>{…}, or function<｜tool▁sep｜>NAME and ```json arguments")
    return [ToolCall(name, _decoded(arguments)[0])]


# -- plain text between tags, typed by the schema


def _typed(text: str, schema: Any, name: str) -> Any:
    """The value of a parameter that is written as plain text; without a schema it stays text."""
    if not isinstance(schema, dict):
        return text
    branches = [schema, *(schema.get("anyOf") or schema.get("oneOf") or ())]
    stated = [branch.get("type") for branch in branches if isinstance(branch, dict)]
    types = [kind for each in stated if each for kind in (each if isinstance(each, list) else [each])]
    bare = text.strip()
    if bare.lower() in ("null", "none") and ("null" in types or schema.get("nullable")):
        return None
    for kind in types:
        if kind == "string":
            return text
        if kind == "null":
            continue
        value = _literal(bare)
        if kind == "number" and isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if kind in _KINDS and type(value) is _KINDS[kind]:
            return value
    if types:
        raise ValueError(f"{name} must be {' or '.join(types)}, not {bare[:60]!r}")
    return text


_KINDS: Final = {"integer": int, "boolean": bool, "array": list, "object": dict}


def _literal(text: str) -> Any:
    """A value in JSON, or in Python, whose spelling some templates use; None if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        [node] = _python(text)
        return _value(node)
    except ValueError:
        return None


def _pairs(text: str, pattern: re.Pattern[str], inside: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Names and values that follow each other with nothing between them."""
    found, end = dict[str, Any](), 0
    while (pair := pattern.match(text, end)) is not None:
        name, value, end = pair["name"].strip(), pair["value"], pair.end()
        if name in found or inside in value:
            raise ValueError(f"{name} is given twice" if name in found else f"{name} is not closed")
        # A dialect with an attribute says itself what is text.
        is_json = pair.groupdict().get("text") == "false"
        found[name] = _decoded(value)[0] if is_json else _typed(value, schema.get(name), name)
    if rest := text[end:].strip():
        raise ValueError(f"the tool call holds {rest[:60]!r}, which is no argument")
    return found


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_ARGUMENT = re.compile(
    r"\s*<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)
_INVOKE = re.compile(r'\s*<｜DSML｜invoke\s+name="([^"]+)"\s*>(.*?)</｜DSML｜invoke>', re.DOTALL)
_DSML = re.compile(
    r'\s*<｜DSML｜parameter\s+name="(?P<name>[^"]+)"\s+string="(?P<text>true|false)"\s*>(?P<value>.*?)</｜DSML｜parameter>',
    re.DOTALL,
)


def function(body: str, schemas: Schemas, is_closed: bool) -> list[ToolCall]:
    """``<function=NAME><parameter=KEY>`` (Qwen3-Coder, Qwen3.5, Nemotron 3)."""
    found = _FUNCTION.fullmatch(body)
    if found is None:
        raise ValueError("expected <function=NAME> … </function> between <tool_call> and </tool_call>")
    name = found[1].strip()
    return [ToolCall(name, _pairs(found[2], _PARAMETER, "<parameter=", schemas.get(name, {})))]


def keys(body: str, schemas: Schemas, is_closed: bool) -> list[ToolCall]:
    """``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`` (GLM)."""
    name, key, rest = body.partition("<arg_key>")
    if len(name.split()) != 1 or "<" in name or "{" in name:
        raise ValueError("expected the function's name, then <arg_key> and <arg_value>, in <tool_call>")
    return [ToolCall(name.strip(), _pairs(key + rest, _ARGUMENT, "<arg_key>", schemas.get(name.strip(), {})))]


def dsml(body: str, schemas: Schemas, is_closed: bool) -> list[ToolCall]:
    """DeepSeek V3.2."""
    calls, end = list[ToolCall](), 0
    while (found := _INVOKE.match(body, end)) is not None:
        end = found.end()
        calls.append(ToolCall(found[1], _pairs(found[2], _DSML, "<｜DSML｜parameter", {})))
    if body[end:].strip() or not calls:
        raise ValueError('expected <｜DSML｜invoke name="NAME"> … </｜DSML｜invoke>')
    return calls


# -- Python


_CONSTANTS: Final = {"true": True, "false": False, "null": None}
_STRING_OR_BRACKET = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[\[\](){}]", re.DOTALL)
_LIST = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(")
_TOOL_CODE = re.compile(r"```(tool_code|tool_call|python)\s*\n(.*?)(?:```|\Z)", re.DOTALL)


def _python(source: str) -> list[ast.expr]:
    """The expressions of a source text, one a line; models write line breaks in strings as they are."""
    source = _STRING_OR_BRACKET.sub(lambda found: found[0].replace("\n", "\\n"), source)
    try:
        body = ast.parse(source.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tool call is not Python: {error}") from error
    if wrong := [each for each in body if not isinstance(each, ast.Expr)]:
        raise ValueError(f"tool call is not a call: {ast.unparse(wrong[0])[:60]}")
    return [each.value for each in body if isinstance(each, ast.Expr)]


def _value(node: ast.expr) -> Any:
    """The value of a literal, without running anything."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(keys):
            names = [_value(key) for key in keys if key is not None]
            return {str(key): _value(value) for key, value in zip(names, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError(f"{ast.unparse(node)[:60]} is no literal value")


def _python_calls(source: str, schemas: Schemas) -> list[ToolCall]:
    calls, nodes = list[ToolCall](), _python(source)
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.List):
            nodes = node.elts + nodes
            continue
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            raise ValueError(f"expected a call, such as name(argument=value), not {ast.unparse(node)[:60]}")
        name = ast.unparse(node.func)
        if name == "print" and name not in schemas and not node.keywords:
            nodes = node.args + nodes
            continue
        names = [each.arg for each in node.keywords]
        if node.args or None in names or len(set(names)) < len(names):
            raise ValueError(f"{name}: give each argument once and by its name")
        name = name if name in schemas else name.rpartition(".")[2]
        calls.append(ToolCall(name, {str(each.arg): _value(each.value) for each in node.keywords}))
    if not calls:
        raise ValueError("no tool call in the list")
    return calls


def python_list(body: str, schemas: Schemas, is_closed: bool) -> list[ToolCall]:
    """``[name(argument=value), …]``, or the same in JSON, which LFM2 writes when told to."""
    if body.lstrip().startswith(("{", "[{")):
        return objects(body, schemas, is_closed)
    if not body.lstrip().startswith("["):
        raise ValueError("expected a list of calls: [name(argument=value)]")
    return _python_calls(body, schemas)


def loose_lists(text: str, schemas: Schemas) -> list[ToolCall]:
    """Lists of calls: of any name at the text's start, of a tool elsewhere but after a backtick (Llama 3.2, 4)."""
    calls, end = list[ToolCall](), 0
    text = re.sub(r"<\|python_(?:start|end|tag)\|>", "", text).strip()
    while (found := _LIST.search(text, end)) is not None:
        begin, end = found.start(), found.end()
        if begin == 0 or found[1] in schemas:
            depth = 0
            for token in _STRING_OR_BRACKET.finditer(text, begin):
                depth += (token[0] in "[({") - (token[0] in "])}")
                if depth == 0:
                    break
            else:
                raise ValueError("the list of calls is not closed")
            end = token.end()
            calls += [] if _is_quoted(text, begin) else _python_calls(text[begin:end], schemas)
    if not calls and any(re.match(rf"{re.escape(name)}\s*\(", text) for name in schemas):
        raise ValueError("calls stand in a list: [name(argument=value)]")
    return calls


# -- Gemma


_CALL = re.compile(r"\s*call:([\w.:-]+?)\s*(\{.*\})\s*", re.DOTALL)
_LEXEME = re.compile(
    r'<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>|("(?:[^"\\]|\\.)*"|-?\d[\w.+-]*)|([A-Za-z_][\w.-]*)(\s*:)?', re.DOTALL
)
_WORDS: Final = {"None": "null", "none": "null", "nil": "null", "True": "true", "False": "false"}


def gemma(body: str, schemas: Schemas, is_closed: bool) -> list[ToolCall]:
    """``call:NAME{key:<|"|>text<|"|>,n:5}`` (Gemma 4; FunctionGemma quotes by ``<escape>``)."""

    def lexeme(found: re.Match[str]) -> str:
        text, other, whole, word, is_key = found.groups()
        if word is not None:
            known = _WORDS.get(word, word)
            if not is_key and known not in ("null", "true", "false"):
                raise ValueError(f"{word[:60]}: text stands between {quote} and {quote}")
            return f'"{word}":' if is_key else known
        return whole if whole is not None else json.dumps(text if text is not None else other)

    quote, found = "<escape>" if "<escape>" in body else '<|"|>', _CALL.fullmatch(body)
    if found is None:
        raise ValueError(f"expected call:NAME{{key:{quote}text{quote}}}")
    return [ToolCall(found[1], _decoded(_LEXEME.sub(lexeme, found[2]))[0])]


def gemma_3(text: str, schemas: Schemas) -> list[ToolCall]:
    """Gemma 3 has no markup of its own: Google documents ``tool_code``, lists of calls and JSON. Python that names no
    tool is an answer."""
    named = re.compile(rf"\b(?:{'|'.join(map(re.escape, schemas))})\s*\(")
    blocks = [code for kind, code in _TOOL_CODE.findall(text) if kind != "python" or named.search(code)]
    if blocks:
        return [call for block in blocks for call in _python_calls(block, schemas)]
    return loose_lists(text, schemas) or loose_objects(text, schemas)


# -- Writing


def each_as(
    form: str, join: str = "", around: tuple[str, str] = ("", ""), arguments: Callable[[Any], str] = as_json
) -> Callable[[Sequence[ToolCall]], str]:
    """Writes each call in a form with its name (%N) and its arguments (%A)."""
    before, after = form.split("%A")

    def write(calls: Sequence[ToolCall]) -> str:
        texts = [before.replace("%N", call.name) + arguments(call.arguments) + after for call in calls]
        return around[0] + join.join(texts) + around[1]

    return write


def tagged(pair: str) -> Callable[[dict[str, Any]], str]:
    """Writes each argument in a form with two places; text as it is, other values as JSON."""

    def write(given: dict[str, Any]) -> str:
        return "".join(
            pair.format(key, each if isinstance(each, str) else as_json(each)) for key, each in given.items()
        )

    return write


def keywords(given: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in given.items())


def quoted(value: Any, quote: str = '<|"|>') -> str:
    """A value as Gemma writes it."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{quoted(each, quote)}" for key, each in value.items()) + "}"
    return f"[{','.join(quoted(each, quote) for each in value)}]" if isinstance(value, list) else as_json(value)
