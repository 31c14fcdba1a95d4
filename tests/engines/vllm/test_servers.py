"""vLLM servers as replicas, against HTTP servers with a tiny real model: versions, proofs, deaths, retries."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from engines.vllm.conftest import KEPT_ADAPTERS, Connect, Start, ask, tokens
from engines.vllm_stub import BASE
from tiny import cut_matrices

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import WEIGHTS, sha256_of
from emailrl.engines import build_engine, check_engine
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.vllm.arguments import read_path_map, read_urls
from emailrl.engines.vllm.probe import ProbeError
from emailrl.model.policy import Policy
from emailrl.settings import load_settings


def test_it_samples_what_the_in_process_engine_samples_and_stamps_it(start: Start, adapters: list[Path]) -> None:
    engine, stub = start(version="v-000001")
    first = ask(engine)
    engine.load_adapter(adapters[1], "v-000002")
    second = ask(engine)
    for completions, adapter, version in ((first, adapters[0], "v-000001"), (second, adapters[1], "v-000002")):
        stub.model.engine.load_adapter(adapter, version)
        own = ask(stub.model.engine)
        assert tokens(completions) == tokens(own)
        for completion, expected in zip(completions, own, strict=True):
            assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            assert (completion.policy_version, completion.adapter_sha256) == (version, sha256_of(adapter / WEIGHTS))
            assert (completion.prompt_tokens, completion.finish_reason) == (3, expected.finish_reason)
    assert [c.logprobs for c in first] != [c.logprobs for c in second]


def test_no_server_gets_to_see_an_adapter_whose_files_are_refused(
    start: Start, adapters: list[Path], tmp_path: Path
) -> None:
    engine, stub = start(version="v-1")
    before = ask(engine)
    with pytest.raises(EmailRLError, match="have size 1 × 1"):
        engine.load_adapter(cut_matrices(Path(shutil.copytree(adapters[0], tmp_path / "damaged"))), "v-2")
    assert stub.calls.count("/v1/load_lora_adapter") == 1
    after = ask(engine)
    assert tokens(after) == tokens(before) and after[0].policy_version == "v-1"


def test_every_version_has_a_name_of_its_own_on_every_replica_and_old_ones_go(
    start: Start, adapters: list[Path]
) -> None:
    engine, *stubs = start(2, version="")
    assert ask(engine)[0].adapter_sha256 is None and stubs[0].served[0] == BASE
    used = []
    for number, adapter in enumerate([*adapters, adapters[0]]):
        engine.load_adapter(adapter, f"v-{number % 2}")  # even a version that is named twice
        used.append(list(stubs[0].adapters)[-1])
    assert len(set(used)) == len(adapters) + 1
    for stub in stubs:
        assert list(stub.adapters) == [BASE, *used[-KEPT_ADAPTERS:]]
        assert stub.calls.count("/v1/load_lora_adapter") == len(adapters) + 1
    engine.close()
    assert list(stubs[0].adapters) == list(stubs[1].adapters) == [BASE]


@pytest.mark.parametrize("wrong", ["ignored", "another"])
def test_a_replica_with_other_weights_is_named(start: Start, adapters: list[Path], wrong: str) -> None:
    engine, _, bad = start(2, version="")
    bad.ignore_adapters = wrong == "ignored"
    bad.adapter_instead = adapters[1] if wrong == "another" else None
    with pytest.raises(ProbeError, match=f"127.0.0.1:{bad.http.port} is not sampling from the adapter it was given"):
        engine.load_adapter(adapters[0], "v-1")


def test_an_adapter_that_is_not_listed_or_not_found_is_an_error(
    start: Start, connect: Connect, adapters: list[Path], tmp_path: Path
) -> None:
    [stub] = start()
    with pytest.raises(EmailRLError, match=r"did not load the adapter /nowhere.*No adapter found.*ADAPTER_PATH_MAP"):
        connect(stub, vllm_adapter_path_map=f"{adapters[0].parent}=/nowhere").load_adapter(adapters[0], "v-1")
    with pytest.raises(UsageError, match="is not under"):
        connect(stub, vllm_adapter_path_map=f"{tmp_path}=/nowhere").load_adapter(adapters[0], "v-1")
    stub.list_loaded = False
    with pytest.raises(EmailRLError, match="HTTP 200, and does not list it"):
        connect(stub).load_adapter(adapters[0], "v-1")


def test_a_death_in_mid_run_costs_no_trajectory_and_the_replica_comes_back(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, one, _ = start(2, version="v-1")
    alone = tokens(ask(engine, 8))
    one.served.clear()
    one.dies_after = 2
    completions = ask(engine, 8)
    assert [completion.error for completion in completions] == [None] * 8
    assert tokens(completions) == alone  # the seeds are the requests'
    told = capsys.readouterr().err
    assert f"127.0.0.1:{one.http.port} is excluded: " in told and "1 of 2 remain.\n" in told
    engine.resume()
    assert len(engine.alive) == 1  # still dead, and told once
    assert capsys.readouterr().err == ""
    one.dies_after, one.adapters = None, {BASE: None}  # started anew, it knows nothing
    engine.resume()
    assert len(engine.alive) == 2 and "is back in use" in capsys.readouterr().err
    one.served.clear()
    ask(engine, 8)
    assert one.served and set(one.served) == set(one.adapters) - {BASE}


def test_all_dead_is_one_clear_error(start: Start, adapters: list[Path]) -> None:
    engine, one, other = start(2, version="v-1")
    one.dies_after = other.dies_after = 0
    for act in (lambda: ask(engine), lambda: engine.load_adapter(adapters[1], "v-2")):
        with pytest.raises(EmailRLError, match=r"No vLLM server available \(2 configured\): .* Start one with emailrl"):
            act()


@pytest.mark.parametrize("failure", [(429, {}, {"Retry-After": "0.05"}), (425, {}), (503, {}), (None, None)])
def test_passing_failures_are_tried_again_elsewhere(start: Start, failure: tuple[Any, ...]) -> None:
    engine, one, _ = start(2, version="v-1")
    one.failures = [failure] * 2
    assert not any(completion.error for completion in ask(engine))
    assert len(engine.alive) == 2  # it said that it was well


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 408), ("/v1/models", 425), ("/v1/load_lora_adapter", 429), ("/v1/completions", 429)],
)
def test_a_server_that_is_busy_while_a_version_is_loaded_is_down_for_the_moment(
    start: Start, adapters: list[Path], capsys: pytest.CaptureFixture[str], path: str, status: int
) -> None:
    engine, one, _ = start(2, version="v-1")
    answer = one.http.reply
    one.http.reply = lambda body: (status, {}) if body["path"] == path else answer(body)
    engine.load_adapter(adapters[1], "v-2")
    assert f"127.0.0.1:{one.http.port} is excluded: HTTP {status}. 1 of 2 remain.\n" in capsys.readouterr().err
    assert ask(engine, 1)[0].policy_version == "v-2"
    one.http.reply = answer
    engine.resume()
    assert len(engine.alive) == 2


@pytest.mark.parametrize(("limit", "alive"), [(None, 1), (40, 2)])
def test_a_server_whose_window_has_become_smaller_is_excluded(
    start: Start, adapters: list[Path], capsys: pytest.CaptureFixture[str], limit: int | None, alive: int
) -> None:
    """Its conversations would be cut, perhaps before their first token; a window that holds MAX_MODEL_LEN is enough."""
    engine, one, _ = start(2, version="v-1", max_model_len=limit)
    one.window = 40
    engine.load_adapter(adapters[1], "v-2")
    assert len(engine.alive) == alive
    assert capsys.readouterr().err.count("its --max-model-len is 40 now and was 2048; restart it") == 2 - alive
    one.window = 2048
    engine.resume()
    assert len(engine.alive) == 2


def test_a_slow_replica_is_left_for_another(start: Start) -> None:
    engine, slow, quick = start(2, version="v-1", vllm_timeout=60.0)
    engine.timeout, slow.http.delay = 3, 600
    completions = ask(engine, 2, max_tokens=2)
    assert not any(completion.error for completion in completions) and len(quick.served) == 2


def test_a_server_that_hangs_does_not_hold_up_the_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stub = start(version="v-1", vllm_timeout=300.0)
    monkeypatch.setattr("emailrl.engines.vllm.replica.HEALTH_TIMEOUT", 0.3)
    stub.http.delay, begun = 600, time.monotonic()
    engine.close()
    assert time.monotonic() - begun < 120


def test_a_conversation_stays_where_its_keys_are(start: Start) -> None:
    engine, *stubs = start(2, version="v-1")
    turns: dict[str, int] = defaultdict(int)

    def advance(completion: Completion) -> Request | None:
        name = completion.trajectory_id
        turns[name] += 1
        return Request(name, SamplingParams(2, 1.0), [5, 6, 7, int(name)]) if turns[name] < 3 else None

    engine.generate([Request(str(n), SamplingParams(2, 1.0), [5, 6, 7, n]) for n in range(4)], advance)
    places: dict[int, set[int]] = defaultdict(set)
    for place, stub in enumerate(stubs):
        for path, body in stub.http.asked:
            if path == "/v1/completions" and isinstance(body["prompt"][0], int):
                places[body["prompt"][3]].add(place)
    assert [len(seen) for seen in places.values()] == [1] * 4 and {min(s) for s in places.values()} == {0, 1}


def test_a_prompt_that_fills_the_window_is_a_completion_of_length_zero(start: Start, connect: Connect) -> None:
    engine = connect(*start(), max_model_len=20)  # no version was loaded: it samples from the base model
    full, almost = engine.generate([Request("a", SamplingParams(6, 1.0), [5] * length) for length in (20, 18)])
    assert (full.finish_reason, full.token_ids, full.error) == ("length", [], None)
    assert len(almost.token_ids) <= 2


@pytest.mark.parametrize(
    "address",
    ["a:8000", "ftp://a", "http://", "http://:8000", "http://[::1", "http://127.0.0.1:abc", "http://h:99999", "http://h:0",
     "http://h:1?token=x", "http://h:1#frag", "http://a b", "http://a\nb", "http://☃:1"],
)  # fmt: skip
def test_an_address_that_no_request_can_be_sent_to_is_refused_before_a_model_is_loaded(
    model: Path, address: str
) -> None:
    settings = load_settings({"engine": "vllm", "vllm_urls": f"http://a,{address}"}, environ={}, cwd=model)
    with pytest.raises(UsageError, match=r"VLLM_URLS: '.*' is not a server's address") as raised:
        check_engine(settings, trainable=True)
    assert "\n" not in raised.value.message and "=x" not in raised.value.message


@pytest.mark.parametrize("password", ["hunter,two", "hunter#two", "hunter/two"])
def test_a_refused_address_does_not_show_its_password(password: str) -> None:
    with pytest.raises(UsageError, match="VLLM_URLS: address 1 is not valid") as raised:
        read_urls(f"http://ann:{password}@h:1")
    assert "hunter" not in raised.value.message and "percent-encoded" in raised.value.hint


def test_settings_are_read_or_refused(model: Path, policy: Policy) -> None:
    assert read_urls("HTTP://A:80, http://a/v1,https://B:443/llm/v1/") == ["http://a", "https://b/llm"]
    assert read_urls("http://[::1]:8000/v1,http://Ann:P%40ss@h:1") == ["http://[::1]:8000", "http://Ann:P%40ss@h:1"]
    assert read_path_map("") is None
    assert read_path_map("/x/outputs=/mnt") == (Path("/x/outputs"), Path("/mnt"))
    with pytest.raises(UsageError, match="HERE=/THERE"):
        read_path_map("outputs")
    given = {"model_name": str(model), "engine": "vllm", "vllm_urls": "http://a", "top_p": 0.9, "temperature": 0.7}
    with pytest.raises(UsageError, match="cannot be trained"):
        build_engine(load_settings(given, environ={}, cwd=model), policy)
    build_engine(load_settings(given | {"temperature": 1.0}, environ={}, cwd=model), policy)


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [({}, 4, 12), ({"rollout_concurrency": 3}, 2, 3), ({"max_batch_trajectories": 3}, 2, 3)],
)
def test_how_much_is_asked_at_once_is_bounded_where_that_was_chosen(
    start: Start, options: dict[str, int], least: int, most: int
) -> None:
    """Ten at once is for chat servers that strangers share; without the setting these get 256 each."""
    engine, stub = start(version="", delay=0.5, **options)
    ask(engine, 12, max_tokens=1)
    assert least <= stub.http.busiest <= most
