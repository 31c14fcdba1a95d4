"""Passes over the conversations; in each, experts replay their questions, concurrently in another process.

A pass depends only on the seed and its number, so that a resumed run sees the same data as an uninterrupted one.
"""

from __future__ import annotations

import random
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from emailrl.settings import Settings
from emailrl.sft.examples import Conversation, Example, examples_of
from emailrl.sft.searching import conversations_on, questions_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from emailrl.engines.renderer import ChatRenderer
    from emailrl.questions import Split

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
    import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        context = multiprocessing.get_context("spawn")
        with context.Pool(1, _start, (folder, settings.without_secrets(), longest)) as pool:
            coming: dict[int, Any] = {}

            def pass_of(number: int) -> list[Group]:
                if number and number not in coming:  # a resumed run starts here
                    coming[number] = pool.apply_async(_play, (number,))
                found: dict[str, Group] = coming.pop(number).get() if number else {}
                if number + 1 < passes:
                    coming[number + 1] = pool.apply_async(_play, (number + 1,))
                return [found.get(group[0].conversation, group) for group in groups]

            yield pass_of


_worker: dict[str, Any] = {}


def _start(folder: str, settings: Settings, longest: int) -> None:
    from transformers import AutoTokenizer

    from emailrl.engines.renderer import ChatRenderer
    from emailrl.environment.custom import load_task

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training process handles Ctrl-C
    task = load_task(settings.agent.environment, settings.agent)
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), task.tools)
    _worker.update(renderer=renderer, settings=settings, longest=longest)


def _play(draw: int) -> dict[str, Group]:
    conversations, _ = played(_worker["settings"], "train", draw=draw)
    groups, _ = tokenized(conversations, _worker["renderer"], _worker["longest"])
    return {group[0].conversation: group for group in groups}
