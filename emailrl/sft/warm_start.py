"""Warm start: teach a policy the form of the work from scripted expert trajectories, before any reward is seen.

Experts play demo worlds in the real environment (real database, real tools); the policy is trained on exactly the
tokens a rollout would have sampled, with the mask a rollout would have made.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from emailrl.disk import share_files
from emailrl.engines.renderer import parse_tool_calls
from emailrl.environment.mail_env import MailEnvironment
from emailrl.errors import UsageError
from emailrl.settings import Settings, StoreSettings
from emailrl.sft.expert import Expert, Habits
from emailrl.sft.imitation import Example, fit
from emailrl.store import open_mailbox
from emailrl.store.build import build_database
from emailrl.store.demo import ProjectFact, World, ask, make_world
from emailrl.store.demo.world import FACTS_PER_PROJECT, NUM_PROJECTS
from emailrl.trajectory import Message, Scenario, TokenSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from emailrl.engines.renderer import ChatRenderer

FIRST_WORLD = 1_000
"""Worlds below this number are the demo database's own."""
NUM_WORLDS = 9_000
MAX_TURNS = (4, 10)


@dataclass(frozen=True, slots=True)
class Play:
    """One scenario to be played by an expert."""

    fact: ProjectFact
    scenario: Scenario
    seed: str


def plays(world: World, number: int, seed: int, times: int) -> list[Play]:
    """Every fact of a world asked ``times`` times, each time in its own words and with its own expert."""
    found = []
    for index, (fact, repeat) in enumerate(itertools.product(world.facts, range(times))):
        name = f"{seed}/{number}/{index}/{repeat}"
        found.append(Play(fact, ask(world, fact, random.Random(name)), name))
    return found


def transcripts(number: int, *, seed: int, times: int, habits: Habits) -> list[list[Message]]:
    """The conversations of experts on one world, played against its real database."""
    world = make_world(seed, "train", FIRST_WORLD + number % NUM_WORLDS)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "world.db"
        build_database(iter(world.emails), db, settings=StoreSettings())
        mailbox = open_mailbox(db, world.inbox, until=world.query_date)
        try:
            for play in plays(world, number, seed, times):
                rng = random.Random(play.seed + "/expert")
                environment = MailEnvironment(play.scenario, mailbox, max_turns=rng.randint(*MAX_TURNS))
                found.append(converse(environment, Expert(play.fact, rng, habits)))
        finally:
            mailbox.close()
    return found


class Acts(Protocol):
    """Plays the assistant's part."""

    def act(self, messages: Sequence[Message]) -> str:
        """The text of the next assistant turn."""
        ...


def converse(environment: MailEnvironment, expert: Acts) -> list[Message]:
    """Let an expert play one environment to its end."""
    messages = environment.start()
    while True:
        words = expert.act(messages)
        messages.append(Message("assistant", words, parse_tool_calls(words)))
        result = environment.step(messages[-1])
        if result.done:
            return messages
        messages += result.messages


def samples_of(messages: list[Message], renderer: ChatRenderer) -> list[TokenSample]:
    """The tokens a rollout of this conversation would have recorded: assistant turns sampled, the rest shown.

    Several samples where the template does not extend the tokens so far; sampled log-probabilities are 0.
    """
    end = renderer.tokenizer.eos_token_id
    samples: list[TokenSample] = []
    text = ""
    for position, message in enumerate(messages):
        if message.role != "assistant":
            continue
        shown = messages[:position]
        prompt = renderer.extend(text, shown) if samples else renderer.start(shown)
        if not samples or not prompt.extends:
            samples.append(TokenSample())
        ids = [*renderer.tokenize(message.content), end]
        samples[-1].append_prompt(prompt.ids)
        samples[-1].append_sampled(ids, [0.0] * len(ids))
        text = prompt.text + renderer.text_of(ids)
    return samples


def corpus(num_worlds: int, *, seed: int) -> Iterator[str]:
    """Texts to train a tokenizer on: what is said and shown on some worlds, as a template frames it."""
    for number in range(num_worlds):
        for messages in transcripts(number, seed=seed, times=1, habits=Habits()):
            yield "".join(f"\n{message.content}\n" for message in messages[1:])


