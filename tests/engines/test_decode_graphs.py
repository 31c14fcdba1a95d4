"""What CUDA graphs record computes what plain decode steps do; the graphs themselves are in ``tests/gpu``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engines.cache_requests import prompt, requests, same
from torch import Tensor
from transformers import Qwen3ForCausalLM

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.local.cache import Table
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.graphs import DecodeGraphs, pack, padded_step

ROWS, WIDTH = 24, 7


class PaddedSteps(DecodeGraphs):
    """Computes what a graph of 24 rows and seven blocks would, once the cache is there."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.rows: list[int] = []
        self.forgotten = 0
        super().__init__(engine.weights.model, engine.cache, most_rows=ROWS, most_tokens=224)

    def logits(self, tables: Sequence[Table], starts: Sequence[int], ids: Sequence[int]) -> Tensor | None:
        if not self.engine.cache.in_memory:
            return None
        self.rows.append(len(ids))
        self.engine.cache.grow()
        return padded_step(self.engine.weights.model, self.engine.cache, pack(tables, starts, ids, ROWS, WIDTH), 255)[
            : len(ids)
        ]

    def forget(self) -> None:
        self.forgotten += 1


def test_a_step_is_packed_with_zeros_around_it() -> None:
    packed = pack([[7, 8, 9], [3]], [70, 5], [11, 12], rows=3, width=2)  # type: ignore[list-item]
    assert packed.tolist() == [[11, 70, 7, 8], [12, 5, 3, 0], [0, 0, 0, 0]]


def test_padded_steps_sample_the_same_tokens(model: Qwen3ForCausalLM) -> None:
    asked = requests(20, 50, 80, 110, 33, max_tokens=40)
    engine = TransformersEngine(model, [39], max_rows=4)
    engine.passes.graphs = steps = PaddedSteps(engine)
    same(engine.generate(asked), TransformersEngine(model, [39], max_rows=4).generate(asked))
    assert max(steps.rows) == 4


def test_graphs_are_forgotten_with_the_weights_and_the_cache_they_refer_to(model: Qwen3ForCausalLM) -> None:
    engine = TransformersEngine(model, [39], max_rows=4)
    engine.passes.graphs = steps = PaddedSteps(engine)
    engine.load_adapter(None, "base")
    assert steps.forgotten == 1
    engine.release()
    assert steps.forgotten == 2


def test_the_cache_says_when_its_tensors_moved(model: Qwen3ForCausalLM) -> None:
    engine = TransformersEngine(model, [39], max_rows=4)
    before = engine.cache.moves
    engine.generate(requests(20, max_tokens=2))
    first = engine.cache.moves
    assert first > before
    engine.generate(requests(20, max_tokens=2))
    assert engine.cache.moves == first  # room for both
    engine.generate(requests(200, max_tokens=2))
    assert engine.cache.moves > first


def conversations(engine: TransformersEngine, rows: int) -> list[Completion]:
    """Conversations of four turns with one common beginning, whose members end their turns at different times."""
    shared, turns = prompt(1, 65), dict.fromkeys(map(str, range(rows)), 1)

    def ask(name: str, ids: list[int]) -> Request:
        return Request(name, SamplingParams(6 + int(name) % 5, 1.0), ids, seed=int(name))

    def advance(ended: Completion) -> Request | None:
        name = ended.trajectory_id
        turns[name] += 1
        said = [*prompts[name], *ended.token_ids, *prompt(turns[name], 9)]
        prompts[name] = said
        return ask(name, said) if turns[name] <= 4 else None

    prompts = {name: [*shared] for name in turns}
    ended = engine.generate([ask(name, prompts[name]) for name in turns], advance)
    return sorted(ended, key=lambda one: (int(one.trajectory_id), one.prompt_tokens))


def test_prompts_wait_for_others_and_nothing_else_changes(model: Qwen3ForCausalLM) -> None:
    reads = {}
    ended = {}
    for gathers in (False, True):
        engine = TransformersEngine(model, [], max_rows=20)
        if gathers:
            engine.passes.graphs = PaddedSteps(engine)
        read, passes = engine.passes.read_shortest, []
        engine.passes.read_shortest = lambda unread, read=read, passes=passes: (
            passes.append(len(unread)) or read(unread)
        )  # type: ignore[method-assign,func-returns-value,misc]
        ended[gathers], reads[gathers] = conversations(engine, 20), len(passes)
    same(ended[True], ended[False])
    assert reads[True] < reads[False]


def test_where_no_graph_can_be_captured_sampling_goes_on_and_says_so(
    model: Qwen3ForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = requests(20, 50, max_tokens=30)
    engine = TransformersEngine(model, [39], max_rows=4)
    engine.passes.graphs = DecodeGraphs(engine.weights.model, engine.cache, most_rows=4, most_tokens=256)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "CUDAGraph", _refuse)
        same(engine.generate(asked), TransformersEngine(model, [39], max_rows=4).generate(asked))
    assert capsys.readouterr().err.count("Sampling continues without CUDA graphs: not permitted") == 1


def _refuse() -> None:
    raise RuntimeError("not permitted\nmore")


def test_the_setting_says_where_it_has_no_effect(model: Qwen3ForCausalLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert TransformersEngine(model, [39], max_rows=4, cuda_graphs=True).passes.graphs is None
    assert "CUDA_GRAPHS has no effect: it needs a CUDA GPU." in capsys.readouterr().err
