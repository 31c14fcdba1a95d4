"""What sft trains on: the best trajectory per question, experts on questions or demo worlds; batches and held-out ones.
Experts on questions play each pass anew, while the previous one is trained on."""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.base.errors import UsageError
from emailrl.base.plain import counted
from emailrl.base.workers import in_order, worker_processes
from emailrl.records.foreign import conversations_in
from emailrl.records.trajectory import StopReason, Trajectory
from emailrl.settings import Settings
from emailrl.sft import demo
from emailrl.sft.examples import Conversation, Example, examples_of, fingerprint, shared, shared_renderer
from emailrl.sft.searching import conversations

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer
    from emailrl.questions.load import Split

VAL_SHARE = 0.1  # of the conversations, for validation if no inbox is in the split val
_UNFIT = (StopReason.TRUNCATED, StopReason.EXCEPTION)
Group = list[Example]  # The examples of one conversation


@dataclass(frozen=True, slots=True)
class Data:
    """Training batches and validation examples; each ``described`` in a line."""

    batches: Callable[[int], Generator[list[Example]]]  # From a step on (0: all); every call gives the same ones
    val: list[Example]  # From inboxes not trained on unless shared inboxes are allowed; may be empty
    fingerprint: str
    described: str
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


def read_conversations(
    files: Sequence[Path], *, best_of: int | None = None, min_reward: float | None = None
) -> tuple[list[Conversation], list[str]]:
    """The highest-reward conversation per question (the first of equals), and notes on the rest. Trajectories that
    raised, were truncated, or have no assistant reply are never used. Raises UsageError for a missing file or if
    nothing is left, EmailRLError (file and line) for one that cannot be read."""
    if absent := [file for file in files if not (file.is_file() or file.is_dir())]:
        raise UsageError(f"No such trajectory file: {absent[0]}.", "Record one: emailrl rollout --out FILE.jsonl")
    counts, seen = Counter[str](), Counter[tuple[str, str]]()
    best: dict[tuple[str, str], Trajectory] = {}
    for trajectory in (each for file in files for each in conversations_in(file)):
        question = (trajectory.scenario.id, trajectory.scenario.inbox_address)
        counts["read"] += 1
        roles = [message.role for message in trajectory.messages]
        # What no tokenizer takes.
        surrogates = re.search("[\ud800-\udfff]", "".join(message.content for message in trajectory.messages))
        seen[question] += 1
        if best_of is not None and seen[question] > best_of:
            counts["beyond --best-of"] += 1
        elif trajectory.exception is not None or trajectory.stop_reason in _UNFIT or not trajectory.turns:
            counts["cut off or raised"] += 1
        elif roles[:1] == ["assistant"] or "assistant" not in roles or surrogates:
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
    for one in best.values():
        last = max(n for n, message in enumerate(one.messages) if message.role == "assistant")  # the last one trained
        messages = list(one.messages[: last + 1])
        found.append(Conversation(one.id, one.scenario.inbox_address, one.scenario.split, messages))
    return found, notes


def played(settings: Settings, split: Split, *, draw: int = 0) -> tuple[list[Conversation], int]:
    """Expert conversations on a split that end in a correct answer, and the number of questions asked. Another ``draw``
    gives other routes to the same answers."""
    right, asked = conversations(settings, split, seed=settings.training.seed, draw=draw)
    return [Conversation(f"{split}-{one.id}", one.inbox_address, split, said) for one, said in right], asked


def gather(settings: Settings) -> tuple[list[Conversation], list[Conversation], list[str]]:
    """The conversations selected by the settings, for training and from held-out inboxes, and notes; both lists are
    empty for endless expert play on demo worlds. Raises UsageError for files and questions that give none, EmailRLError
    for a file that cannot be read."""
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
            raise UsageError("The experts can solve none of the questions.", "Check --db and MAX_TURNS (8 for most).")
        answered, asked = len(shown) + len(held_out), num_train + num_val
        hint = f"; the others are left out (raising MAX_TURNS from {settings.agent.max_turns} may help)"
        notes.append(f"experts answered {answered} of {asked} questions correctly{hint if answered < asked else ''}")
        found += shown + held_out
        # Reading the questions has refused this unless it is allowed.
        shares_inbox = shares_inbox or not {one.inbox for one in shown}.isdisjoint(one.inbox for one in held_out)
    train, val = split(found, settings.data.eval_dataset_size, settings.training.seed, shared=shares_inbox)
    if found and not val:
        notes.append("all conversations are from one inbox: there is no validation loss and no early stopping")
    return train, val, notes


def split(
    conversations: Sequence[Conversation], most: int, seed: int, *, shared: bool = False
) -> tuple[list[Conversation], list[Conversation]]:
    """Split into training conversations and at most ``most`` validation ones from other inboxes: those of the split
    val, else of a seeded tenth of the conversations, but never all inboxes. ``shared`` accepts an inbox on both sides:
    the split val is then used for validation, the rest for training."""
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


