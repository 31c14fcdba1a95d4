"""Training data: conversations of experts and trajectory files, with inboxes held out for validation."""

from __future__ import annotations

import logging
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.errors import UsageError
from emailrl.plain import counted
from emailrl.settings import Settings
from emailrl.sft import demo
from emailrl.sft.examples import Conversation, Example, fingerprint
from emailrl.sft.passes import batches_of, played, replayed, tokenized
from emailrl.sft.trajectories import read_conversations

if TYPE_CHECKING:
    from emailrl.engines.renderer import ChatRenderer

logger = logging.getLogger(__name__)

VAL_SHARE = 0.1
"""Share of conversations for validation if no inbox is in the split val."""


@dataclass
class Conversations:
    """The conversations as text; both lists are empty for endless expert play on demo worlds."""

    train: list[Conversation] = field(default_factory=list)
    val: list[Conversation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Data:
    """Training batches and validation examples."""

    batches: Callable[[int], Iterator[list[Example]]]
    """The batches from a step on (0: all); every call gives the same ones."""
    val: list[Example]
    """Validation examples, from inboxes not trained on unless shared inboxes are allowed; may be empty."""
    fingerprint: str
    described: str
    """The training data in a line."""
    val_described: str
    notes: list[str]


def gather(settings: Settings) -> Conversations:
    """The conversations selected by the settings, split into training and held-out inboxes.

    Raises UsageError for files and questions that give none, EmailRLError for a file that cannot be read.
    """
    sft, seed = settings.sft, settings.training.seed
    found: list[Conversation] = []
    notes: list[str] = []
    shared = bool(settings.data.allow_shared_inbox)
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
        failed = "" if answered == asked else hint
        notes.append(f"experts answered {answered} of {asked} questions correctly{failed}")
        found += shown + held_out
        # Reading the questions has refused this unless it is allowed.
        shared = shared or not {one.inbox for one in shown}.isdisjoint(one.inbox for one in held_out)
    train, val = split(found, settings.data.eval_dataset_size, seed, shared=shared)
    if found and not val:
        notes.append("all conversations are from one inbox: there is no validation loss and no early stopping")
    return Conversations(train, val, notes)


def source_of(settings: Settings) -> str:
    """What experts play: ``questions``, ``demo`` worlds, or ``none``."""
    sft = settings.sft
    if sft.experts != "auto":
        return sft.experts
    if sft.from_scratch:
        return "demo"
    return "questions" if settings.data.questions is not None else "none" if sft.trajectories else "demo"


def split(
    conversations: Sequence[Conversation], most: int, seed: int, *, shared: bool = False
) -> tuple[list[Conversation], list[Conversation]]:
    """Split into training conversations and at most ``most`` validation ones from other inboxes.

    Held out are the inboxes of the split val, else of a seeded tenth of the conversations, but never all inboxes.
    ``shared`` accepts an inbox on both sides: the split val is then used for validation, the rest for training.
    """
    by_inbox: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in conversations:
        by_inbox[conversation.inbox].append(conversation)
    held_out = {c.inbox for c in conversations if c.split == "val"}
    if held_out and shared:
        val = [c for c in conversations if c.split == "val"]
        train = [c for c in conversations if c.split != "val"]
    else:
        held_out = held_out or _some_inboxes(by_inbox, max(1, round(VAL_SHARE * len(conversations))), seed)
        val = [c for c in conversations if c.inbox in held_out]
        train = [c for c in conversations if c.inbox not in held_out]
    random.Random(f"{seed}/sft/val").shuffle(val)
    return train, val[:most]


def _some_inboxes(by_inbox: Mapping[str, Sequence[Conversation]], num: int, seed: int) -> set[str]:
    """Inboxes with at least ``num`` conversations between them, one inbox always left out."""
    order = sorted(by_inbox)
    random.Random(f"{seed}/sft/inboxes").shuffle(order)
    chosen: set[str] = set()
    for inbox in order[1:]:
        if sum(len(by_inbox[each]) for each in chosen) < num:
            chosen.add(inbox)
    return chosen


def examples(
    found: Conversations, settings: Settings, renderer: ChatRenderer, *, longest: int, workers: int | None
) -> Data:
    """The examples that ``found`` makes for one policy; if empty, those of demo worlds.

    ``longest`` is the context window in tokens: longer conversations are dropped and counted. Raises UsageError if none
    is left to train on.
    """
    notes = list(found.notes)
    if not found.train and not found.val:
        return _demo(settings, renderer, workers, notes)
    train, num_train = tokenized(found.train, renderer, longest)
    val, num_val = tokenized(found.val, renderer, longest)
    if too_long := num_train + num_val:
        notes.append(f"{counted(too_long, 'conversation')} dropped: longer than the context window of {longest} tokens")
    if not train:
        raise UsageError("No conversation is left to train on.", "Add questions, trajectories or inboxes.")
    flat = [example for group in train for example in group]
    tokens, spoken = sum(len(e.token_ids) for e in flat), sum(int(e.spoken.sum()) for e in flat)
    inboxes, share = {example.inbox for example in flat}, spoken / tokens
    size, seed = settings.sft.sft_batch_size, settings.training.seed
    held_out = [example for group in val for example in group]

    def batches(start: int) -> Iterator[list[Example]]:
        passes = math.ceil(settings.sft.sft_steps * min(size, len(train)) / len(train))
        if passes == 1 or source_of(settings) != "questions":
            yield from batches_of(lambda number: train, len(train), size, seed, start)
            return
        with replayed(train, settings, renderer.tokenizer, longest=longest, passes=passes) as pass_of:
            yield from batches_of(pass_of, len(train), size, seed, start)

    return Data(
        batches=batches,
        val=held_out,
        fingerprint=fingerprint(flat + held_out),
        described=f"{_counts(len(train), inboxes)}, {tokens:,} tokens, {share:.0%} of them trained",
        val_described=_held_out(held_out, inboxes),
        notes=notes,
    )


def _counts(conversations: int, inboxes: Collection[str]) -> str:
    return f"{counted(conversations, 'conversation')} from {counted(len(inboxes), 'inbox')}"


def _held_out(val: Sequence[Example], trained: Collection[str] = ()) -> str:
    """The validation data in a line, which says if inboxes are also ``trained`` on."""
    inboxes = {example.inbox for example in val}
    if not inboxes:
        return "none"
    shared = len(inboxes.intersection(trained))
    also = "" if not shared else f", {shared if shared < len(inboxes) else 'all'} of them also in the training data"
    also = ", which is also in the training data" if shared == len(inboxes) == 1 else also
    return f"{_counts(len(val), inboxes)}{also or ' not in the training data'}"


def _demo(settings: Settings, renderer: ChatRenderer, workers: int | None, notes: list[str]) -> Data:
    """Pass the tokenizer to worker processes in a folder: it may be new, or have another template."""
    sft, seed = settings.sft, settings.training.seed

    def batches(start: int) -> Iterator[list[Example]]:
        with tempfile.TemporaryDirectory() as folder:
            renderer.tokenizer.save_pretrained(folder)
            yield from demo.batches(
                Path(folder),
                steps=sft.sft_steps,
                batch_size=sft.sft_batch_size,
                start=start,
                seed=seed,
                workers=workers,
            )

    val = demo.held_out(settings.data.eval_dataset_size, seed, renderer)
    return Data(batches, val, fingerprint(val), "scripted experts on demo worlds", _held_out(val), notes)
