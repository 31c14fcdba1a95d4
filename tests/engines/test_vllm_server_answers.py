"""Answers that no vLLM server gives: one line that names the server, or another server; never a traceback."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.vllm_stub import VllmStub
from local_server import DrippingServer, LocalServer, QuietHandler
from tiny import make_model

from emailrl.engines import build_engine
from emailrl.engines.base import Request, SamplingParams
from emailrl.engines.vllm import replica
from emailrl.engines.vllm.probe import Probe
from emailrl.engines.vllm.servers import VllmServers
from emailrl.errors import EmailRLError
from emailrl.policy.load import Policy, load_policy
from emailrl.settings import load_settings

Answers = Callable[[str, dict[str, Any]], bytes]
"""From a path and a request's body to the bytes of a 200."""
PAGE = b"<html>the site is being mended</html>"
DEEP = b"[" * 200_000
GARBLED = b"not gzip"
"""Sent as if it were."""


def good(path: str, body: dict[str, Any]) -> Any:
    """What a server of the base model says, of a kind that passes for an answer though not for a proof."""
    if path == "/v1/models":
        return {"data": [{"id": "base", "parent": None, "max_model_len": 4096}]}
    if path == "/health":
        return {}
    asked = body["max_tokens"]
    choices = [
        {
            "token_ids": [5] * asked,
            "logprobs": {"token_logprobs": [-1.0] * asked},
            "prompt_logprobs": [None, *({str(token): {"logprob": -1.0}} for token in ids[1:])],
            "finish_reason": "length",
        }
        for ids in (body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]])
    ]
    return {"model": body["model"], "choices": choices}


class Server:
    """Answers as ``answers`` says; what it is asked for by POST, with ``status``."""

    def __init__(self, answers: Answers, status: int = 200) -> None:
        class Handler(QuietHandler):
            def do_GET(self) -> None:
                self.answer(200, b"{}")

            def do_POST(self) -> None:
                self.answer(status, self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, status: int, body: bytes) -> None:
                payload = answers(self.path, json.loads(body))
                self.send_response(status)
                if payload is GARBLED:
                    self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

        self._server = LocalServer(Handler)
        self.name = f"127.0.0.1:{self._server.port}"

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = make_model(tmp_path_factory.mktemp("answers") / "model")
    return load_policy(load_settings({"model_name": str(folder)}, environ={}, cwd=folder))


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(answers: Answers, status: int = 200) -> Server:
        servers.append(Server(answers, status))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def connect(policy: Policy, *names: str) -> VllmServers:
    urls = ",".join(f"http://{name}" for name in names)
    given = {"model_name": "nano", "engine": "vllm", "vllm_urls": urls, "temperature": 1.0, "vllm_retries": 1}
    engine = build_engine(load_settings(given, environ={}, cwd=Path.cwd()), policy)
    assert isinstance(engine, VllmServers)
    return engine


def answer(wrong_path: str, wrong: Any) -> Answers:
    """Good answers, but for one path; ``wrong`` is a body, or a function that changes the good one or its choice."""

    def answers(path: str, body: dict[str, Any]) -> bytes:
        reply = good(path, body)
        if path == wrong_path:
            reply = wrong(copy.deepcopy(reply)) if callable(wrong) else wrong
        return reply if isinstance(reply, bytes) else json.dumps(reply).encode()

    return answers


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


