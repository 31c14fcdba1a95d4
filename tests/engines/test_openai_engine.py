"""The engine of chat servers against a real HTTP server: what is sent, read and counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from engines.asking import ANSWER, SEARCH, ask, settings_for
from engines.chat_server import StubServer, said

from emailrl.agent.tools import tool_schemas
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.openai import OpenAIEngine, as_api
from emailrl.records.trajectory import Message, ToolCall


def test_what_is_sent_and_read(serve: Callable[..., StubServer], tmp_path: Path) -> None:
    server = serve(lambda body: (200, said(None, SEARCH, ANSWER, finish="tool_calls")))
    settings = settings_for(server.url, tmp_path, openai_api_key="sk-own", openrouter_api_key="sk-router")
    with closing(OpenAIEngine(settings, tool_schemas())) as engine:
        sampling = SamplingParams(9, temperature=0.5, top_p=0.9, top_k=7)
        [completion] = engine.generate(
            [Request("a", sampling, messages=[Message("user", "When?")], seed=(5 << 31) + 3)]
        )
    [(path, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "org/big", "messages": [{"role": "user", "content": "When?"}], "max_tokens": 9, "temperature": 0.5,
        "top_p": 0.9, "top_k": 7, "seed": 3, "tools": tool_schemas(),
    }  # fmt: skip
    assert server.keys == ["Bearer sk-own"]  # never OpenRouter's
    assert completion.message is not None and completion.message.content == ""
    assert completion.message.tool_calls == [
        ToolCall("search_emails", {"keywords": ["lease"]}, "id0"),
        ToolCall("return_final_answer", {"answer": "31 May 2002", "sources": ["<m0@x>"]}, "id1"),
    ]
    assert (completion.finish_reason, completion.token_ids, completion.logprobs) == ("stop", [], [])
    assert (completion.prompt_tokens, completion.completion_tokens, completion.cost) == (100, 20, None)
    assert (completion.policy_version, completion.error) == ("org/big", None)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (("search_emails", '{"keywords": ['), "not JSON"),
        (("search_emails", '["lease"]'), "not an object"),
        (("", "{}"), "no function name"),
        (("search_emails", "[" * 100_000), ""),
    ],
)
def test_a_broken_call_is_a_parse_error(
    serve: Callable[..., StubServer], tmp_path: Path, call: tuple[str, str], problem: str
) -> None:
    server = serve(lambda body: (200, said("", call)))
    with closing(OpenAIEngine(settings_for(server.url, tmp_path), [])) as engine:
        [completion] = ask(engine, "?")
    assert completion.error is None and completion.message is not None
    assert completion.message.parse_error is not None and problem in completion.message.parse_error


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "search_emails", "arguments": {}}</tool_call>', "left the tool call in the text"),
        ('<tool_call>{"name": "search_em', "not closed"),
    ],
)
def test_markup_that_the_server_did_not_read_is_a_parse_error(
    serve: Callable[..., StubServer], tmp_path: Path, text: str, problem: str
) -> None:
    server = serve(lambda body: (200, said(text)))
    with closing(OpenAIEngine(settings_for(server.url, tmp_path), [])) as engine:
        [completion] = ask(engine, "?")
    assert completion.message is not None and completion.message.tool_calls == []
    assert completion.message.parse_error is not None and problem in completion.message.parse_error


@pytest.mark.parametrize(
    ("prices", "usage", "cost"),
    [
        ({"input_price": 2.0, "output_price": 10.0}, {"cost": 9.0}, 0.0004),  # 100 · 2e-6 + 20 · 10e-6
        ({"output_price": 10.0}, {}, 0.0002),
        ({}, {"cost": 0.00125}, 0.00125),
        ({}, {}, None),
    ],
)
def test_cost_comes_from_the_prices_set_else_from_the_server(
    serve: Callable[..., StubServer],
    tmp_path: Path,
    prices: dict[str, float],
    usage: dict[str, float],
    cost: float | None,
) -> None:
    counted = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120} | usage
    server = serve(lambda body: (200, said("hm", usage=counted)))
    with closing(OpenAIEngine(settings_for(server.url, tmp_path, **prices), [])) as engine:
        [completion] = ask(engine, "?")
    assert completion.cost == (None if cost is None else pytest.approx(cost, abs=1e-12))


def test_conversations_go_on_at_their_own_pace_and_never_too_many_at_once(
    serve: Callable[..., StubServer], tmp_path: Path
) -> None:
    server = serve(lambda body: (200, said("more")), delay=0.02)
    ended: list[str] = []
    with closing(OpenAIEngine(settings_for(server.url, tmp_path, rollout_concurrency=2), [])) as engine:

        def advance(completion: Completion) -> Request | None:
            ended.append(completion.trajectory_id)
            again = ended.count(completion.trajectory_id) < (5 if completion.trajectory_id == "long" else 1)
            return request(completion.trajectory_id) if again else None

        def request(name: str) -> Request:
            return Request(name, SamplingParams(9), messages=[Message("user", name)])

        completions = engine.generate([request(name) for name in ("long", "a", "b", "c")], advance)
    assert server.busiest == 2
    assert [completion.trajectory_id for completion in completions] == ended and len(ended) == 8
    assert ended.index("c") < len(ended) - 1 and ended[-1] == "long"  # nobody waited for the long one


def test_only_the_call_that_was_played_is_told_again() -> None:
    calls = [ToolCall("search_emails", {"keywords": ["Größe"]}, "x"), ToolCall("read_email", {}, "y")]
    assert as_api(Message("assistant", "", calls)) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "x", "type": "function",
             "function": {"name": "search_emails", "arguments": '{"keywords": ["Größe"]}'}}
        ],
    }  # fmt: skip
    assert as_api(Message("tool", "[]", tool_call_id="x", name="search_emails")) == {
        "role": "tool", "tool_call_id": "x", "content": "[]",
    }  # fmt: skip
