"""A chat-completions server in a thread, well-behaved or hostile as a test tells it, and a model that answers well."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from local_server import JsonStub

Answer = Callable[[dict[str, Any], int], "tuple[int, Any]"]
"""From a request's body and its number, counted from 1, to (status, content of the message, or an error's text).

A status of 0 hangs until the stub closes, 1 drips a byte every tenth of a second, 2 sends the content as the body.
"""


class ChatStub(JsonStub):
    """Keeps what it is asked and the keys it is shown."""

    def __init__(self, answer: Answer, *, usage: dict[str, Any] | None = None) -> None:
        def reply(body: dict[str, Any], number: int) -> tuple[int, str]:
            status, content = answer(body, number)
            message = {"role": "assistant", "content": content}
            value: Any = {
                "id": "1", "object": "chat.completion", "created": 0, "model": "m", "usage": usage,
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            }  # fmt: skip
            if status >= 300:
                value = {"error": {"message": content}}
            return status, content if status == 2 else json.dumps(value)

        super().__init__(reply, path="/v1")


def mails_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The mails that a request's prompt shows."""
    mails = json.loads(body["messages"][1]["content"])["mails"]
    assert isinstance(mails, list)
    return mails


def questions_on(mails: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Good questions, one on each of the first ten mails: what a careful model writes."""
    return [
        {
            "question": f"What is the code of the {mail['subject']}?",
            "answer": mail["body"].split("The code is ")[1].split(".")[0],
            "message_ids": [mail["message_id"]],
            "how_realistic": 0.7,
        }
        for mail in mails[:10]
    ]


def good(body: dict[str, Any], number: int) -> tuple[int, str]:
    """The answer of a model that does as it is told."""
    return 200, json.dumps(questions_on(mails_of(body)))
