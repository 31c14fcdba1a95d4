"""The agent behind an OpenAI-compatible chat endpoint, so that any chat client asks a mailbox. What the agent does
arrives as ``reasoning_content``, as reasoning models send their thoughts; then its answer, with links to the emails it
cites. A link opens the email as plain text, with a key of its own, as a browser that follows it sends no token."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import cut, one_line, plain
from emailrl.facts.words import is_i_dont_know
from emailrl.mail import Mailbox

if TYPE_CHECKING:
    from emailrl.agent import StepResult
    from emailrl.agent.email_agent import Answer

MODEL: Final = "emailrl"
EMAILS: Final = "/emails/"
MAX_BODY_BYTES: Final = 4 * 1024 * 1024  # of a request: a long conversation
I_DONT_KNOW: Final = "I don't know."
SOURCES: Final = "Sources:"
Told = tuple[str, str]
"""A question and its answer, earlier in a conversation."""
Ask = Callable[[str, Sequence[Told], Callable[["StepResult"], None]], "Answer"]


def conversation(messages: Any) -> tuple[str, list[Told]]:
    """The question of a request, its last user message, and the earlier turns. System messages are the client's words
    to a general assistant, and left out. UsageError for anything but a conversation that ends with the user."""
    turns = list[list[str]]()
    for message in messages if isinstance(messages, list) else []:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
            content = "\n".join(text for text in texts if isinstance(text, str))
        if role == "user" and isinstance(content, str):
            turns.append([content.strip(), ""])
        elif role == "assistant" and isinstance(content, str) and turns:
            turns[-1][1] = content.partition(f"\n\n{SOURCES}")[0].strip()
    if not turns or not turns[-1][0] or turns[-1][1]:
        raise UsageError("messages must end with a question of the user.")
    return turns[-1][0], [(question, answer) for question, answer in turns[:-1] if answer]


def told(step: StepResult) -> str:
    """One step in a line, for the client to show while it waits."""
    arguments = step.tool_args or {}
    if step.tool_name == "search_emails":
        filters = [f"{key} {value}" for key, value in arguments.items() if value and key != "keywords"]
        words = ", ".join([" ".join(map(str, arguments.get("keywords") or [])), *filters])
        return f"Search: {one_line(words)}\n"
    if step.tool_name in ("read_email", "read_thread"):
        what = "Read" if step.tool_name == "read_email" else "Read thread"
        return f"{what}: {cut(one_line(str(arguments.get('message_id'))), 200)}\n"
    return ""


class ChatServer:
    """The endpoint's requests. ``ask`` answers one question at a time, in a thread."""

    def __init__(self, mailbox: Callable[[], Mailbox], ask: Ask, address: str) -> None:
        self._mailbox, self._ask, self._address = mailbox, ask, address
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._created = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route(EMAILS + "{message_id:path}", self._email),
            ]
        )

    def link(self, message_id: str) -> str:
        return f"{self._address}{EMAILS}{quote(message_id, safe='')}?key={self._key(message_id)}"

    def _key(self, message_id: str) -> str:
        return hmac.new(self._secret, message_id.encode("utf-8", "replace"), hashlib.sha256).hexdigest()[:32]

    async def _models(self, request: Request) -> Response:
        own = {"id": MODEL, "object": "model", "created": self._created, "owned_by": MODEL}
        return JSONResponse({"object": "list", "data": [own]})

    async def _email(self, request: Request) -> Response:
        message_id = request.path_params["message_id"]
        headers = {"Content-Security-Policy": "default-src 'none'", "X-Content-Type-Options": "nosniff"}
        headers |= {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
        if not hmac.compare_digest(request.query_params.get("key", "").encode(), self._key(message_id).encode()):
            return PlainTextResponse("Open the link as the answer shows it.", 403, headers)
        with self._mailbox() as mailbox:
            email = mailbox.read(message_id)
        if email is None:
            return PlainTextResponse("This email is no longer there.", 404, headers)
        people = {"To": email.to_addresses, "Cc": email.cc_addresses}
        lines = [f"From: {email.from_address}", *(f"{name}: {', '.join(who)}" for name, who in people.items() if who)]
        text = "\n".join([*lines, f"Date: {email.date}", f"Subject: {email.subject}", "", email.body])
        return PlainTextResponse(plain(text), headers=headers)

    async def _complete(self, request: Request) -> Response:
        try:
            body = b""
            async for part in request.stream():
                if len(body := body + part) > MAX_BODY_BYTES:
                    return JSONResponse(_problem("The request is too large."), 413)
            wanted = json.loads(body)
            question, earlier = conversation(wanted.get("messages") if isinstance(wanted, dict) else None)
        except (ValueError, RecursionError):
            return JSONResponse(_problem("The request is not JSON."), 400)
        except UsageError as error:
            return JSONResponse(_problem(error), 400)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": MODEL}
        if wanted.get("stream"):
            return StreamingResponse(self._stream(head, question, earlier), media_type="text/event-stream")
        steps = list[str]()
        try:
            answer = await asyncio.to_thread(self._answer, question, earlier, steps.append)
        except EmailRLError as error:
            return JSONResponse(_problem(error, "server_error"), 500)
        message = {"role": "assistant", "content": self._content(answer), "reasoning_content": "".join(steps)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse(head | {"object": "chat.completion", "choices": [choice], "usage": _usage(answer)})

    async def _stream(self, head: dict[str, Any], question: str, earlier: Sequence[Told]) -> AsyncIterator[str]:
        """The chunks of an answer as server-sent events: each step as it ends, then the answer."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[str | Answer | Exception] = asyncio.Queue()

        def put(item: str | Answer | Exception) -> None:
            loop.call_soon_threadsafe(arrived.put_nowait, item)

        def play() -> None:
            try:
                put(self._answer(question, earlier, put))
            except Exception as error:
                put(error)

        def event(delta: dict[str, str], **more: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": None} | more.pop("choice", {})
            return f"data: {json.dumps(head | {'object': 'chat.completion.chunk', 'choices': [choice]} | more)}\n\n"

        playing = asyncio.create_task(asyncio.to_thread(play))
        yield event({"role": "assistant", "content": ""})
        while isinstance(item := await arrived.get(), str):
            yield event({"reasoning_content": item})
        await playing
        if isinstance(item, Exception):
            yield f"data: {json.dumps(_problem(item, 'server_error'))}\n\n"
            return
        yield event({"content": self._content(item)})
        yield event({}, choice={"finish_reason": "stop"}, usage=_usage(item))
        yield "data: [DONE]\n\n"

    def _answer(self, question: str, earlier: Sequence[Told], tell: Callable[[str], None]) -> Answer:
        with self._lock:
            return self._ask(question, earlier, lambda step: tell(line) if (line := told(step)) else None)

    def _content(self, answer: Answer) -> str:
        """The answer in Markdown, with a link to each email that it cites and the mailbox has."""
        if answer.answer is None or is_i_dont_know(answer.answer):
            return I_DONT_KNOW
        links = [
            f"- [{_escaped(email.subject or '(no subject)')}, {_escaped(email.from_address)}, "
            f"{(email.date or 'no date')[:10]}]({self.link(email.message_id)})"
            for email in answer.emails
        ]
        return "\n".join([plain(answer.answer.strip()), *(["", SOURCES, *links] if links else [])])


def _escaped(text: str) -> str:
    """Text of an email as Markdown that is text alone: no link, no picture, no tag."""
    return re.sub(r"([\\`*_{}\[\]<>()#+.!|~&-])", r"\\\1", cut(one_line(text), 100))


def _usage(answer: Answer) -> dict[str, int]:
    rubric = answer.trajectory.rubric
    prompt, completion = rubric["prompt_tokens"], rubric["completion_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _problem(error: str | Exception, kind: str = "invalid_request_error") -> dict[str, Any]:
    message = str(error) if isinstance(error, str | EmailRLError) else f"{type(error).__name__} in the agent."
    return {"error": {"message": one_line(message), "type": kind, "code": None}}
