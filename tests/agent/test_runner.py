"""Rollouts of scripted conversations: what ends up in tokens, masks, messages and turns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import make_model

from emailrl.agent import StepResult
from emailrl.agent.play import TokenDriftError, audit, derive_seed, run
from emailrl.engines import open_policy
from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.renderer import ChatRenderer, Rendered
from emailrl.ranks import Activity
from emailrl.records.trajectory import Message, Scenario, StopReason, Trajectory, Turn
from emailrl.settings import load_settings

SCENARIO = Scenario("7", "When?", "May 20", ["<1@x>"], "ida@corvane.test", "2002-05-10")
SAMPLING = SamplingParams(64)


class Echo:
    """Answers each message with a tool result, and ends at the message ``bye``."""

    def __init__(self, result: str = "ok", *, fails_at: int | None = None) -> None:
        self.scenario = SCENARIO
        self.rubric = {"num_turns": 0}
        self.final_answer: str | None = None
        self.final_sources: list[str] = []
        self.result = result
        self.fails_at = fails_at

    def start(self) -> list[Message]:
        if self.fails_at == 0:
            raise OSError("no mailbox")
        return [Message("user", "a")]

    def step(self, message: Message) -> StepResult:
        self.rubric["num_turns"] += 1
        if self.rubric["num_turns"] == self.fails_at:
            raise ValueError("broken tool")
        if message.content == "bye":
            self.final_answer, self.final_sources = "May 20", ["<1@x>"]
            return StepResult(done=True, tool_name="return_final_answer", stop_reason=StopReason.ANSWERED)
        return StepResult([Message("tool", self.result, name="echo")], tool_name="echo", tool_result=self.result)


class ByCharacter:
    """A renderer whose ids are code points: prompt ``[…]``, each later message in brackets too, ``.`` to stop."""

    stop_ids = frozenset([ord(".")])
    tokenizer = SimpleNamespace(added_tokens_encoder={})

    def __init__(self, *, forgets: bool = False) -> None:
        self.forgets = forgets

    def tokenize(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def text_of(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def parse(self, ids: Sequence[int]) -> Message:
        return Message("assistant", self.text_of(ids).removesuffix("."))

    def start(self, messages: Sequence[Message]) -> Rendered:
        text = self._text(messages)
        return Rendered(self.tokenize(text), text)

    def extend(self, prompt: Rendered, ids: Sequence[int], messages: Sequence[Message]) -> Rendered:
        text, text_so_far = self._text(messages), prompt.text + self.text_of(ids)
        extends = text.startswith(text_so_far)
        return Rendered(self.tokenize(text[len(text_so_far) if extends else 0 :]), text, extends)

    def _text(self, messages: Sequence[Message]) -> str:
        said = [f"{m.content.upper() if self.forgets else m.content}." if m.role == "assistant" else f"[{m.content}]"
                for m in messages]  # fmt: skip
        return "".join(said)


@pytest.fixture
def renderer() -> ByCharacter:
    return ByCharacter()


def test_the_mask_is_one_where_the_policy_sampled(scripted: Any, renderer: ByCharacter) -> None:
    """``[a]`` is the prompt, ``hi.`` and ``bye.`` are sampled, ``[ok]`` is the tool's."""
    engine = scripted(["hi", "bye"])
    (trajectory,) = run([Echo()], engine, renderer, SAMPLING, seeds=[1])
    (sample,) = trajectory.samples
    assert sample.token_ids == [91, 97, 93, 104, 105, 46, 91, 111, 107, 93, 98, 121, 101, 46]
    assert sample.loss_mask == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert sample.sampler_logprobs == [
        None, None, None, -0.5, -0.75, -1.0, None, None, None, None, -0.5, -0.75, -1.0, -1.25,
    ]  # fmt: skip
    assert [turn.completion_ids for turn in trajectory.turns] == [[104, 105, 46], [98, 121, 101, 46]]
    assert [turn.prompt_tokens for turn in trajectory.turns] == [3, 10]
    assert [request.prompt_ids for request in engine.requests] == [sample.token_ids[:3], sample.token_ids[:10]]
    assert audit(trajectory) == 7
    assert [(m.role, m.content) for m in trajectory.messages] == [
        ("user", "a"), ("assistant", "hi"), ("tool", "ok"), ("assistant", "bye"),
    ]  # fmt: skip
    played = [(turn.tool_name, turn.tool_result, turn.finish_reason) for turn in trajectory.turns]
    assert played == [("echo", "ok", "stop"), ("return_final_answer", None, "stop")]
    assert (trajectory.stop_reason, trajectory.exception) == (StopReason.ANSWERED, None)
    assert (trajectory.final_answer, trajectory.final_sources) == ("May 20", ["<1@x>"])
    assert trajectory.rubric == {"num_turns": 2, "prompt_tokens": 13, "completion_tokens": 7, "thinking_tokens": 0}
    assert (trajectory.policy_version, trajectory.adapter_sha256) == ("v1", "ab12")


