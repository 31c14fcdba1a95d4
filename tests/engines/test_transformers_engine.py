"""The engine against the plain forward pass of the same model, one conversation at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import Qwen3ForCausalLM

from emailrl.engines.base import Completion, LocalEngine, Request, SamplingParams
from emailrl.engines.local import passes
from emailrl.engines.local.cache import BlockCache, Table
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.passes import Conversation, sample, uniforms

STOP = 1  # the stop id of the tests' model


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 40) for _ in range(length)]


@torch.inference_mode()
def reference(model: torch.nn.Module, request: Request) -> tuple[list[int], list[float]]:
    """Sample with a whole forward pass a token and no cache."""
    ids, logprobs, row = list(request.prompt_ids), [], uniforms(request.seed)
    for _ in range(request.sampling.max_tokens):
        tokens, found = sample(model(torch.tensor([ids])).logits[:, -1], [request.sampling], [row])
        ids += tokens
        logprobs += found
        if tokens[0] == STOP:
            break
    return ids[len(request.prompt_ids) :], logprobs


def same(completion: Completion, model: torch.nn.Module, request: Request) -> None:
    ids, logprobs = reference(model, request)
    assert completion.token_ids == ids
    assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)
    assert completion.finish_reason == ("stop" if ids[-1] == STOP else "length")
    assert completion.prompt_tokens == len(request.prompt_ids)


def requests(count: int, *, max_tokens: int = 12, temperature: float = 1.0) -> list[Request]:
    sampling = SamplingParams(max_tokens, temperature)
    return [Request(str(i), sampling, prompt(i, 3 + 7 * i % 40), seed=i) for i in range(count)]


class Dialogue:
    """Conversations of some turns, each answered with a tool result of its own length."""

    def __init__(self, first: list[Request], turns: int) -> None:
        self.turns = turns
        self.last = {request.trajectory_id: [request] for request in first}
        self.asked: list[tuple[Request, Completion]] = []

    def advance(self, completion: Completion) -> Request | None:
        asked = self.last[completion.trajectory_id]
        self.asked.append((asked[-1], completion))
        if len(asked) == self.turns:
            return None
        tool = prompt(len(self.asked), 1 + 5 * len(asked))
        ids = [*asked[-1].prompt_ids, *completion.token_ids, *tool]
        asked.append(Request(completion.trajectory_id, asked[-1].sampling, ids, seed=len(self.asked)))
        return asked[-1]


@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_conversations_of_many_turns_equal_the_plain_forward_pass(model: Qwen3ForCausalLM, max_rows: int) -> None:
    engine = TransformersEngine(model, [STOP], max_rows=max_rows)
    dialogue = Dialogue(requests(7), turns=3)
    done = engine.generate([asked[0] for asked in dialogue.last.values()], dialogue.advance)
    assert [completion for _, completion in dialogue.asked] == done
    assert len(done) == 21
    assert {completion.finish_reason for completion in done} == {"stop", "length"}
    for request, completion in dialogue.asked:
        same(completion, model, request)


def test_greedy_equals_generate(model: Qwen3ForCausalLM) -> None:
    engine = TransformersEngine(model, [STOP], max_rows=8)
    asked = requests(5, temperature=0)
    for request, completion in zip(asked, engine.generate(asked), strict=True):
        ids = torch.tensor([request.prompt_ids])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert completion.token_ids == whole[0, len(request.prompt_ids) :].tolist()


def test_the_same_requests_give_the_same_bits_and_one_asked_twice_keeps_its_places(model: Qwen3ForCausalLM) -> None:
    first, second = requests(2)
    done = TransformersEngine(model, [STOP], max_rows=2).generate([first, second, first])
    assert [completion.trajectory_id for completion in done] == ["0", "1", "0"]
    one, other = (TransformersEngine(model, [STOP], max_rows=9) for _ in range(2))
    said = one.generate(requests(9))
    assert [(c.token_ids, c.logprobs) for c in said] == [(c.token_ids, c.logprobs) for c in other.generate(requests(9))]
    assert isinstance(one, LocalEngine) and one.steps == max(len(each.token_ids) for each in said)
    one.release()
    assert one.cache.layers[0].keys.numel() == 0 < other.cache.layers[0].keys.numel()
    one.resume()
    assert [c.token_ids for c in one.generate(requests(9))] == [c.token_ids for c in said]


Reading = Callable[..., tuple[TransformersEngine, list[int]]]


@pytest.fixture
def reading(model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Reading:
    """An engine, and the number of tokens, padding left out, that each of its passes over prompts reads."""

    def make(max_rows: int = 8, trains: bool = True) -> tuple[TransformersEngine, list[int]]:
        engine, read = TransformersEngine(model, [STOP], max_rows=max_rows, trains=trains), list[int]()
        original = engine.passes.read_shortest

        def counting(unread: list[Conversation]) -> None:
            before = sum(each.unread for each in unread)
            original(unread)
            read.append(before - sum(each.unread for each in unread))

        monkeypatch.setattr(engine.passes, "read_shortest", counting)
        return engine, read

    return make


def test_members_of_a_group_read_their_prompt_once(model: Qwen3ForCausalLM, reading: Reading) -> None:
    engine, read = reading()
    group, users = [Request(str(i), SamplingParams(9), prompt(0, 100), seed=i) for i in range(6)], list[list[int]]()
    ended = engine.generate(group, lambda _: users.append(list(engine.cache.users)))  # type: ignore[func-returns-value]
    done = sorted(ended, key=lambda completion: completion.trajectory_id)
    # The first reads all but the last token; the others begin with its three blocks of 32.
    assert read == [99, 5 * 3]
    # These are in all six tables; the fourth, with the last token and what is sampled, is each one's own.
    assert sorted(filter(None, users[0]))[:9] == [1] * 6 + [6] * 3
    assert not any(engine.cache.users)
    for request, completion in zip(group, done, strict=True):
        same(completion, model, request)
    assert len({tuple(completion.token_ids) for completion in done}) > 1


def test_a_latecomer_takes_its_beginning_from_one_that_runs(model: Qwen3ForCausalLM, reading: Reading) -> None:
    engine, read = reading(max_rows=2)
    three = [Request(str(i), SamplingParams((9, 3, 5)[i], 0.0), [*prompt(0, 64), 2 + i, 7]) for i in range(3)]
    for request, completion in zip(three, engine.generate(three), strict=True):
        same(completion, model, request)
    assert read == [65, 1, 1]


@pytest.mark.parametrize("changed", [False, True])
def test_a_later_turn_reads_only_what_is_new(model: Qwen3ForCausalLM, reading: Reading, changed: bool) -> None:
    engine, read = reading()
    first, turns = Request("a", SamplingParams(4), prompt(0, 80)), list[Request]()

    def advance(completion: Completion) -> Request | None:
        ids = [*first.prompt_ids, *completion.token_ids, *prompt(1, 10)]
        ids[70] = (ids[70] - 1) % 38 + 2 if changed else ids[70]
        turns.append(Request("a", SamplingParams(4), ids, seed=1))
        return turns[0] if len(turns) == 1 else None

    _, completion = engine.generate([first], advance)
    same(completion, model, turns[0])
    # What was sampled last and 9 of the 10 new tokens: the tenth is read by the step that samples. A changed history is
    # read from the beginning of the block in which it changed.
    assert read == [79, len(turns[0].prompt_ids) - 1 - 64 if changed else 10]


def test_long_prompts_are_read_in_pieces(
    model: Qwen3ForCausalLM, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(passes.PREFILL_TOKENS, "cpu", 16)
    engine, read = reading()
    request = Request("a", SamplingParams(4), prompt(0, 40))
    same(engine.generate([request])[0], model, request)
    assert read == [16, 16, 7]


def test_a_follow_up_joins_while_others_still_sample(model: Qwen3ForCausalLM) -> None:
    order = list[str]()

    def advance(completion: Completion) -> Request | None:
        order.append(completion.trajectory_id)
        short = completion.trajectory_id == "short" and order.count("short") < 3
        return Request("short", SamplingParams(2, 0.0), [*prompt(0, 5), *completion.token_ids, 3]) if short else None

    long, short = Request("long", SamplingParams(20, 0.0), prompt(1, 5)), SamplingParams(2, 0.0)
    engine = TransformersEngine(model, [39], max_rows=8)
    engine.generate([long, Request("short", short, prompt(0, 5))], advance)
    assert order == ["short", "short", "short", "long"]


def test_the_context_window_bounds_a_completion(make_model: Callable[..., Qwen3ForCausalLM]) -> None:
    engine = TransformersEngine(make_model(), [39], max_rows=4, max_model_len=20)
    sampling = SamplingParams(50, 0.0)
    almost, full, beyond = engine.generate([Request(str(n), sampling, prompt(0, n)) for n in (18, 20, 25)])
    assert (len(almost.token_ids), almost.finish_reason) == (2, "length")
    [alone] = engine.generate([Request("alone", sampling, prompt(0, 20))])
    assert [(c.token_ids, c.logprobs, c.finish_reason) for c in (full, beyond, alone)] == [([], [], "length")] * 3
    assert TransformersEngine(make_model(), [39], max_rows=4, max_model_len=10**6).max_model_len == 256
    turns = iter([Request("a", sampling, prompt(0, 30)), None])  # a follow-up beyond it ends there
    ended = engine.generate([Request("a", SamplingParams(2), prompt(0, 5))], lambda _: next(turns))
    assert [(one.prompt_tokens, bool(one.token_ids), one.finish_reason) for one in ended[1:]] == [(30, False, "length")]


class Interrupting(BlockCache):
    """Is interrupted in the middle of its bookkeeping."""

    def share(self, blocks: Sequence[int], table: Table) -> None:
        super().share(blocks[:1], table)
        raise KeyboardInterrupt


@pytest.mark.parametrize("max_rows", [1, 4])
def test_an_interrupt_inside_the_cache_leaves_nothing_behind(model: Qwen3ForCausalLM, max_rows: int) -> None:
    engine = TransformersEngine(model, [STOP], max_rows=max_rows)
    engine.generate(requests(6))
    cache = engine.cache
    cache.__class__ = Interrupting
    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request("long", SamplingParams(4), prompt(9, 90))])
    cache.__class__ = BlockCache
    assert cache.users == [0]
    for request, completion in zip(requests(6), engine.generate(requests(6)), strict=True):
        same(completion, model, request)


@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_packed_weights_and_guesses_change_no_token(
    make_model: Callable[..., Qwen3ForCausalLM], monkeypatch: pytest.MonkeyPatch, rows: int, temperature: float
) -> None:
    """A model that only samples: its bf16 weights are float16 exactly, and a guess is kept only where it is right."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch has no fbgemm")
    monkeypatch.setattr(passes, "LARGE_FROM", 0)
    model = make_model().bfloat16().float()
    plain = requests(5, max_tokens=40, temperature=temperature)
    asked = [Request(one.trajectory_id, one.sampling, one.prompt_ids * 2, seed=one.seed) for one in plain]
    engine = TransformersEngine(model, [STOP], max_rows=rows, max_model_len=150, trains=False)
    dialogue = Dialogue(asked, turns=2)
    engine.generate(asked, dialogue.advance)
    for request, completion in dialogue.asked:
        ids, logprobs = reference(model, request)
        whole = max(150 - len(request.prompt_ids), 0)
        assert completion.token_ids == ids[:whole]
        assert completion.logprobs == pytest.approx(logprobs[:whole], abs=1e-4)
    assert all(one.forward.func is torch.ops.quantized.linear_dynamic_fp16 for one in linear(engine.weights.model))
    assert all("forward" not in vars(one) for one in linear(TransformersEngine(model, [], max_rows=1).weights.model))
    if temperature == 0 and rows == 1:
        # Some of these 307 greedy tokens repeat what came before.
        assert engine.steps < sum(len(completion.token_ids) for _, completion in dialogue.asked) - 20


