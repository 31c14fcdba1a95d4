"""The agent's tools, ART-E's three and one for threads, with its names, parameters and limits, as typed functions.
``tool_schemas`` reads their signatures and docstrings, ``call_tool`` checks a model's arguments against the same. The
first parameter, the mailbox and with it the inbox, is bound by the environment and appears in no schema."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from emailrl.base.errors import ToolError
from emailrl.settings.tree import MAX_RESULTS

if TYPE_CHECKING:
    from emailrl.mail import Email, Mailbox
    from emailrl.settings import AgentSettings

MAX_READ_CHARS = 200_000
"""Characters of a body that ``read_email`` returns: more than most context windows hold. Anyone can send an email of
10 MB, for which a tokenizer takes half a minute and gigabytes, or crashes (Qwen's, on blanks alone)."""
MAX_THREAD = 50  # Emails that ``read_thread`` returns, around the one that is asked for
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
    return _in_full(found, MAX_READ_CHARS)


def _in_full(found: Email, most: int) -> dict[str, Any]:
    """An email with at most so many characters of its body; what is cut says so at its end."""
    email = {each.name: getattr(found, each.name) for each in fields(found) if each.compare}
    if (length := len(email["body"])) > most:
        email["body"] = f"{email['body'][:most]} … (cut: {most:,} of {length:,} characters)"
    for field in ("to_addresses", "cc_addresses", "bcc_addresses"):
        if (more := len(email[field]) - MAX_READ_ADDRESSES) > 0:
            email[field] = [*email[field][:MAX_READ_ADDRESSES], f"… and {more:,} more"]
    return email


def read_thread(mailbox: Mailbox, message_id: str) -> list[dict[str, Any]] | dict[str, Any]:
    """Read the whole conversation that an email belongs to, oldest email first.

    Args:
        message_id: The message id of any email of the conversation, as a search returned it.
    """
    found = mailbox.read(message_id)
    if found is None:
        return EMAIL_NOT_FOUND
    ids = mailbox.thread(found)
    first = max(0, min(ids.index(found.message_id) - MAX_THREAD // 2, len(ids) - MAX_THREAD))
    shown = ids[first : first + MAX_THREAD]
    return [_in_full(email, MAX_READ_CHARS // len(shown)) for email in map(mailbox.read, shown) if email is not None]


def return_final_answer(mailbox: Mailbox, answer: str, sources: list[str] | None) -> None:
    """Return the final answer to the user's question and end the search.

    Args:
        answer: The answer; "I don't know" if the mailbox does not hold it.
        sources: Message ids of the emails that support the answer, usually one; empty if there is no answer.
    """


Tool = Callable[..., Any]
TOOLS: dict[str, Tool] = {tool.__name__: tool for tool in (search_emails, read_email, return_final_answer)}
WITH_THREADS: dict[str, Tool] = {tool.__name__: tool for tool in (search_emails, read_email, read_thread)} | TOOLS


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_TYPES: dict[str, tuple[str, dict[str, Any], Callable[[Any], bool]]] = {
    "str": ("string", {"type": "string"}, lambda value: isinstance(value, str)),
    "int": ("integer", {"type": "integer"}, lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "list[str]": ("a list of strings", {"type": "array", "items": {"type": "string"}}, _is_texts),
    "None": ("null", {"type": "null"}, lambda value: value is None),
}
"""What annotations mean: in words, as JSON schema, and as a check."""


def tools_of(agent: AgentSettings | None) -> dict[str, Tool]:
    return WITH_THREADS if agent is not None and agent.read_threads else TOOLS


def tool_schemas(agent: AgentSettings | None = None) -> list[dict[str, Any]]:
    """OpenAI function schemas of the tools, a fresh copy each call; descriptions follow the search settings."""
    schemas = list[dict[str, Any]]()
    for name, tool in tools_of(agent).items():
        summary, _, arguments = (inspect.getdoc(tool) or "").partition("Args:")
        descriptions = dict(re.findall(r"^\s+(\w+): (.+)$", arguments, re.MULTILINE))
        properties: dict[str, Any] = {}
        for parameter in _parameters(name):
            kinds = [copy.deepcopy(_TYPES[kind][1]) for kind in parameter.annotation.split(" | ")]
            kind = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
            default = {} if parameter.default is parameter.empty else {"default": parameter.default}
            properties[parameter.name] = kind | {"description": descriptions[parameter.name]} | default
        required = [parameter for parameter, kind in properties.items() if "default" not in kind]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": name, "description": summary.strip(), "parameters": parameters}
        schemas.append({"type": "function", "function": function})
    search = schemas[0]["function"]
    if agent is not None and agent.search_order == "relevance":
        search["description"] = search["description"].replace("newest first", "most relevant first")
    if agent is None or agent.search_without_keywords:
        search["parameters"]["properties"]["keywords"]["description"] += WITHOUT_KEYWORDS
    return schemas


@cache
def _parameters(name: str) -> list[inspect.Parameter]:
    """All parameters of a tool but the mailbox."""
    return list(inspect.signature(WITH_THREADS[name]).parameters.values())[1:]


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Compare arguments with the tool's signature; raises ``ToolError`` on the first mismatch."""
    parameters = _parameters(name)
    for argument in arguments:
        if argument not in [parameter.name for parameter in parameters]:
            raise ToolError(f"{name} has no argument {argument!r}.")
    for parameter in parameters:
        kinds = [_TYPES[kind] for kind in parameter.annotation.split(" | ")]
        if parameter.name not in arguments:
            if parameter.default is parameter.empty:
                raise ToolError(f"{name} needs the argument {parameter.name!r}.")
        elif not any(fits(arguments[parameter.name]) for _, _, fits in kinds):
            raise ToolError(f"{name}: {parameter.name!r} must be {' or '.join(word for word, _, _ in kinds)}.")


def call_tool(mailbox: Mailbox, name: str, arguments: dict[str, Any]) -> Any:
    """Run one tool on checked arguments; raises only ``ToolError`` for bad ones."""
    check_arguments(name, arguments)
    return WITH_THREADS[name](mailbox, **arguments)


def to_json(result: Any) -> str:
    """A tool's result as the model sees it: compact JSON, non-ASCII letters unescaped."""
    return json.dumps(result, ensure_ascii=False, separators=(",", ":"))