def test_a_template_that_rewrites_history_starts_a_new_sample(scripted: Any) -> None:
    (trajectory,) = run([Echo()], scripted(["hi", "bye"]), ByCharacter(forgets=True), SAMPLING, seeds=[1])
    first, second = trajectory.samples
    assert (first.token_ids, first.loss_mask) == ([91, 97, 93, 104, 105, 46], [0, 0, 0, 1, 1, 1])
    # [a]HI.[ok] is the new prompt: what was sampled before is shown again, but not trained twice.
    assert second.token_ids == [91, 97, 93, 72, 73, 46, 91, 111, 107, 93, 98, 121, 101, 46]
    assert second.loss_mask == [0] * 10 + [1] * 4
    assert audit(trajectory) == 7


def test_with_a_real_template_the_tokens_are_those_of_the_whole_text(tokenizer: Any, scripted: Any) -> None:
    real = ChatRenderer(tokenizer)
    engine = scripted(["hi", "bye"], renderer=real)
    (trajectory,) = run([Echo("<|im_end|>")], engine, real, SAMPLING, seeds=[1])
    (sample,) = trajectory.samples
    assert sample.token_ids == real.tokenize(
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\n<tool_response>\n"
        "< |im_end|>\n</tool_response><|im_end|>\n<|im_start|>assistant\nbye<|im_end|>"
    )
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert trained == real.tokenize("hi<|im_end|>bye<|im_end|>")
    assert trajectory.messages[2].content == "<|im_end|>"


def test_a_completion_cut_short_ends_the_trajectory_unplayed(scripted: Any, renderer: ByCharacter) -> None:
    (trajectory,) = run([Echo()], scripted(["bye"], finish="length"), renderer, SAMPLING, seeds=[1])
    assert (trajectory.stop_reason, trajectory.final_answer) == (StopReason.TRUNCATED, None)
    assert trajectory.samples[0].loss_mask == [0, 0, 0, 1, 1, 1]
    assert audit(trajectory) == 3


@pytest.mark.parametrize(("fails_at", "turns", "error"), [(0, 0, "OSError: no mailbox"), (2, 2, "ValueError: broken")])
def test_an_exception_ends_its_own_trajectory_alone(
    scripted: Any, renderer: ByCharacter, fails_at: int, turns: int, error: str
) -> None:
    ended: list[Trajectory] = []
    pair = [Echo(fails_at=fails_at), Echo()]
    broken, sound = run(pair, scripted(["hi", "bye"]), renderer, SAMPLING, seeds=[1, 2], progress=ended.append)
    assert broken.exception is not None and broken.exception.startswith(error)
    assert (broken.stop_reason, len(broken.turns)) == (StopReason.EXCEPTION, turns)
    assert (sound.exception, sound.stop_reason) == (None, StopReason.ANSWERED)
    assert sorted(map(id, ended)) == sorted([id(broken), id(sound)])


def test_an_engines_error_is_recorded_and_an_interrupt_passes_through(scripted: Any, renderer: ByCharacter) -> None:
    engine = scripted(["hi"])
    complete = engine.complete
    engine.complete = lambda request, text: replace(complete(request, text), error="server gone")
    (trajectory,) = run([Echo()], engine, renderer, SAMPLING, seeds=[1])
    assert trajectory.exception == "server gone"

    class Interrupted(Echo):
        def step(self, message: Message) -> StepResult:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([Interrupted()], scripted(["hi"]), renderer, SAMPLING, seeds=[1])


def test_a_policy_that_changes_in_mid_trajectory_is_an_exception(scripted: Any, renderer: ByCharacter) -> None:
    engine = scripted(["hi", "bye"])

    class Swaps(Echo):
        def step(self, message: Message) -> StepResult:
            engine.version = "v2"
            return super().step(message)

    (trajectory,) = run([Swaps()], engine, renderer, SAMPLING, seeds=[1])
    assert trajectory.exception == "StaleSpanError: the policy changed from v1 to v2 mid-trajectory"
    assert trajectory.rubric["stale_turns"] == 1 and len(trajectory.turns) == 1

    engine.version = "v1"
    (allowed,) = run([Swaps()], engine, renderer, SAMPLING, seeds=[1], stale_allowed=True)
    assert allowed.exception is None and allowed.policy_version == "v1" and allowed.rubric["stale_turns"] == 1
    assert [turn.policy_version for turn in allowed.turns] == ["v1", "v2"]
    assert [turn.adapter_sha256 for turn in allowed.turns] == ["ab12", "ab12"]
    assert audit(allowed) > 0
    allowed.rubric.clear()
    with pytest.raises(TokenDriftError, match="1 turns were sampled by different weights than the first"):
        audit(allowed)


