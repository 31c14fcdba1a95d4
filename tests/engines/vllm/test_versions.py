"""vLLM servers used from several threads: versions side by side, requests in flight, servers that come back."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines.vllm.conftest import Start, ask, asked, tokens
from engines.vllm_stub import BASE

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.vllm.probe import ProbeError


def test_a_conversation_ends_on_the_version_it_began_with(start: Start, adapters: list[Path]) -> None:
    engine, stub = start(version="v-1")
    begun, loaded, turns = threading.Event(), threading.Event(), list[str]()

    def advance(completion: Completion) -> Request | None:
        turns.append(completion.policy_version)
        begun.set()
        assert loaded.wait(300)
        return asked() if len(turns) < 3 else None

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(engine.generate, [asked()], advance)
        assert begun.wait(300)
        engine.load_adapter(adapters[1], "v-2")
        loaded.set()
        assert {completion.policy_version for completion in first.result(300)} == {"v-1"}
        assert [completion.policy_version for completion in ask(engine, 1)] == ["v-2"]
    assert turns == ["v-1"] * 3 and len(set(stub.served)) == 2 and stub.served[:3] == stub.served[:1] * 3


def test_a_pinned_version_stays_on_the_servers_until_it_is_closed(start: Start, adapters: list[Path]) -> None:
    engine, stub = start(version="v-0", max_staleness=0)
    pinned, names = engine.pin(), [list(stub.adapters)[-1]]
    for number, adapter in enumerate(adapters[1:], start=1):
        engine.load_adapter(adapter, f"v-{number}")
        names.append(list(stub.adapters)[-1])
    assert list(stub.adapters) == [BASE, names[0], *names[-2:]]  # MAX_STALENESS + 2, and the pinned one
    [completion] = pinned.generate([asked()])
    assert completion.policy_version == "v-0" and stub.served[-1] == names[0]
    pinned.close()
    engine.load_adapter(adapters[0], "v-9")
    assert names[0] not in stub.adapters


def test_a_cancelled_call_ends_at_once(start: Start) -> None:
    engine, stub = start(version="v-1")
    pinned, begun = engine.pin(), threading.Event()

    def advance(completion: Completion) -> Request | None:
        stub.http.delay = 600
        begun.set()
        return asked()

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(pinned.generate, [asked()], advance)
        assert begun.wait(300)
        pinned.cancel()
        assert call.exception(300) is not None


def test_the_only_server_may_be_away_for_a_while(
    start: Start, adapters: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """As when it is restarted in mid-step: the same tokens come, from the same adapter, loaded again."""
    engine, stub = start(version="v-1", vllm_return_timeout=300)
    before = ask(engine)
    stub.served.clear()
    stub.dies_after, stub.adapters = 2, {BASE: None}

    def come_back() -> None:
        while engine.alive:
            time.sleep(0.01)
        stub.dies_after = None

    back = threading.Thread(target=come_back)
    back.start()
    after = ask(engine)
    back.join()
    assert tokens(after) == tokens(before) and not any(completion.error for completion in after)
    told = capsys.readouterr().err
    assert "No vLLM server is left" in told and "waiting up to 300 s" in told and "is back in use" in told
    stub.dies_after = 0
    threading.Thread(target=come_back).start()
    engine.load_adapter(adapters[1], "v-2")  # the trainer waits for it as well
    assert ask(engine, 1)[0].policy_version == "v-2"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_version_loaded_beside_other_requests_is_proven_by_what_it_samples(
    start: Start, adapters: list[Path], wrong: bool
) -> None:
    engine, stub = start(version="v-1", delay=0.1)
    pinned, over, turns = engine.pin(), threading.Event(), list[int]()

    def advance(completion: Completion) -> Request | None:
        turns.append(1)
        return None if over.is_set() else asked()

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(pinned.generate, [asked()] * 3, advance)
        try:
            if wrong:
                stub.adapter_instead = adapters[2]
                with pytest.raises(ProbeError, match="log-probabilities of sampled tokens are off"):
                    engine.load_adapter(adapters[1], "v-2")
            else:
                engine.load_adapter(adapters[1], "v-2")
        finally:
            over.set()
            call.result(300)
    assert len(turns) > 3


def test_a_server_that_restarts_between_loading_and_proof_gets_the_version_again(
    start: Start, adapters: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    engine, stub = start(version="", vllm_return_timeout=300)
    answer, restarts = stub.http.reply, [1]

    def restarting(body: dict[str, Any]) -> Any:
        if "prompt" in body and body["model"] != BASE and restarts:
            restarts.pop()
            stub.adapters = {BASE: None}
        return answer(body)

    stub.http.reply = restarting
    pinned = engine.hand_over(adapters[0], "v-1")
    pinned.load()
    [completion] = pinned.generate([asked()])
    assert completion.policy_version == "v-1" and completion.error is None
    assert "is excluded: it restarted and lost its adapters." in capsys.readouterr().err


LONG = Request("b", SamplingParams(8, 1.0), [90, 80, 70, 60])  # a completion of enough tokens to be scored


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mixed_up", [False, True])
def test_a_completion_of_a_rollout_is_scored_before_it_is_trained_on(
    start: Start, adapters: list[Path], ahead: bool, mixed_up: bool
) -> None:
    """A proxy that gives every request the reply to the one before may pass the probe, which asks alone."""
    engine, stub = start(version="")
    answer, earlier = stub.http.reply, list[dict[str, Any]]()

    def mixing(body: dict[str, Any]) -> Any:
        status, reply = answer(body)
        if "prompt" in body and isinstance(body["prompt"][0], int):
            [choice] = reply["choices"]
            kept = {name: choice[name] for name in ("token_ids", "logprobs", "finish_reason")}
            choice.update(earlier[-1] if earlier else kept)
            earlier.append(kept)
        return status, reply

    stub.http.reply = mixing if mixed_up else answer
    engine.generate([asked(max_tokens=8)])
    if ahead:
        pinned = engine.hand_over(adapters[0], "v-1")
        pinned.load()
    else:
        engine.load_adapter(adapters[0], "v-1")
        pinned = engine.pin()
    pinned.generate([LONG])
    check = engine.settle if ahead else engine.release
    if not mixed_up:
        check()
        return
    for _ in range(2):
        with pytest.raises(ProbeError, match=rf"127.0.0.1:{stub.http.port} .* off by \d.*mixes up replies"):
            check()


@pytest.mark.parametrize("liar", [None, 1, 2])
def test_a_completion_that_ends_after_the_next_version_was_handed_over_is_scored_by_its_own(
    start: Start, adapters: list[Path], liar: int | None
) -> None:
    engine, stub = start(version="")
    answer = stub.http.reply

    def lying(body: dict[str, Any]) -> Any:
        status, reply = answer(body)
        for choice in reply["choices"]:
            choice["logprobs"]["token_logprobs"] = [-5.0] * len(choice["token_ids"])
        return status, reply

    pinned = []
    for number in (0, 1):
        engine.settle()
        pinned.append(engine.hand_over(adapters[number], f"v-{number + 1}"))
        pinned[number].load()
    for number in (1, 2, 1):
        stub.http.reply = lying if number == liar else answer
        pinned[number - 1].generate([LONG])
        if number == liar:
            with pytest.raises(ProbeError, match="off by"):
                engine.settle()
            return
        engine.settle()


def test_a_version_outlives_restarts_in_every_round_of_a_step(start: Start) -> None:
    """Each round of questions has its own event loop, to which asyncio's locks belong once they are waited for."""
    engine, stub = start(version="v-1", delay=0.1)
    pinned = engine.pin()
    for _ in range(2):
        stub.adapters = {BASE: None}
        played = pinned.generate([asked(f"t{n}") for n in range(4)])
        assert [(each.policy_version, each.error) for each in played] == [("v-1", None)] * 4


@pytest.fixture
def few_files() -> Iterator[tuple[int, int]]:
    """A limit of open files with room for 40 more; the limits before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_every_request_has_a_connection_whatever_the_limit_of_open_files(
    start: Start, few_files: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is 1,024 by default, four servers with 256 requests each; without a handle all would look dead."""
    # The delay is longer than a busy machine takes to open 48 connections.
    engine, stub = start(version="", delay=3, max_batch_trajectories=48)
    assert not any(completion.error for completion in ask(engine, 48, max_tokens=1))
    assert stub.http.busiest > 20 and "excluded" not in capsys.readouterr().err
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few_files[1], few_files[1])
