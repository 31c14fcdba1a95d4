"""A chat renderer without a model, and an engine that says what a script tells it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from transformers import PreTrainedTokenizerFast

from emailrl.engines.base import Advance, Completion, Request
from emailrl.engines.renderer import ChatRenderer
from emailrl.sft.small_model import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """The small policy's tokenizer recipe and chat template."""
    return train_tokenizer(["When is the pump order due? On May 20."])


@pytest.fixture
def renderer(tokenizer: PreTrainedTokenizerFast) -> ChatRenderer:
    return ChatRenderer(tokenizer)


@dataclass
class ScriptedEngine:
    """Answers each request with the next text of its trajectory's script, ids and log-probabilities included.

    Log-probabilities count down from -0.5 by 0.25, so that each position can be told from the others.
    """

    renderer: ChatRenderer
    scripts: Callable[[str], Sequence[str]]
    finish: str = "stop"
    version: str = "v1"
    requests: list[Request] = field(default_factory=list)

    def generate(self, requests: Sequence[Request], advance: Advance | None = None) -> list[Completion]:
        waiting, done = list(requests), []
        turns: dict[str, int] = {}
        while waiting:
            request = waiting.pop(0)
            self.requests.append(request)
            turn = turns.setdefault(request.trajectory_id, 0)
            turns[request.trajectory_id] += 1
            done.append(self.complete(request, self.scripts(request.trajectory_id)[turn]))
            follow_up = advance(done[-1]) if advance else None
            waiting += [follow_up] if follow_up else []
        return done

    def complete(self, request: Request, text: str) -> Completion:
        ids = self.renderer.tokenize(text) + ([min(self.renderer.stop_ids)] if self.finish == "stop" else [])
        logprobs = [-0.5 - 0.25 * i for i in range(len(ids))]
        return Completion(
            request.trajectory_id,
            ids,
            logprobs,
            self.finish,
            prompt_tokens=len(request.prompt_ids),
            policy_version=self.version,
            adapter_sha256="ab12",
        )

    def close(self) -> None: ...


@pytest.fixture
def scripted(renderer: ChatRenderer) -> Callable[..., ScriptedEngine]:
    """``scripted(texts)``: an engine that says these texts in every trajectory; a function says them by its id."""

    def make(texts: Sequence[str] | Callable[[str], Sequence[str]], **changes: str) -> ScriptedEngine:
        return ScriptedEngine(renderer, texts if callable(texts) else lambda _: texts, **changes)

    return make
