"""A chat-completions server in a thread that answers as a test tells it to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from local_server import JsonStub

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.openai import OpenAIEngine
from emailrl.records.trajectory import Message
from emailrl.settings import Settings, load_settings

Reply = Callable[[dict[str, Any]], "tuple[int, Any] | tuple[int, Any, dict[str, str]]"]
"""From a request's body to (status, JSON body) or (status, JSON body, headers); bytes are sent as they are."""


class StubServer(JsonStub):
    """``reply`` is called with the body, to which ``"path"`` is added; a GET has no other keys."""

    def __init__(self, reply: Reply, *, delay: float = 0.0) -> None:
        self.reply = reply
        super().__init__(lambda body, n: self.reply(body | {"path": self.paths[n - 1]}), path="/v1", delay=delay)

    @property
    def asked(self) -> list[tuple[str, dict[str, Any]]]:
        """Paths and bodies."""
        return list(zip(self.paths, self.requests, strict=False))


SEARCH = ("search_emails", '{"keywords": ["lease"]}')
ANSWER = ("return_final_answer", '{"answer": "31 May 2002", "sources": ["<m0@x>"]}')


def settings_for(url: str, tmp_path: Path, **overrides: Any) -> Settings:
    given = {"engine": "openai", "openai_base_url": url, "model_name": "org/big", "openai_retries": 2, "max_turns": 3}
    return load_settings(given | overrides, environ={}, cwd=tmp_path)


def ask(url: str, tmp_path: Path, *texts: str, **overrides: Any) -> list[Completion]:
    """What the chat engine makes of a server's replies to each text."""
    sampling = SamplingParams(9, temperature=0.5)
    requests = [Request(str(n), sampling, messages=[Message("user", text)], seed=n) for n, text in enumerate(texts)]
    return OpenAIEngine(settings_for(url, tmp_path, **overrides), []).generate(requests)


def said(
    content: str | None = None, *calls: tuple[str, str], finish: str = "stop", usage: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A chat completion; each call is (name, arguments as JSON text)."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"id{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    choice = {"index": 0, "finish_reason": finish, "message": message}
    counted = usage or {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": counted}