def stream(
    tokenizer_path: Path, num_worlds: int, *, seed: int, times: int, habits: Habits, workers: int
) -> Iterator[list[Example]]:
    """The examples of worlds 0 … num_worlds − 1, in the same order however many processes make them."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=_start_worker, initargs=(str(tokenizer_path), seed, times, habits)) as pool:
        yield from pool.imap(_work, range(num_worlds), chunksize=4)


_worker: dict[str, Any] = {}


def _start_worker(tokenizer_path: str, seed: int, times: int, habits: Habits) -> None:
    from transformers import AutoTokenizer

    from emailrl.engines.renderer import ChatRenderer
    from emailrl.environment.tools import tool_schemas

    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False), tool_schemas())
    _worker.update(renderer=renderer, seed=seed, times=times, habits=habits)


def _work(number: int) -> list[Example]:
    import numpy as np

    renderer = _worker["renderer"]
    played = transcripts(number, seed=_worker["seed"], times=_worker["times"], habits=_worker["habits"])
    samples = [sample for messages in played for sample in samples_of(messages, renderer)]
    return [(np.array(s.token_ids, dtype=np.uint32), np.array(s.loss_mask, dtype=bool)) for s in samples]


def shuffled(worlds: Iterable[list[Example]], seed: int, size: int = 4096) -> Iterator[Example]:
    """Mix worlds: each example leaves a buffer of ``size`` at random."""
    rng = random.Random(f"{seed}/shuffle")
    buffer: list[Example] = []
    for examples in worlds:
        for example in examples:
            if len(buffer) < size:
                buffer.append(example)
                continue
            place = rng.randrange(size)
            yield buffer[place]
            buffer[place] = example
    rng.shuffle(buffer)
    yield from buffer


TIMES = 2
"""How often each fact of a world is asked."""
CORPUS_WORLDS = 120


def warm_start(
    settings: Settings,
    out: Path,
    *,
    from_scratch: bool,
    own_questions: bool = False,
    steps: int,
    batch_size: int,
    learning_rate: float | None = None,
    workers: int | None = None,
    report: Callable[[int, float], None] | None = None,
) -> float:
    """Teach a new small policy, or a LoRA adapter of ``settings.model.name``, from experts; write it to ``out``.

    The experts play demo worlds, or with ``own_questions`` the training questions set (``own_expert``). ``out`` becomes
    a model folder (from scratch) or a PEFT adapter folder; it is written beside and renamed. Returns the mean loss of
    the last tenth of the steps, in nats per sampled token. Raises UsageError if ``out`` exists, for a new model on own
    questions, and where none of those can be taught.
    """
    if out.exists():
        raise UsageError(f"{out} exists.", "Name another folder with --out.")
    if own_questions and from_scratch:
        raise UsageError("A model made from nothing learns from demo mail.", "Name the one to teach with --model.")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    seed = settings.training.seed
    model, save = _new(partial, seed) if from_scratch else _adapter(settings, partial)
    if own_questions:
        from emailrl.sft.own_expert import own_examples

        examples = own_examples(settings, partial)
    else:
        examples = _demo_examples(partial, steps * batch_size, seed, workers)
    losses: list[float] = []

    def note(step: int, loss: float) -> None:
        losses.append(loss)
        if report:
            report(step, loss)

    rate = learning_rate or (2e-3 if from_scratch else 2e-4)
    fit(model, examples, steps=steps, batch_size=batch_size, learning_rate=rate, report=note)
    save()
    share_files(partial)
    partial.rename(out)
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def _demo_examples(tokenizer_path: Path, count: int, seed: int, workers: int | None) -> Iterator[Example]:
    """At least ``count`` examples, mixed, of demo worlds."""
    worlds = -(-count // (TIMES * NUM_PROJECTS * FACTS_PER_PROJECT)) + 1
    workers = workers or os.cpu_count() or 1
    return shuffled(stream(tokenizer_path, worlds, seed=seed, times=TIMES, habits=Habits(), workers=workers), seed)


def _new(folder: Path, seed: int) -> tuple[PreTrainedModel, Callable[[], None]]:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from emailrl.policy.tensors import writing_tensors
    from emailrl.sft.small_model import new_model, train_tokenizer

    disable_progress_bar()  # one over a single file, across ours
    tokenizer = train_tokenizer(corpus(CORPUS_WORLDS, seed=seed))
    tokenizer.save_pretrained(folder)
    model: Any = new_model(tokenizer, seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")

    def save() -> None:
        with writing_tensors(folder):
            model.to(torch.bfloat16).save_pretrained(folder)

    return model, save


def _adapter(settings: Settings, folder: Path) -> tuple[PreTrainedModel, Callable[[], None]]:
    from emailrl.policy.load import load_policy

    policy = load_policy(settings, trainable=True)
    policy.tokenizer.save_pretrained(folder)
    return policy.model, lambda: policy.save_adapter(folder)