def test_a_bf16_model_that_only_samples_guesses_too(
    make_model: Callable[..., Qwen3ForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens may differ where two are equally likely: a pass over several rounds otherwise than one over each."""
    monkeypatch.setattr(passes, "LARGE_FROM", 0)
    model = make_model().bfloat16()
    engine = TransformersEngine(model, [STOP], max_rows=1, max_model_len=150, trains=False)
    request = Request("one", SamplingParams(60, temperature=0), prompt(1, 20) * 2)
    completion = engine.generate([request])[0]
    assert engine.steps < len(completion.token_ids) - 5
    ids = torch.tensor([request.prompt_ids + completion.token_ids])
    expected = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float().log_softmax(-1)
    logprobs = torch.tensor(completion.logprobs)
    assert torch.allclose(logprobs, expected.gather(1, ids[0, len(request.prompt_ids) :, None])[:, 0], atol=0.05)
    assert torch.allclose(logprobs, expected.amax(-1), atol=0.05)


def linear(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def test_a_guess_is_what_followed_the_latest_occurrence() -> None:
    def looked_up(*tokens: int) -> list[int]:
        return passes.looked_up(passes.text_of(tokens), 3)

    assert looked_up(1, 2, 3, 4, 1, 2, 3, 5, 6, 7, 2, 3, 1, 2, 3) == [5, 6, 7]  # of three; of two it is 1, 2, 3
    assert looked_up(1, 2, 3, 9, 2, 4, 7, 2) == [4, 7, 2]
    assert looked_up(1, 2, 3, 4, 1, 2, 9) == looked_up(7) == []
    assert looked_up(7, 7, 7, 7) == looked_up(7, 7) == [7]


def test_what_was_said_before_is_guessed_and_a_known_beginning_not_read_again(
    model: Qwen3ForCausalLM, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "LARGE_FROM", 0)
    engine, read = reading(trains=False)
    first, other = (Request(f"{i}", SamplingParams(24, 0.0), [*prompt(0, 70), 2 + i]) for i in range(2))
    (once,), steps = engine.generate([first]), engine.steps
    (twice,) = engine.generate([first])
    assert twice.token_ids == once.token_ids and twice.logprobs == pytest.approx(once.logprobs, abs=1e-4)
    assert engine.steps - steps < steps / 2
    (alone,), (after,) = reading(trains=False)[0].generate([other]), engine.generate([other])
    assert after.token_ids == alone.token_ids and after.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert read == [70, 6, 6]  # two blocks are kept
    engine.release()
    engine.generate([first])
    assert read[3:] == [70]