def test_chat_engines_play_without_tokens(scripted: Any) -> None:
    engine = scripted(["hi", "bye"])

    def complete(request: Request, text: str) -> Completion:
        assert request.prompt_ids == [] and request.messages[-1].role in ("user", "tool")
        return Completion("000000", [], [], "stop", message=Message("assistant", text), prompt_tokens=4)

    engine.complete = complete
    (trajectory,) = run([Echo()], engine, None, SAMPLING, seeds=[1])
    assert (trajectory.samples, trajectory.stop_reason) == ([], StopReason.ANSWERED)
    assert trajectory.rubric["prompt_tokens"] == 8
    assert audit(trajectory) == 0


def test_each_turn_has_a_seed_of_its_own(scripted: Any, renderer: ByCharacter) -> None:
    engine = scripted(["hi", "bye"])
    run([Echo(), Echo()], engine, renderer, SAMPLING, seeds=[1, 2])
    seeds = {request.trajectory_id + str(len(request.messages)): request.seed for request in engine.requests}
    assert len(set(seeds.values())) == 4
    assert derive_seed(1, 0) == engine.requests[0].seed
    # The first eight bytes of the SHA-256 of "1", unit separator, "0", without the lowest bit.
    assert derive_seed(1, 0) == 0x658E6336371AFE4B
    twice = [Trajectory("a", "g", SCENARIO), Trajectory("a", "g", SCENARIO)]
    with pytest.raises(ValueError, match="same id"):
        run([Echo(), Echo()], engine, renderer, SAMPLING, seeds=[1, 2], trajectories=twice)


class Heard(Activity):
    """Keeps what is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, what: str, count: Any = None) -> None:
        self.notes.append(what)

    def end(self) -> None:
        self.notes.append("")


@pytest.mark.parametrize("sampling", ["sampling", ""])
def test_every_turn_is_progress_and_names_its_trajectory(scripted: Any, renderer: ByCharacter, sampling: str) -> None:
    """Servers have time limits of their own: nothing is under way here while they sample."""
    activity, engine = Heard(), scripted(["hi", "bye"])
    if sampling:
        engine.steps = 0  # a local engine's
    run([Echo()], engine, renderer, SAMPLING, seeds=[1], activity=activity)
    assert activity.notes == [sampling, *["in the environment of 000000", sampling] * 2]
    engine.scripts = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        run([Echo()], engine, renderer, SAMPLING, seeds=[1], activity=activity)
    assert activity.notes[-1] == ""


class InParts:
    """Says each turn's text up to the tokens asked for, and goes on with it; a text without ``.`` never ends."""

    def __init__(self, texts: Sequence[str], *, window: int = 1000) -> None:
        self.left, self.window, self.requests = list(texts), window, list[Request]()
        self.versions = itertools.repeat("v1")

    def generate(self, requests: Sequence[Request], advance: Any) -> list[Completion]:
        [request] = requests
        while request is not None:
            self.requests.append(request)
            text = self.left.pop(0)
            said = text[: min(request.sampling.max_tokens, self.window - len(request.prompt_ids))]
            self.left[:0] = [text[len(said) :]] if len(said) < len(text) else []
            ids, finish = [ord(letter) for letter in said], "stop" if said.endswith(".") else "length"
            about = {"seconds": 1.0, "policy_version": next(self.versions), "prompt_tokens": len(request.prompt_ids)}
            request = advance(Completion(request.trajectory_id, ids, [-float(id) for id in ids], finish, **about))
        return []

    def close(self) -> None: ...


THOUGHT = "<think>hm</think>"  # 17 tokens


