"""Passes over the conversations; in each, experts replay their questions, concurrently in another process.

A pass depends only on the seed and its number, so that a resumed run sees the same data as an uninterrupted one.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from emailrl.settings import Settings
from emailrl.sft.examples import Conversation, Example, examples_of
from emailrl.sft.searching import conversations_on, questions_of
from emailrl.workers import worker_processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from emailrl.engines.renderer import ChatRenderer
    from emailrl.scenarios import Split

Group = list[Example]
"""The examples of one conversation."""
PassOf = Callable[[int], list[Group]]
"""The groups of a pass; every pass has the same questions in the same order."""


def batches_of(pass_of: PassOf, count: int, size: int, seed: int, start: int) -> Iterator[list[Example]]:
    """Batches of ``size`` conversations, from batch ``start`` on, through successive passes of ``count`` conversations
    each.

    A batch holds a question twice only if it spans two passes.
    """
    size = min(size, count)
    number, groups, order = -1, list[Group](), list(range(count))
    for first in range(start * size, 2**63, size):
        batch: list[Example] = []
        for position in range(first, first + size):
            if position // count != number:
                number, order = position // count, list(range(count))
                groups = pass_of(number)
                random.Random(f"{seed}/sft/{number}").shuffle(order)
            batch += groups[order[position % count]]
        yield batch


def played(settings: Settings, split: Split, *, draw: int = 0) -> tuple[list[Conversation], int]:
    """Expert conversations that end in a correct answer, and the number of questions asked of a split.

    Another ``draw`` gives other routes to the same answers.
    """
    seed = settings.training.seed
    questions = questions_of(settings, split, seed)
    right = conversations_on(questions, settings, seed=seed, draw=draw)
    return [Conversation(f"{split}-{one.id}", one.inbox_address, split, said) for one, said in right], len(questions)


def tokenized(conversations: Sequence[Conversation], renderer: ChatRenderer, longest: int) -> tuple[list[Group], int]:
    """The examples of each conversation within ``longest`` tokens, and how many conversations are longer."""
    made = [examples_of(conversation, renderer) for conversation in conversations]
    fitting = [group for group in made if all(len(example.token_ids) <= longest for example in group)]
    return fitting, len(made) - len(fitting)


@contextmanager
def replayed(
    groups: Sequence[Group], settings: Settings, tokenizer: PreTrainedTokenizerBase, *, longest: int, passes: int
) -> Iterator[PassOf]:
    """Passes with replayed expert conversations; ``groups`` is pass 0, and the fallback if experts fail.

    Each pass is played while the previous one is trained on. The tokenizer reaches the process that plays through a
    folder: it may be new, or have another template.
    """
    with tempfile.TemporaryDirectory() as folder, worker_processes(1, hint="Use --resume latest.") as submit:
        tokenizer.save_pretrained(folder)
        play = partial(submit, _play, folder, settings.without_secrets(), longest)
        coming: dict[int, Future[dict[str, Group]]] = {}

        def pass_of(number: int) -> list[Group]:
            if number and number not in coming:  # a resumed run starts here
                coming[number] = play(number)
            found = coming.pop(number).result() if number else {}
            if number + 1 < passes:
                coming[number + 1] = play(number + 1)
            return [found.get(group[0].conversation, group) for group in groups]

        yield pass_of


def _play(folder: str, settings: Settings, longest: int, draw: int) -> dict[str, Group]:
    from transformers import AutoTokenizer

    from emailrl.engines.renderer import ChatRenderer
    from emailrl.environment.custom import load_task

    task = load_task(settings.agent.environment, settings.agent)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), task.tools)
    conversations, _ = played(settings, "train", draw=draw)
    groups, _ = tokenized(conversations, renderer, longest)
    return {group[0].conversation: group for group in groups}
