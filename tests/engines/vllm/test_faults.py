"""Answers that no vLLM server gives: an error that names the server, or another server; never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engines.vllm.conftest import Connect, Start, ask
from engines.vllm_stub import VllmStub

from emailrl.base.errors import EmailRLError

Change = Callable[[dict[str, Any]], Any]  # from a good reply to another; bytes are sent as they are
PAGE = b"<html>back soon</html>"
DEEP = b"[" * 200_000
GZIP = {"Content-Encoding": "gzip"}


def spoil(stub: VllmStub, path: str, wrong: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
    """From now on the stub's answers to ``path`` (empty: to all) are ``wrong``, a body or a ``Change`` of the good
    ones."""
    answer = stub.http.reply

    def reply(body: dict[str, Any]) -> Any:
        if path and body["path"] != path:
            return answer(body)
        return status, wrong(answer(body)[1]) if callable(wrong) else wrong, headers or {}

    stub.http.reply = reply


def refused(stub: VllmStub, place: str, act: Callable[[], object]) -> None:
    with pytest.raises(EmailRLError) as raised:
        act()
    message = raised.value.message
    assert f"127.0.0.1:{stub.http.port}" in message and place in message
    assert "\n" not in message and len(message) < 500


def choice(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda reply: reply | {"choices": [one | changes for one in reply["choices"]]}


def first(token: int = 5, *logprobs: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Another first token, and these log-probabilities of the first ones."""

    def change(reply: dict[str, Any]) -> dict[str, Any]:
        found = reply["choices"][0]
        found["token_ids"][0] = token
        found["logprobs"]["token_logprobs"][: len(logprobs)] = logprobs
        return reply

    return change


def tokens(count: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return choice(token_ids=[5] * count, logprobs={"token_logprobs": [-1.0] * count})


MODELS = [
    ({"data": ["a"]}, "data.0: Input should be an object"),
    ({"data": [{"id": "base", "max_model_len": "4096"}]}, "data.0.max_model_len: Input should be a valid integer"),
    (["a"], "the whole: Input should be an object"),
]
COMPLETIONS = [
    (choice(logprobs=None), "choices.0.logprobs: Input should be an object"),
    (lambda reply: reply | {"choices": []}, "choices: List should have at least 1 item"),
    (lambda reply: reply | {"choices": reply["choices"] * 2}, "returns 2 completions of 1 prompt"),
    (lambda reply: reply | {"model": "another"}, "answered with 'another' when asked for"),
    (choice(logprobs={"token_logprobs": [float("nan")]}), "token_logprobs.0: Input should be a finite number"),
    (choice(token_ids=[-5]), "token_ids.0: Input should be greater than or equal to 0"),
    (first(10**9), "token 1000000000, outside the vocabulary of"),
    (choice(token_ids=[10**30]), "token_ids.0: Input should be less than 2147483648"),
    (choice(logprobs={"token_logprobs": [-1.0] * 3}), "token ids with 3 log-probabilities"),
    (tokens(0), "cut a completion after 0 of"),
    (tokens(9), "returns 9 tokens when asked for at most"),
    (first(5, 0.05), "returns 0.05 as the log-probability of a token that it sampled"),
    (first(5, -1e300), "returns -1e+300 as the log-probability of a token that it"),
    # A turn that the policy did not end.
    (choice(finish_reason="stop"), "at token 5"),
    (choice(finish_reason="stop", token_ids=[], logprobs={"token_logprobs": []}), "before its first token"),
]


@pytest.mark.parametrize(
    ("path", "wrong", "place"),
    [*(("/v1/models", *fault) for fault in MODELS), *(("/v1/completions", *fault) for fault in COMPLETIONS[:1])],
)
def test_a_fault_while_a_version_is_loaded(start: Start, connect: Connect, path: str, wrong: Any, place: str) -> None:
    [stub] = start()
    spoil(stub, path, wrong)
    refused(stub, place, lambda: connect(stub).load_adapter(None, "base"))


@pytest.mark.parametrize(("wrong", "place"), COMPLETIONS)
def test_a_fault_in_a_rollout(start: Start, wrong: Any, place: str) -> None:
    engine, stub = start(version="")
    spoil(stub, "/v1/completions", lambda reply: wrong(tokens(4)(reply)))
    refused(stub, place, lambda: ask(engine, 1, max_tokens=4))


def test_rounding_above_zero_and_the_least_float32_probability_are_accepted(start: Start) -> None:
    extremes = [1e-4, -103.28]  # ln 2^-149 = -149 · 0.693147
    engine, stub = start(version="")
    spoil(stub, "/v1/completions", lambda reply: first(5, *extremes)(tokens(4)(reply)))
    assert ask(engine, 1, max_tokens=4)[0].logprobs[:2] == extremes


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
@pytest.mark.parametrize("body", [PAGE, DEEP, b"", b"\xff\xfe", GZIP])
def test_what_is_no_json_counts_as_no_server(
    start: Start, connect: Connect, capsys: pytest.CaptureFixture[str], path: str, body: Any
) -> None:
    wrong, well = start(2)
    headers = body if body is GZIP else {}
    spoil(wrong, path, b"not gzip" if headers else body, headers=headers)
    engine = connect(wrong, well)
    engine.load_adapter(None, "base")
    assert f"{wrong.http.port} is excluded: " in capsys.readouterr().err
    assert len(engine.alive) == 1 and ask(engine, 1)[0].error is None
    with pytest.raises(EmailRLError) as raised:
        connect(wrong).load_adapter(None, "base")
    assert "emailrl serve" in raised.value.hint


def test_a_page_in_a_rollout_goes_to_another_server_and_is_told_once(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, one, _ = start(2, version="")
    spoil(one, "", PAGE)  # its proxy answers everything with a page now, /health too
    assert [completion.error for completion in ask(engine)] == [None] * 4
    told = capsys.readouterr().err
    assert told.count("is excluded") == told.count(f"{one.http.port} is excluded") == 1 and engine.alive


def test_what_an_address_holds_is_sent_and_not_told(start: Start, connect: Connect) -> None:
    [stub] = start()
    spoil(stub, "/v1/completions", {"error": {"message": "who is Basic YW5uOmh1bnRlcjI=?"}}, 400)  # ann:hunter2
    url = stub.url.replace("//", "//ann:hunter2@")
    with pytest.raises(EmailRLError, match=r"HTTP 400 who is Basic \*\*\*\?") as raised:
        connect(vllm_urls=url).load_adapter(None, "base")
    assert "hunter2" not in raised.value.message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (DEEP, "HTTP 400."),
        (PAGE, "HTTP 400."),
        ({"error": {"message": "no\nsuch\ntoken " + "x" * 1000}}, "HTTP 400 no such token x"),
        ({"error": ["a"]}, "HTTP 400 ['a']."),
    ],
)
def test_a_refusal_is_one_line(start: Start, connect: Connect, body: Any, reason: str) -> None:
    [stub] = start()
    spoil(stub, "/v1/completions", body, 400)
    refused(stub, f"refused /v1/completions: {reason}", lambda: connect(stub).load_adapter(None, "base"))
