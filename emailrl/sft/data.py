"""What sft trains on: the best trajectory per question, experts on questions or demo worlds; batches and held-out ones.

Experts on questions play each pass anew, while the previous one is trained on.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.base.workers import worker_processes
from emailrl.records import read_trajectories
from emailrl.records.trajectory import Message, StopReason, Trajectory
from emailrl.settings import Settings
from emailrl.sft import demo
from emailrl.sft.examples import Conversation, Example, examples_of, fingerprint, shared, shared_renderer
from emailrl.sft.searching import conversations_on, questions_of

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer
    from emailrl.questions.load import Split

VAL_SHARE = 0.1
"""Share of conversations for validation if no inbox is in the split val."""
_UNFIT = (StopReason.TRUNCATED, StopReason.EXCEPTION)
Group = list[Example]
"""The examples of one conversation."""
PassOf = Callable[[int], list[Group]]
"""The groups of a pass; every pass has the same questions in the same order."""


@dataclass
class Conversations:
    """The conversations as text; both lists are empty for endless expert play on demo worlds."""

    train: list[Conversation] = field(default_factory=list)
    val: list[Conversation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Data:
    """Training batches and validation examples."""

    batches: Callable[[int], Generator[list[Example]]]
    """The batches from a step on (0: all); every call gives the same ones."""
    val: list[Example]
    """Validation examples, from inboxes not trained on unless shared inboxes are allowed; may be empty."""
    fingerprint: str
    described: str
    """The training data in a line."""
    val_described: str
    notes: list[str]


def source_of(settings: Settings) -> str:
    """What experts play: ``questions``, ``demo`` worlds, or ``none``."""
    sft = settings.sft
    if sft.experts != "auto":
        return sft.experts
    if sft.from_scratch:
        return "demo"
    return "questions" if settings.data.questions is not None else "none" if sft.trajectories else "demo"


# -- conversations


def read_conversations(
    files: Sequence[Path], *, best_of: int | None = None, min_reward: float | None = None
) -> tuple[list[Conversation], list[str]]:
    """The highest-reward conversation per question (the first of equals), and notes on the rest.

    ``best_of`` considers only that many first trajectories per question; ``min_reward`` drops lower rewards.
    Trajectories that raised, were truncated, or have no assistant reply are never used. Raises UsageError for a missing
    file or if nothing is left, EmailRLError (file and line) for one that cannot be read.
    """
    for file in files:
        if not file.is_file():
            raise UsageError(f"No such trajectory file: {file}.", "Record one: emailrl rollout --out FILE.jsonl")
    counts: Counter[str] = Counter()
    seen: Counter[tuple[str, str]] = Counter()
    best: dict[tuple[str, str], Trajectory] = {}
    for trajectory in (each for file in files for each in read_trajectories(file)):
        question = (trajectory.scenario.id, trajectory.scenario.inbox_address)
        counts["read"] += 1
        seen[question] += 1
        if best_of is not None and seen[question] > best_of:
            counts["beyond --best-of"] += 1
        elif trajectory.exception is not None or trajectory.stop_reason in _UNFIT or not trajectory.turns:
            counts["cut off or raised"] += 1
        elif not _is_conversation(trajectory.messages):
            counts["no conversation"] += 1
        elif min_reward is not None and trajectory.reward < min_reward:
            counts["below --min-reward"] += 1
        elif question not in best or trajectory.reward > best[question].reward:
            best[question] = trajectory
    told = ", ".join(f"{count} {what}" for what, count in counts.items()) or "none read"
    if not best:
        raise UsageError(f"No trajectory is left to train on ({told}).", "Lower --min-reward, or add files.")
    notes = [f"{counted(len(best), 'conversation')} from trajectories ({told})"]
    if held_out := sum(trajectory.scenario.split == "test" for trajectory in best.values()):
        notes.append(f"{held_out} of them are on test questions: a benchmark on those is no longer held out")
    found = []
    for trajectory in best.values():
        scenario, messages = trajectory.scenario, list(trajectory.messages)
        while messages[-1].role != "assistant":  # nothing after it is trained
            messages.pop()
        found.append(Conversation(trajectory.id, scenario.inbox_address, scenario.split, messages))
    return found, notes


def _is_conversation(messages: Sequence[Message]) -> bool:
    """Whether an assistant replies to something, all of it in characters that a tokenizer takes."""
    roles = [message.role for message in messages]
    try:
        "".join(message.content for message in messages).encode()
    except UnicodeEncodeError:
        return False
    return "assistant" in roles[1:] and roles[0] != "assistant"


def played(settings: Settings, split: Split, *, draw: int = 0) -> tuple[list[Conversation], int]:
    """Expert conversations that end in a correct answer, and the number of questions asked of a split.

    Another ``draw`` gives other routes to the same answers.
    """
    seed = settings.training.seed
    questions = questions_of(settings, split, seed)
    right = conversations_on(questions, settings, seed=seed, draw=draw)
    return [Conversation(f"{split}-{one.id}", one.inbox_address, split, said) for one, said in right], len(questions)


def gather(settings: Settings) -> Conversations:
    """The conversations selected by the settings, split into training and held-out inboxes.

    Raises UsageError for files and questions that give none, EmailRLError for a file that cannot be read.
    """
    sft = settings.sft
    found: list[Conversation] = []
    notes: list[str] = []
    shares_inbox = bool(settings.data.allow_shared_inbox)
    if sft.trajectories:
        found, notes = read_conversations(sft.trajectories, best_of=sft.best_of, min_reward=sft.min_reward)
    elif sft.best_of is not None or sft.min_reward is not None:
        raise UsageError("--best-of and --min-reward select trajectories.", "Name their files with --trajectories.")
    if source_of(settings) == "questions":
        if found:
            notes.append("scripted experts answer the training questions as well (--experts none: trajectories only)")
        (shown, num_train), (held_out, num_val) = played(settings, "train"), played(settings, "val")
        if not shown:
            raise UsageError("The experts can solve none of the questions.", "Check --db and MAX_TURNS (at least 3).")
        answered, asked = len(shown) + len(held_out), num_train + num_val
        hint = f"; the others are left out (raising MAX_TURNS from {settings.agent.max_turns} may help)"
        notes.append(f"experts answered {answered} of {asked} questions correctly{'' if answered == asked else hint}")
        found += shown + held_out
        # Reading the questions has refused this unless it is allowed.
        shares_inbox = shares_inbox or not {one.inbox for one in shown}.isdisjoint(one.inbox for one in held_out)
    train, val = split(found, settings.data.eval_dataset_size, settings.training.seed, shared=shares_inbox)
    if found and not val:
        notes.append("all conversations are from one inbox: there is no validation loss and no early stopping")
    return Conversations(train, val, notes)


def split(
    conversations: Sequence[Conversation], most: int, seed: int, *, shared: bool = False
) -> tuple[list[Conversation], list[Conversation]]:
    """Split into training conversations and at most ``most`` validation ones from other inboxes.

    Held out are the inboxes of the split val, else of a seeded tenth of the conversations, but never all inboxes.
    ``shared`` accepts an inbox on both sides: the split val is then used for validation, the rest for training.
    """
    sizes = Counter(each.inbox for each in conversations)
    held_out = {each.inbox for each in conversations if each.split == "val"}
    by_split = shared and bool(held_out)
    if not held_out:
        order = sorted(sizes)
        random.Random(f"{seed}/sft/inboxes").shuffle(order)
        num = max(1, round(VAL_SHARE * len(conversations)))
        for inbox in order[1:]:
            if sum(sizes[each] for each in held_out) < num:
                held_out.add(inbox)
    sides: dict[bool, list[Conversation]] = defaultdict(list)
    for each in conversations:
        sides[each.split == "val" if by_split else each.inbox in held_out].append(each)
    random.Random(f"{seed}/sft/val").shuffle(sides[True])
    return sides[False], sides[True][:most]


# -- examples


def examples(
    found: Conversations, settings: Settings, renderer: ChatRenderer, *, longest: int, workers: int | None
) -> Data:
    """The examples that ``found`` makes for one policy; if empty, those of demo worlds.

    ``longest`` is the context window in tokens: longer conversations are dropped and counted. Raises UsageError if none
    is left to train on.
    """
    sft, seed, notes = settings.sft, settings.training.seed, list(found.notes)
    size, steps = sft.sft_batch_size, sft.sft_steps
    if not found.train and not found.val:
        play = partial(demo.batches, renderer, steps=steps, batch_size=size, seed=seed, workers=workers)
        val = demo.held_out(settings.data.eval_dataset_size, seed, renderer)
        described = "scripted experts on demo worlds"
        return Data(lambda start: play(start=start), val, fingerprint(val), described, _held_out(val), notes)
    train, num_train = tokenized(found.train, renderer, longest)
    held_out, num_val = tokenized(found.val, renderer, longest)
    if too_long := num_train + num_val:
        notes.append(f"{counted(too_long, 'conversation')} dropped: longer than the context window of {longest} tokens")
    if not train:
        raise UsageError("No conversation is left to train on.", "Add questions, trajectories or inboxes.")
    flat, val = ([example for group in groups for example in group] for groups in (train, held_out))
    tokens, spoken = sum(len(e.token_ids) for e in flat), sum(int(e.spoken.sum()) for e in flat)
    inboxes = {example.inbox for example in flat}

    def batches(start: int) -> Generator[list[Example]]:
        passes = math.ceil(steps * min(size, len(train)) / len(train))
        if passes == 1 or source_of(settings) != "questions":
            yield from batches_of(lambda number: train, len(train), size, seed, start)
            return
        with replayed(train, settings, renderer, longest=longest, passes=passes) as pass_of:
            yield from batches_of(pass_of, len(train), size, seed, start)

    described = f"{_counts(len(train), inboxes)}, {tokens:,} tokens, {spoken / tokens:.0%} of them trained"
    return Data(batches, val, fingerprint(flat + val), described, _held_out(val, inboxes), notes)


def tokenized(conversations: Sequence[Conversation], renderer: ChatRenderer, longest: int) -> tuple[list[Group], int]:
    """The examples of each conversation within ``longest`` tokens, and how many conversations are longer."""
    made = [examples_of(conversation, renderer) for conversation in conversations]
    fitting = [group for group in made if all(len(example.token_ids) <= longest for example in group)]
    return fitting, len(made) - len(fitting)


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


@contextmanager
def replayed(
    groups: Sequence[Group], settings: Settings, renderer: ChatRenderer, *, longest: int, passes: int
) -> Iterator[PassOf]:
    """Passes with replayed expert conversations; ``groups`` is pass 0, and the fallback if experts fail.

    Each pass is played while the previous one is trained on.
    """
    with shared(renderer) as folder, worker_processes(1, hint="Use --resume latest.") as submit:
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
    conversations, _ = played(settings, "train", draw=draw)
    groups, _ = tokenized(conversations, shared_renderer(folder), longest)
    return {group[0].conversation: group for group in groups}


def _counts(conversations: int, inboxes: Collection[str]) -> str:
    return f"{counted(conversations, 'conversation')} from {counted(len(inboxes), 'inbox')}"


def _held_out(val: Sequence[Example], trained: Collection[str] = ()) -> str:
    """The validation data in a line, which says if inboxes are also ``trained`` on."""
    inboxes = {example.inbox for example in val}
    if not inboxes:
        return "none"
    shared_ones = len(inboxes.intersection(trained))
    also = " not in the training data"
    if shared_ones == len(inboxes) == 1:
        also = ", which is also in the training data"
    elif shared_ones:
        also = f", {shared_ones if shared_ones < len(inboxes) else 'all'} of them also in the training data"
    return f"{_counts(len(val), inboxes)}{also}"