def prompt_entries(entry: Callable[[str], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Other entries of ``prompt_logprobs``, from the token id that each is for."""

    def change(reply: dict[str, Any]) -> dict[str, Any]:
        tokens = [next(iter(one)) for one in reply["choices"][0]["prompt_logprobs"][1:]]
        return choice(prompt_logprobs=[None, *(entry(token) for token in tokens)])(reply)

    return change


MODELS = [
    ({"data": ["a"]}, "data.0: Input should be an object"),
    ({"data": {"a": 1}}, "data: Input should be a valid array"),
    ({"data": [{}]}, "data.0.id: Field required"),
    ({"data": [{"id": 3}]}, "data.0.id: Input should be a valid string"),
    ({"data": [{"id": "base", "max_model_len": "4096"}]}, "data.0.max_model_len: Input should be a valid integer"),
    ({"data": None}, "data: Input should be a valid array"),
    (["a"], "the whole: Input should be an object"),
]
COMPLETIONS = [
    (lambda reply: reply | {"choices": ["x"]}, "choices.0: Input should be an object"),
    (lambda reply: reply | {"choices": {"0": reply["choices"][0]}}, "choices: Input should be a valid array"),
    (lambda reply: reply | {"choices": []}, "choices: List should have at least 1 item"),
    (lambda reply: reply | {"choices": reply["choices"] * 2}, "returns 2 completions of 1 prompt"),
    (lambda reply: reply | {"model": 3}, "model: Input should be a valid string"),
    (choice(logprobs=[-1.0]), "choices.0.logprobs: Input should be an object"),
    (choice(logprobs=None), "choices.0.logprobs: Input should be an object"),
    (choice(logprobs={"token_logprobs": [None]}), "token_logprobs.0: Input should be a valid number"),
    (choice(logprobs={"token_logprobs": [float("nan")]}), "token_logprobs.0: Input should be a finite number"),
    (choice(token_ids=["5"]), "token_ids.0: Input should be a valid integer"),
    (choice(token_ids=[-5]), "token_ids.0: Input should be greater than or equal to 0"),
    (first(10**9), "token 1000000000, outside the vocabulary of"),
    (choice(token_ids=[10**30]), "token_ids.0: Input should be less than 2147483648"),
    (choice(logprobs={"token_logprobs": [-1.0] * 3}), "token ids with 3 log-probabilities"),
    (tokens(0), "cut a completion after 0 of"),
    (tokens(9), "returns 9 tokens when asked for at most"),
    (first(5, 3.0), "returns 3 as the log-probability of a token that it sampled"),
    (first(5, 0.05), "returns 0.05 as the log-probability of a token that it sampled"),
    (first(5, -1e300), "returns -1e+300 as the log-probability of a token that it"),
    (choice(finish_reason=["stop"]), "finish_reason: Input should be a valid string"),
]
PROOFS = [
    (prompt_entries(lambda token: {token: {"logprob": None}}), "logprob: Input should be a valid number"),
    (prompt_entries(lambda token: {token: {"logprob": float("nan")}}), "logprob: Input should be a finite number"),
    (prompt_entries(lambda token: {token: {}}), "logprob: Field required"),
    (prompt_entries(lambda token: {token: None}), "Input should be an object"),
    (prompt_entries(lambda token: {token: -1.0}), "Input should be an object"),
    (prompt_entries(lambda _: -1.0), "prompt_logprobs.1: Input should be an object"),
    (prompt_entries(lambda _: None), "no prompt log-probabilities"),
    (prompt_entries(lambda _: {"not a token": {"logprob": -1.0}}), "no prompt log-probabilities"),
    (choice(prompt_logprobs=[None]), "no prompt log-probabilities"),
    (choice(prompt_logprobs="none"), "prompt_logprobs: Input should be a valid array"),
]


@pytest.mark.parametrize(("wrong", "place"), MODELS)
def test_a_list_of_models_of_another_shape(
    policy: Policy, serve: Callable[..., Server], wrong: Any, place: str
) -> None:
    refused(policy, serve(answer("/v1/models", wrong)), place)


@pytest.mark.parametrize(("wrong", "place"), COMPLETIONS + PROOFS)
def test_a_proof_of_another_shape(policy: Policy, serve: Callable[..., Server], wrong: Any, place: str) -> None:
    refused(policy, serve(answer("/v1/completions", wrong)), place)


@pytest.mark.parametrize(("wrong", "place"), COMPLETIONS)
def test_a_completion_of_another_shape(
    policy: Policy, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, wrong: Any, place: str
) -> None:
    broken = [False]

    def answers(path: str, body: dict[str, Any]) -> bytes:
        return answer("/v1/completions" if broken[0] else "", wrong)(path, body)

    server = serve(answers)
    engine = connect(policy, server.name)
    prove_nothing(monkeypatch)
    engine.load_adapter(None, "base")
    assert ask(engine).token_ids == [5] * 4
    broken[0] = True
    with pytest.raises(EmailRLError) as raised:
        ask(engine)
    assert server.name in raised.value.message and place in raised.value.message


def test_rounding_above_zero_and_the_least_float32_probability_are_accepted(
    policy: Policy, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    extremes = [1e-4, -103.28]  # ln 2^-149 = -149 · 0.693147

    def answers(path: str, body: dict[str, Any]) -> bytes:
        return answer("/v1/completions" if body.get("max_tokens") == 4 else "", first(5, *extremes))(path, body)

    server = serve(answers)
    prove_nothing(monkeypatch)
    assert ask(connect(policy, server.name)).logprobs[:2] == extremes


def test_a_completion_past_the_window_is_refused(
    policy: Policy, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for four tokens, but after a prompt of three only two fit in five."""

    def answers(path: str, body: dict[str, Any]) -> bytes:
        reply = good(path, body)
        if path == "/v1/completions" and body["max_tokens"] == 2:
            reply = tokens(3)(reply)
        elif path == "/v1/models":
            reply["data"][0]["max_model_len"] = 5
        return json.dumps(reply).encode()

    prove_nothing(monkeypatch)
    with pytest.raises(EmailRLError, match="returns 3 tokens when asked for at most 2"):
        ask(connect(policy, serve(answers).name))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish_reason": "stop"}, "at token 5, where"),
        (
            {"finish_reason": "stop", "token_ids": [], "logprobs": {"token_logprobs": []}},
            "before its first token, where",
        ),
    ],
)
def test_a_turn_that_the_policy_did_not_end_is_refused(
    policy: Policy, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    prove_nothing(monkeypatch)
    server = serve(answer("/v1/completions", choice(**changes)))
    with pytest.raises(EmailRLError, match=f"{server.name} stopped a completion {reason} the trainer's model ends no"):
        ask(connect(policy, server.name))


def prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has no model to prove."""
    for check in ("check_prompt", "check_next"):
        monkeypatch.setattr(Probe, check, lambda *_: None)


def refused(policy: Policy, server: Server, place: str) -> None:
    with pytest.raises(EmailRLError) as raised:
        connect(policy, server.name).load_adapter(None, "base")
    assert server.name in raised.value.message and place in raised.value.message
    assert "\n" not in raised.value.message and len(raised.value.message) < 500


def ask(engine: VllmServers) -> Any:
    [completion] = engine.generate([Request("t", SamplingParams(4, 1.0), [5, 6, 7])])
    return completion


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
@pytest.mark.parametrize("body", [PAGE, DEEP, b"", b"\xff\xfe", GARBLED])
def test_what_is_no_json_counts_as_no_server(
    policy: Policy,
    serve: Callable[..., Server],
    capsys: pytest.CaptureFixture[str],
    path: str,
    body: bytes,
) -> None:
    server, well = serve(answer(path, body)), VllmStub(policy)
    try:
        engine = connect(policy, server.name, f"127.0.0.1:{well.http.port}")
        engine.load_adapter(None, "base")
        assert f"http://{server.name} is excluded: " in capsys.readouterr().err
        assert [replica.url for replica in engine.alive] == [f"http://127.0.0.1:{well.http.port}"]
        assert ask(engine).error is None
    finally:
        well.close()
    with pytest.raises(EmailRLError, match=r"^No vLLM server available \(1 configured\): .*[^.]\.$") as raised:
        connect(policy, server.name).load_adapter(None, "base")
    assert raised.value.hint == "Start one with emailrl serve."


def test_a_page_in_a_rollout_goes_to_another_server_and_is_told_once(
    policy: Policy, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    mended = [False]
    one, other = (
        serve(lambda path, body: PAGE if mended[0] else json.dumps(good(path, body)).encode()),
        serve(lambda path, body: json.dumps(good(path, body)).encode()),
    )
    engine = connect(policy, one.name, other.name)
    prove_nothing(monkeypatch)
    engine.load_adapter(None, "base")
    mended[0] = True  # its proxy answers everything with a page now, /health too
    requests = [Request(f"t{n}", SamplingParams(4, 1.0), [5, 6, 7]) for n in range(4)]
    assert [completion.error for completion in engine.generate(requests)] == [None] * 4
    told = capsys.readouterr().err
    assert told.count("is excluded") == 1
    assert f"{one.name} is excluded: HTTP 200 without a JSON body. 1 of 2 remain." in told


def test_headers_that_drip_are_no_server(
    policy: Policy, dripping: DrippingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "HEALTH_TIMEOUT", 1.5)
    begun = time.monotonic()
    with pytest.raises(
        EmailRLError, match=r"No vLLM server available \(1 configured\): no complete reply within 1.5 s"
    ):
        connect(policy, dripping.url.removeprefix("http://")).load_adapter(None, "base")
    assert time.monotonic() - begun < 10


def test_a_reply_is_as_long_as_any_others_may_be(policy: Policy, serve: Callable[..., Server]) -> None:
    server = serve(answer("/v1/completions", b" " * (8 << 20) + b"{}"))
    with pytest.raises(
        EmailRLError, match=r"No vLLM server available \(1 configured\): the reply is longer than 8 MiB"
    ):
        connect(policy, server.name).load_adapter(None, "base")


def test_what_an_address_holds_is_sent_and_not_told(policy: Policy, serve: Callable[..., Server]) -> None:
    said = "who is Basic YW5uOmh1bnRlcjI=?"  # ann:hunter2
    server = serve(answer("/v1/completions", {"error": {"message": said}}), 400)
    with pytest.raises(EmailRLError, match=rf"http://{server.name} refused .*: HTTP 400 who is Basic \*\*\*\?"):
        connect(policy, f"ann:hunter2@{server.name}").load_adapter(None, "base")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (DEEP, r"HTTP 400\. Check"),
        (PAGE, r"HTTP 400\. Check"),
        ({"error": {"message": "no\nsuch\ntoken " + "x" * 1000}}, r"HTTP 400 no such token x{277}\. Check"),
        ({"error": ["a"]}, r"HTTP 400 \['a'\]\. Check"),
    ],
)
def test_a_refusal_is_one_line(policy: Policy, serve: Callable[..., Server], body: Any, reason: str) -> None:
    server = serve(answer("/v1/completions", body), 400)
    with pytest.raises(EmailRLError, match=f"{server.name} refused /v1/completions: {reason}"):
        connect(policy, server.name).load_adapter(None, "base")
