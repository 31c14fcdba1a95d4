"""The agent's three tools, with ART-E's names, parameters and limits, as typed functions.

``tool_schemas`` reads their signatures and docstrings, ``call_tool`` checks a model's arguments against the same. The
first parameter, the mailbox and with it the inbox, is bound by the environment and appears in no schema.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from emailrl.base.errors import ToolError

if TYPE_CHECKING:
    from emailrl.mail import Mailbox
    from emailrl.settings import AgentSettings

MAX_RESULTS = 10
MAX_READ_CHARS = 200_000
"""Characters of a body that ``read_email`` returns: more than most context windows hold. Anyone can send an email of
10 MB, for which a tokenizer takes half a minute and gigabytes, or crashes (Qwen's, on blanks alone)."""
MAX_READ_ADDRESSES = 1000  # Addresses of each field that ``read_email`` returns
WITHOUT_KEYWORDS = " May be empty where an address or a date is given."
"""Added to the description of keywords if mailboxes can be searched without them."""
EMAIL_NOT_FOUND = {"error": "Email not found"}


def search_emails(
    mailbox: Mailbox,
    keywords: list[str],
    from_addr: str | None = None,
    to_addr: str | None = None,
    sent_after: str | None = None,
    sent_before: str | None = None,
    max_results: int = MAX_RESULTS,
) -> list[dict[str, str]]:
    """Search the user's mailbox for emails that contain all of the keywords, newest first.

    Args:
        keywords: Words or phrases that must all occur in the subject or body.
        from_addr: Only emails sent by this address.
        to_addr: Only emails sent to this address (to, cc or bcc).
        sent_after: Only emails sent on or after this date, YYYY-MM-DD.
        sent_before: Only emails sent before this date, YYYY-MM-DD.
        max_results: Most emails to return, at most 10.
    """
    if max_results > MAX_RESULTS:
        raise ToolError(f"max_results must be less than or equal to {MAX_RESULTS}.")
    hits = mailbox.search(keywords, from_addr, to_addr, sent_after, sent_before, max_results)
    return [{"message_id": hit.message_id, "snippet": hit.snippet} for hit in hits]


def read_email(mailbox: Mailbox, message_id: str) -> dict[str, Any]:
    """Read one email of the user's mailbox in full.

    Args:
        message_id: The message id of the email, as a search returned it.
    """
    found = mailbox.read(message_id)
    if found is None:
        return EMAIL_NOT_FOUND
    email = asdict(found)  # what is cut says so at its end
    if (length := len(email["body"])) > MAX_READ_CHARS:
        email["body"] = f"{email['body'][:MAX_READ_CHARS]} … (cut: {MAX_READ_CHARS:,} of {length:,} characters)"
    for field in ("to_addresses", "cc_addresses", "bcc_addresses"):
        if (more := len(email[field]) - MAX_READ_ADDRESSES) > 0:
            email[field] = [*email[field][:MAX_READ_ADDRESSES], f"… and {more:,} more"]
    return email


def return_final_answer(mailbox: Mailbox, answer: str, sources: list[str] | None) -> None:
    """Return the final answer to the user's question and end the search.

    Args:
        answer: The answer; "I don't know" if the mailbox does not hold it.
        sources: Message ids of the emails that support the answer, usually one; empty if there is no answer.
    """


_IN_ORDER: tuple[Callable[..., Any], ...] = (search_emails, read_email, return_final_answer)
TOOLS = {tool.__name__: tool for tool in _IN_ORDER}


def tool_schemas(agent: AgentSettings | None = None) -> list[dict[str, Any]]:
    """OpenAI function schemas of the tools, a fresh copy each call; descriptions follow the search settings."""
    schemas = [_schema(tool) for tool in TOOLS.values()]
    search = schemas[0]["function"]
    if agent is not None and agent.search_order == "relevance":
        search["description"] = search["description"].replace("newest first", "most relevant first")
    if agent is None or agent.search_without_keywords:
        search["parameters"]["properties"]["keywords"]["description"] += WITHOUT_KEYWORDS
    return schemas


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Compare arguments with the tool's signature; raises ``ToolError`` on the first mismatch."""
    parameters = _parameters(TOOLS[name])
    for argument in arguments:
        if argument not in parameters:
            raise ToolError(f"{name} has no argument {argument!r}.")
    for parameter, (annotation, default) in parameters.items():
        if parameter not in arguments:
            if default is inspect.Parameter.empty:
                raise ToolError(f"{name} needs the argument {parameter!r}.")
        elif not _fits(arguments[parameter], annotation):
            raise ToolError(f"{name}: {parameter!r} must be {_type_name(annotation)}.")


def call_tool(mailbox: Mailbox, name: str, arguments: dict[str, Any]) -> Any:
    """Run one tool on checked arguments; raises only ``ToolError`` for bad ones."""
    check_arguments(name, arguments)
    return TOOLS[name](mailbox, **arguments)


def to_json(result: Any) -> str:
    """A tool's result as the model sees it: compact JSON, non-ASCII letters unescaped."""
    return json.dumps(result, ensure_ascii=False, separators=(",", ":"))


@cache
def _parameters(tool: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Name → (annotation, default) of every parameter but the mailbox."""
    # The mailbox's class is imported for type checkers only, so its name is given here.
    hints = get_type_hints(tool, localns={"Mailbox": object})
    parameters = list(inspect.signature(tool).parameters.values())[1:]
    return {parameter.name: (hints[parameter.name], parameter.default) for parameter in parameters}


def _schema(tool: Callable[..., Any]) -> dict[str, Any]:
    summary, _, arguments = (inspect.getdoc(tool) or "").partition("Args:")
    descriptions = dict(re.findall(r"^\s+(\w+): (.+)$", arguments, re.MULTILINE))
    properties, required = {}, []
    for name, (annotation, default) in _parameters(tool).items():
        properties[name] = _json_type(annotation) | {"description": descriptions[name]}
        if default is inspect.Parameter.empty:
            required.append(name)
        else:
            properties[name]["default"] = default
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": tool.__name__, "description": summary.strip(), "parameters": parameters},
    }


_JSON_TYPES = {str: "string", int: "integer", type(None): "null"}


def _json_type(annotation: Any) -> dict[str, Any]:
    if get_origin(annotation) is list:
        return {"type": "array", "items": _json_type(get_args(annotation)[0])}
    if get_origin(annotation) in (types.UnionType, Union):
        return {"anyOf": [_json_type(member) for member in get_args(annotation)]}
    return {"type": _JSON_TYPES[annotation]}


def _fits(value: Any, annotation: Any) -> bool:
    if get_origin(annotation) is list:
        return isinstance(value, list) and all(_fits(item, get_args(annotation)[0]) for item in value)
    if get_origin(annotation) in (types.UnionType, Union):
        return any(_fits(value, member) for member in get_args(annotation))
    return isinstance(value, annotation) and not isinstance(value, bool)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is list:
        return f"a list of {_type_name(get_args(annotation)[0])}s"
    if get_origin(annotation) in (types.UnionType, Union):
        return " or ".join(_type_name(member) for member in get_args(annotation))
    return _JSON_TYPES[annotation]
