"""Warm start: teach a policy the form of the work from scripted expert trajectories, before any reward is seen.

Experts play demo worlds in the real environment (real database, real tools); the policy is trained on exactly the
tokens a rollout would have sampled, with the mask a rollout would have made.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emailrl.disk import share_files
from emailrl.engines.renderer import parse_tool_calls
from emailrl.environment.mail_env import MailEnvironment
from emailrl.errors import UsageError
from emailrl.settings import Settings, StoreSettings
from emailrl.store import open_mailbox
from emailrl.store.build import build_database
from emailrl.store.demo import Fact, World, ask, make_world
from emailrl.store.demo.world import FACTS_PER_PROJECT, NUM_PROJECTS
from emailrl.training.expert import Expert, Habits
from emailrl.trajectory import Message, Scenario, TokenSample

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from emailrl.engines.renderer import ChatRenderer

FIRST_WORLD = 1_000
"""Worlds below this number are the demo database's own."""
NUM_WORLDS = 9_000
MAX_TURNS = (4, 10)


@dataclass(frozen=True, slots=True)
class Play:
    """One scenario to be played by an expert."""

    fact: Fact
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


def converse(environment: MailEnvironment, expert: Expert) -> list[Message]:
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


Example = tuple["np.ndarray", "np.ndarray"]
"""Token ids (uint32) and loss mask (bool) of one sample, equally long."""


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

    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tokenizer_path), tool_schemas())
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


def fit(
    model: PreTrainedModel, examples: Iterator[Example], *, steps: int, batch_size: int, learning_rate: float,
    report: Callable[[int, float], None],
) -> None:  # fmt: skip
    """Maximise the likelihood of the experts' tokens: AdamW, linear warm-up over 5 % of the steps, then a cosine to 0.

    Tokens that were shown count too, ``SHOWN_WEIGHT`` each: tool results repeat what stood in earlier ones, and a model
    made from nothing learns to copy from them. ``report(step, loss)`` is called after each update with the mean loss of
    the experts' tokens in nats. Stops early when the examples run out.
    """
    import torch
    import torch.nn.functional as F

    device = model.device
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.05)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * i / steps))
    )
    model.train()
    for step in range(1, steps + 1):
        batch = list(itertools.islice(examples, batch_size))
        if not batch:
            return
        ids_BT, mask_BT, length_B = _collate(batch, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=ids_BT, use_cache=False).logits
        loss_BT = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids_BT[:, 1:], reduction="none")
        shown_BT = (torch.arange(1, ids_BT.shape[1], device=device) < length_B[:, None]) & ~mask_BT[:, 1:]
        loss = loss_BT[mask_BT[:, 1:]].mean()
        total = loss + SHOWN_WEIGHT * loss_BT[shown_BT].sum() / mask_BT.sum()
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        report(step, loss.item())
    model.eval()


def _collate(batch: list[Example], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids and loss mask ``(B, T)``, T a multiple of 64, and lengths ``(B,)``.

    Padding needs no attention mask: attention is causal, so what stands to the right of a token cannot reach it.
    """
    import torch

    width = -(-max(len(ids) for ids, _ in batch) // 64) * 64
    ids_BT = torch.zeros(len(batch), width, dtype=torch.long)
    mask_BT = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, (ids, mask) in enumerate(batch):
        ids_BT[row, : len(ids)] = torch.from_numpy(ids.astype("int64"))
        mask_BT[row, : len(ids)] = torch.from_numpy(mask)
    lengths = torch.tensor([len(ids) for ids, _ in batch])
    return ids_BT.to(device), mask_BT.to(device), lengths.to(device)


SHOWN_WEIGHT = 0.1
"""Weight of a shown token's loss beside a sampled one's."""
TIMES = 2
"""How often each fact of a world is asked."""
CORPUS_WORLDS = 120


def warm_start(
    settings: Settings,
    out: Path,
    *,
    from_scratch: bool,
    steps: int,
    batch_size: int,
    learning_rate: float | None = None,
    workers: int | None = None,
    report: Callable[[int, float], None] | None = None,
) -> float:
    """Teach a new small policy, or a LoRA adapter of ``settings.model.name``, from experts; write it to ``out``.

    ``out`` becomes a model folder (from scratch) or a PEFT adapter folder; it is written beside and renamed. Returns
    the mean loss of the last tenth of the steps, in nats per sampled token. Raises UsageError if ``out`` exists.
    """
    if out.exists():
        raise UsageError(f"{out} exists.", "Name another folder with --out.")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    seed = settings.training.seed
    model, save = _new(partial, seed) if from_scratch else _adapter(settings, partial)
    worlds = -(-steps * batch_size // (TIMES * NUM_PROJECTS * FACTS_PER_PROJECT)) + 1
    examples = stream(partial, worlds, seed=seed, times=TIMES, habits=Habits(), workers=workers or os.cpu_count() or 1)
    losses: list[float] = []

    def note(step: int, loss: float) -> None:
        losses.append(loss)
        if report:
            report(step, loss)

    rate = learning_rate or (2e-3 if from_scratch else 2e-4)
    fit(model, shuffled(examples, seed), steps=steps, batch_size=batch_size, learning_rate=rate, report=note)
    save()
    share_files(partial)
    partial.rename(out)
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def _new(folder: Path, seed: int) -> tuple[PreTrainedModel, Callable[[], None]]:
    import torch

    from emailrl.training.small_model import new_model, train_tokenizer

    tokenizer = train_tokenizer(corpus(CORPUS_WORLDS, seed=seed))
    tokenizer.save_pretrained(folder)
    model: Any = new_model(tokenizer, seed)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model, lambda: model.to(torch.bfloat16).save_pretrained(folder)


def _adapter(settings: Settings, folder: Path) -> tuple[PreTrainedModel, Callable[[], None]]:
    from emailrl.policy.load import load_policy

    policy = load_policy(settings, trainable=True)
    policy.tokenizer.save_pretrained(folder)
    return policy.model, lambda: policy.save_adapter(folder)