def examples(
    shown: list[Conversation], others: list[Conversation], settings: Settings, renderer: ChatRenderer, *,
    longest: int, workers: int | None,
) -> Data:  # fmt: skip
    """The examples that conversations ``shown``, and ``others`` to validate, make for one policy; if there are none,
    those of demo worlds. Conversations of more than ``longest`` tokens, the context window, are dropped and counted;
    UsageError if none is left to train on."""
    sft, seed, notes = settings.sft, settings.training.seed, list[str]()
    size, steps = sft.sft_batch_size, sft.sft_steps
    if not shown and not others:
        play = partial(demo.batches, renderer, steps=steps, batch_size=size, seed=seed, workers=workers)
        val = demo.held_out(settings.data.eval_dataset_size, seed, renderer)
        described = "scripted experts on demo worlds"
        return Data(lambda start: play(start=start), val, fingerprint(val), described, _held_out(val), notes)
    train, num_train = tokenized(shown, renderer, longest)
    held_out, num_val = tokenized(others, renderer, longest)
    if too_long := num_train + num_val:
        notes.append(f"{counted(too_long, 'conversation')} dropped: longer than the context window of {longest} tokens")
    if not train:
        raise UsageError("No conversation is left to train on.", "Add questions, trajectories or inboxes.")
    size = min(size, len(train))
    flat, val = ([example for group in groups for example in group] for groups in (train, held_out))
    tokens, spoken = sum(len(e.token_ids) for e in flat), sum(int(e.spoken.sum()) for e in flat)
    inboxes = {example.inbox for example in flat}

    def batches(start: int) -> Generator[list[Example]]:
        passes, first = math.ceil(steps * size / len(train)), start * size // len(train)
        again = passes > 1 and source_of(settings) == "questions"
        if not again:
            yield from batches_of(repeat(train), len(train), size, seed, start)
            return
        with closing(replayed(train, settings, renderer, longest, range(first, passes))) as played_anew:
            yield from batches_of(played_anew, len(train), size, seed, start)

    described = f"{_counts(len(train), inboxes)}, {tokens:,} tokens, {spoken / tokens:.0%} of them trained"
    return Data(batches, val, fingerprint(flat + val), described, _held_out(val, inboxes), notes)


def tokenized(conversations: Sequence[Conversation], renderer: ChatRenderer, longest: int) -> tuple[list[Group], int]:
    """The examples of each conversation within ``longest`` tokens, and how many conversations are longer."""
    made = [examples_of(conversation, renderer) for conversation in conversations]
    fitting = [group for group in made if all(len(example.token_ids) <= longest for example in group)]
    return fitting, len(made) - len(fitting)


def batches_of(passes: Iterator[list[Group]], count: int, size: int, seed: int, start: int) -> Iterator[list[Example]]:
    """Batches of ``size`` conversations, from batch ``start`` on, through passes of ``count`` conversations each, of
    which the first has that batch. A batch holds a question twice only if it spans two passes."""
    number, groups, order = -1, list[Group](), list(range(count))
    for first in range(start * size, 2**63, size):
        batch: list[Example] = []
        for position in range(first, first + size):
            if position // count != number:
                number, order, groups = position // count, list(range(count)), next(passes)
                random.Random(f"{seed}/sft/{number}").shuffle(order)
            batch += groups[order[position % count]]
        yield batch


def replayed(
    groups: list[Group], settings: Settings, renderer: ChatRenderer, longest: int, passes: Iterable[int]
) -> Generator[list[Group]]:
    """Passes with replayed expert conversations, each played while the previous one is trained on; ``groups`` is pass
    0, and the fallback if experts fail."""
    with shared(renderer) as folder, worker_processes(1, hint="Use --resume latest.") as submit:
        calls = ((folder, settings.without_secrets(), longest, number) for number in passes)
        for found in in_order(submit, _play, calls, ahead=1):
            yield [found.get(group[0].conversation, group) for group in groups]


def _play(folder: str, settings: Settings, longest: int, draw: int) -> dict[str, Group]:
    conversations = played(settings, "train", draw=draw)[0] if draw else []
    groups, _ = tokenized(conversations, shared_renderer(folder), longest)
    return {group[0].conversation: group for group in groups}


def _counts(conversations: int, inboxes: Collection[str]) -> str:
    return f"{counted(conversations, 'conversation')} from {counted(len(inboxes), 'inbox')}"


def _held_out(val: Sequence[Example], trained: Collection[str] = ()) -> str:
    """The validation data in a line, which says how many inboxes are also ``trained`` on."""
    inboxes = {example.inbox for example in val}
    shared_ones = len(inboxes.intersection(trained))
    also = f", {shared_ones} of them also in the training data" if shared_ones else " not in the training data"
    return f"{_counts(len(val), inboxes)}{also}" if inboxes else "none"
