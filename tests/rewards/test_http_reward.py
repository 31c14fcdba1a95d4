"""A remote reward: what is sent, what is accepted, and that a failing server is never worth 0."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

import pytest
from local_server import JsonStub, Reply

from emailrl.agent import Rubric
from emailrl.base.errors import UsageError
from emailrl.records.trajectory import Message, Scenario, StopReason, ToolCall, Trajectory
from emailrl.rewards.scorer import build_scorer
from emailrl.settings import RewardSettings, Settings, load_settings

SCENARIO = Scenario("1", "When is the drill?", "May 20", ["<1@x>"], "ida@corvane.test", "2002-05-10")
Serve = Callable[..., JsonStub]


def trajectory(number: int) -> Trajectory:
    return Trajectory(
        f"t{number}",
        "g",
        SCENARIO,
        messages=[
            Message("system", "Search."),
            Message("user", "When is the drill?"),
            Message("assistant", "", [ToolCall("search_emails", {"keywords": ["drill"]})]),
            Message("tool", "half an emoji: \ud83d"),  # what a mail holds need not be encodable
            Message("assistant", f"<tool_call>{number}</tool_call>", [ToolCall("return_final_answer", {})]),
        ],
        rubric=asdict(Rubric(attempted_answer=True, num_turns=2)),
        final_answer="May 20",
        final_sources=["<1@x>"],
        stop_reason=StopReason.ANSWERED,
    )


def rewards(numbers: list[Any] | None = None, **more: Any) -> Reply:
    """Reply with these rewards, or with the number in each id."""

    def reply(body: dict[str, Any], _: int) -> tuple[int, str]:
        ids = [each["id"] for each in body["trajectories"]]
        return 200, json.dumps({"rewards": [float(i[1:]) for i in ids] if numbers is None else numbers} | more)

    return reply


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stubs:
        yield lambda reply, **how: stubs.enter_context(closing(JsonStub(reply, path="/get_reward", **how)))


def score(url: str, count: int = 3, **settings: Any) -> list[Trajectory]:
    played = [trajectory(number) for number in range(count)]
    own = load_settings({"reward": url, "judge": "offline"} | settings, environ={})
    build_scorer(own.rewards, own.reward_weights, own.agent).score(played)
    return played


def test_the_request_carries_openrlhfs_lists_and_what_a_mail_agent_needs(serve: Serve) -> None:
    stub = serve(rewards())
    score(stub.url, 1)
    [body] = stub.requests
    prompt = "system: Search.\n\nuser: When is the drill?"
    call = {"name": "search_emails", "arguments": {"keywords": ["drill"]}}
    said = f"assistant: {json.dumps(call)}\n\ntool: half an emoji: \ud83d\n\nassistant: <tool_call>0</tool_call>"
    assert (body["version"], body["query"]) == (1, [f"{prompt}\n\n{said}"])
    assert (body["prompts"], body["labels"]) == ([prompt], ["May 20"])
    [described] = body["trajectories"]
    assert described.pop("messages")[2]["tool_calls"] == [call]
    rubric = described.pop("rubric")
    assert rubric["answer_correct"] is True and rubric["num_turns"] == 2
    expected = {"id": "t0", "group_id": "g", "inbox_address": "ida@corvane.test", "query_date": "2002-05-10"}
    expected |= {"question": "When is the drill?", "reference_answer": "May 20", "reference_sources": ["<1@x>"]}
    assert described == expected | {"final_answer": "May 20", "final_sources": ["<1@x>"], "stop_reason": "answered"}
    assert stub.paths == ["/get_reward"]


def test_rewards_come_back_to_their_trajectories_in_batches(serve: Serve) -> None:
    stub = serve(rewards(), delay=0.05)
    played = score(stub.url, 7, reward_batch_size=3, rollout_concurrency=2)
    assert [t.reward for t in played] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert [t.reward_terms for t in played[:2]] == [{"remote": 0.0}, {"remote": 1.0}]
    assert sorted(len(body["query"]) for body in stub.requests) == [1, 3, 3]
    assert stub.busiest == 2


def test_terms_scores_and_extra_logs_are_kept(serve: Serve) -> None:
    reply = rewards([{"a": 1, "b": -0.5}, 2.0], ids=["t0", "t1"], scores=[0.25, 0.75], extra_logs={"length": [3, 4]})
    first, second = score(serve(reply).url, 2)
    assert (first.reward, first.reward_terms) == (0.5, {"a": 1.0, "b": -0.5})
    assert (second.reward, second.reward_terms) == (2.0, {"remote": 2.0})
    assert [t.rubric["remote_score"] for t in (first, second)] == [0.25, 0.75]
    assert [t.rubric["remote_length"] for t in (first, second)] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"rewards": [1, 2]}', "replied with 2 rewards for 3 trajectories"),
        ('{"rewards": 1}', "rewards that are not a list"),
        ('{"scores": [1, 2, 3]}', "replied without rewards"),
        ("[1, 2, 3]", "replied without rewards"),
        ('{"rewards": [1, NaN, 3]}', "Rewards must be finite"),
        ('{"rewards": [1, {"a": 1e308, "b": 1e308}, 3]}', "Rewards must lie within"),
        ('{"rewards": [1, -1e10, 3]}', "Rewards must lie within"),
        ("[" * 100_000, "replied with invalid JSON"),
        ('{"rewards": [1, 1' + 400 * "0" + ", 3]}", "returned 1000"),
        ('{"rewards": [1, null, 3]}', "returned None"),
        ('{"rewards": [1, "2", 3]}', "returned '2'"),
        ('{"rewards": [1, {}, 3]}', "returned {}"),
        ('{"rewards": [1, 2, 3], "ids": ["t1", "t0", "t2"]}', "ids that differ from those sent, or in another order"),
        ('{"rewards": [1, 2, 3], "scores": [1, 2]}', "replied with 2 score for 3 trajectories"),
        ('{"rewards": [1, 2, 3], "extra_logs": {"x": [1, 2, NaN]}}', "Rewards must be finite"),
        ('{"rewards": [1, 2, 3], "extra_logs": [1]}', "extra_logs that are not an object"),
    ],
)
def test_a_wrong_reply_is_an_exception_of_every_trajectory_and_no_reward(
    serve: Serve, waits: list[float], body: str, told: str
) -> None:
    stub = serve(lambda *_: (200, body))
    for each in score(stub.url):
        assert each.exception is not None and each.reward == 0.0 and each.reward_terms == {}
        assert re.search(told, each.exception)
        assert not any(name.startswith("remote_") for name in each.rubric)
    assert len(stub.requests) == 1 and waits == []  # a wrong reply is not asked for again


def test_only_the_batch_that_failed_is_lost(serve: Serve, waits: list[float]) -> None:
    def reply(body: dict[str, Any], _: int) -> tuple[int, str]:
        ids = [each["id"] for each in body["trajectories"]]
        return (500, "broken") if "t2" in ids else (200, json.dumps({"rewards": [1.5] * len(ids)}))

    played = score(serve(reply).url, 5, reward_batch_size=2, reward_retries=0)
    assert [t.reward for t in played] == [1.5, 1.5, 0.0, 0.0, 1.5]
    assert [t.exception is None for t in played] == [True, True, False, False, True]
    assert "returned no rewards: HTTP 500: broken" in (played[2].exception or "")
    assert played[2].stop_reason is StopReason.ANSWERED  # so that an evaluation tells it from a rollout that raised


def test_a_busy_server_is_asked_again_and_given_up_after_the_last_try(serve: Serve, waits: list[float]) -> None:
    stub = serve(lambda body, number: (503, "busy") if number <= 3 else rewards()(body, number))
    assert [t.reward for t in score(stub.url)] == [0.0, 1.0, 2.0]
    assert waits == [1.0, 2.0, 4.0] and len(stub.requests) == 4
    stub = serve(lambda *_: (503, "busy"))
    assert all("HTTP 503: busy" in (t.exception or "") for t in score(stub.url, reward_retries=1))
    assert len(stub.requests) == 2


@pytest.mark.parametrize("status", [301, 400])
def test_a_refusal_is_not_asked_again(serve: Serve, waits: list[float], status: int) -> None:
    stub = serve(lambda *_: (status, "no"))
    assert all(f"HTTP {status}" in (t.exception or "") for t in score(stub.url))
    assert waits == [] and len(stub.requests) == 1


def test_a_server_that_is_gone_or_slow_is_given_up(serve: Serve, waits: list[float]) -> None:
    assert all("ConnectError" in (t.exception or "") for t in score("http://127.0.0.1:9"))
    assert waits == [1.0, 2.0, 4.0]
    begun = time.monotonic()
    stub = serve(lambda body, number: (1, " " * 5000))  # a byte at a time
    [played] = score(stub.url, 1, reward_timeout=0.4, reward_retries=0)
    assert "no complete reply within 0.4 s" in (played.exception or "")
    assert time.monotonic() - begun < 120


def test_credentials_reach_the_server_and_nothing_else(
    serve: Serve, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    stub = serve(lambda *_: (500, "who is ann:hunter2? token abc123"))
    url = f"http://ann:hunter2@127.0.0.1:{stub.port}/r?token=abc123&model=x"
    with caplog.at_level(logging.DEBUG):
        played = score(url, reward_retries=0)
    assert stub.keys == ["Basic YW5uOmh1bnRlcjI="]
    assert stub.paths == ["/r?token=abc123&model=x"]
    mine = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("emailrl"))
    for told in (str(played[0].exception), mine, json.dumps(Settings(rewards=RewardSettings(reward=url)).public())):
        assert "127.0.0.1" in told and "model=x" in told
        assert "hunter2" not in told
        assert "token=abc123" not in told
    assert "hunter2" not in caplog.text  # what httpx logs holds no password either


@pytest.mark.parametrize("status", [401, 200])
def test_what_was_sent_is_hidden_however_the_server_writes_it(
    serve: Serve, waits: list[float], caplog: Any, status: int
) -> None:
    basic = "YW5uOmh1bnRlcjI/Pz8="  # ann:hunter2???
    said = f"{'.' * 110} Authorization: Basic {basic} of ann:hunter2%3F%3f? and //ann:hunter2???@host"
    stub = serve(lambda *_: (status, json.dumps({"said": said})))
    with caplog.at_level(logging.DEBUG):
        [played] = score(f"http://ann:hunter2%3F%3F%3F@127.0.0.1:{stub.port}/r", 1)
    assert stub.keys == [f"Basic {basic}"]
    for told in (played.exception or "", caplog.text):
        assert "Authorization: Basic *** of *** and //host" in told
        assert "YW5u" not in told and "hunter2" not in told


def test_a_key_is_sent_as_a_bearer_token_and_never_shown(serve: Serve, waits: list[float]) -> None:
    stub = serve(lambda *_: (401, "bad key sesame"))
    [played] = score(stub.url, 1, reward_api_key="sesame")
    assert stub.keys == ["Bearer sesame"]
    assert "HTTP 401: bad key ***" in (played.exception or "")


@pytest.mark.parametrize("url", ["http://", "http://[::1/x", "https://:80/x"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(UsageError, match="The reward's URL"):
        score(url)


@pytest.mark.parametrize("echo", ["ann:hu&sh", "&#104;u&#x26;sh", "Basic YW5uOmh1JnNo", "Bearer the-key", "a" * 10**5])
@pytest.mark.parametrize("place", ["rewards", "extra_logs"])
def test_names_that_hold_a_secret_are_refused_unshown(serve: Serve, echo: str, place: str) -> None:
    reply = rewards([{f"by {echo}": 1.0}]) if place == "rewards" else rewards([1], extra_logs={echo: [3.0]})
    url = serve(reply).url.replace("http://", "http://ann:hu%26sh@")
    [played] = score(url, 1, reward_api_key="the-key")
    told = played.exception or ""
    assert "names" in told and echo not in told and not any("remote" in name for name in played.rubric)