@pytest.mark.parametrize(
    ("text", "bound", "sampled", "thinking", "asked", "ends"),
    [  # MAX_TOKENS is 10
        (THOUGHT + "abcdefg.", 17, 25, 17, [10, 7, 10], False),
        (THOUGHT + "abcdefg.", 100, 25, 17, [10, 10, 7], False),  # the second part holds 3 tokens of the answer
        (THOUGHT + "abcdefghijklm.", 17, 27, 17, [10, 7, 10], True),  # the answer is too long
        ("<think>" + "m" * 40, 17, 17, 17, [10, 7], True),  # the thought is
        ("abcdefg.", 4, 8, 0, [4, 6], False),  # no thought at all
        ("abcdefghijklm.", 4, 10, 0, [4, 6], True),
        (THOUGHT + "abcdefg.", None, 10, 10, [10], True),
    ],
)
def test_a_thought_has_a_bound_of_its_own_and_the_answer_goes_on_in_the_same_turn(
    renderer: ByCharacter, text: str, bound: int | None, sampled: int, thinking: int, asked: list[int], ends: bool
) -> None:
    engine = InParts([text, "bye."])
    sampling = SamplingParams(10, temperature=0.5, max_thinking_tokens=bound)
    (trajectory,) = run([Echo()], engine, renderer, sampling, seeds=[1])
    assert trajectory.exception is None
    turn, sample, ids = trajectory.turns[0], trajectory.samples[0], [ord(letter) for letter in text[:sampled]]
    first = engine.requests[: len(asked)]
    assert [request.sampling for request in first] == [replace(sampling, max_tokens=tokens) for tokens in asked]
    done = [sum(asked[:n]) for n in range(len(asked))]
    assert [request.prompt_ids for request in first] == [[91, 97, 93, *ids[:n]] for n in done]
    assert [request.seed for request in first] == [derive_seed(1, 0), *(derive_seed(1, 0, n) for n in done[1:])]
    assert (turn.completion_ids, turn.logprobs) == (ids, [-float(id) for id in ids])
    assert (turn.prompt_tokens, turn.completion_tokens, turn.seconds) == (3, sampled, len(asked))
    assert (
        sample.token_ids[: 3 + sampled] == [91, 97, 93, *ids]
        and sample.loss_mask[: 3 + sampled] == [0] * 3 + [1] * sampled
    )
    assert (trajectory.stop_reason, len(trajectory.turns)) == ((StopReason.TRUNCATED, 1) if ends else ("answered", 2))
    assert audit(trajectory) == sampled + (0 if ends else 4)
    assert trajectory.rubric["thinking_tokens"] == turn.thinking_tokens == thinking


@pytest.mark.parametrize(("window", "sampled"), [(12, 9), (13, 10)])  # 13: its second part is empty
def test_a_turn_in_parts_ends_with_the_window(renderer: ByCharacter, window: int, sampled: int) -> None:
    sampling = SamplingParams(10, max_thinking_tokens=17)
    (full,) = run([Echo()], InParts([THOUGHT], window=window), renderer, sampling, seeds=[1])
    assert (full.stop_reason, len(full.turns[0].completion_ids)) == (StopReason.TRUNCATED, sampled)


@pytest.mark.parametrize("stale_allowed", [True, False])
def test_a_policy_that_changes_in_mid_turn_is_an_exception(renderer: ByCharacter, stale_allowed: bool) -> None:
    engine, sampling = InParts([THOUGHT + "a.", "bye."]), SamplingParams(10, max_thinking_tokens=17)
    engine.versions = iter(["v1", "v1", "v2", "v2"])
    (trajectory,) = run([Echo()], engine, renderer, sampling, seeds=[1], stale_allowed=stale_allowed)
    changed = "StaleSpanError: the policy changed from v1 to v2 mid-turn"
    assert trajectory.exception == (None if stale_allowed else changed)
    assert [turn.policy_version for turn in trajectory.turns] == ["v2", "v2"] * stale_allowed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_process_a_turn_in_parts_is_the_turn_at_once(tmp_path: Path, monkeypatch: Any, temperature: float) -> None:
    """The model goes on from the keys and values it has: greedily, with the same tokens and log-probabilities."""
    settings = load_settings({"model_name": str(make_model(tmp_path)), "dtype": "fp32"}, environ={}, cwd=tmp_path)
    _, policy, engine = open_policy(settings)
    real = ChatRenderer(policy.tokenizer)

    def turn(sampling: SamplingParams) -> Turn:
        (trajectory,) = run([Echo()], engine, real, sampling, seeds=[1])
        assert audit(trajectory) == len(trajectory.turns[0].completion_ids)
        return trajectory.turns[0]

    whole = turn(SamplingParams(24, temperature))
    monkeypatch.setattr("emailrl.agent.play.thought_of", lambda renderer, prompt, ids: (min(len(ids), 5), len(ids) < 5))
    parts, again = (turn(SamplingParams(19, temperature, max_thinking_tokens=5)) for _ in range(2))
    assert (parts.completion_ids, parts.logprobs) == (again.completion_ids, again.logprobs)
    assert parts.completion_ids[:5] == whole.completion_ids[:5] and len(parts.completion_ids) == 24
    if not temperature:
        assert parts.completion_ids == whole.completion_ids
        assert parts.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    engine.close()
