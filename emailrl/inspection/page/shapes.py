"""JSON-ready records for the page's script: a list row per trajectory, and one trajectory in full.

A row (``/data/trajectories``): ``id, file, offset`` (byte of its line), ``source, step, group, scenario, kind,
question, gold, answer, reward, verdict, failure, stop, turns, tokens, trained, seconds, advantage, dropped, found,
read, cited``.

One in full (``/data/trajectory``): ``id, advantage, dropped, question, gold, answer, inbox, date, exception,
conversation`` (items with a ``role``), ``evidence, terms, rubric, facts, samples`` (``pieces, ids, mask, logprobs``
and, of trained ones, ``old, ratio, advantages``; lists of equal length, null where a token has no value).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from emailrl.evaluation import verdict
from emailrl.inspection.page.evidence import evidence, failure
from emailrl.inspection.tokens import TokenTexts
from emailrl.records import Entry, Record
from emailrl.records.trajectory import Message, TokenSample, Trajectory, Turn

_LONGEST = 200
"""Maximum characters of a question or answer in a row."""


def row(trajectory: Trajectory, *, file: str, offset: int, source: str, note: Record | None = None) -> Record:
    """Return a trajectory's row; ``note`` is training's record of it, ``source`` the kind of its file."""
    gold, note = evidence(trajectory)["gold"], note or {}
    reached = {name: any(each[name] for each in gold) if gold else None for name in ("found", "read", "cited")}
    return {
        "id": trajectory.id,
        "file": file,
        "offset": offset,
        "source": source,
        "step": trajectory.step,
        "group": trajectory.group_id,
        "scenario": trajectory.scenario.id,
        "kind": trajectory.scenario.kind,
        "question": _cut(trajectory.scenario.question),
        "gold": _cut(trajectory.scenario.answer),
        "answer": None if trajectory.final_answer is None else _cut(trajectory.final_answer),
        "reward": _short(trajectory.reward),
        "verdict": verdict(trajectory),
        "failure": failure(trajectory, found=reached["found"], read=reached["read"]),
        "stop": trajectory.stop_reason.value if trajectory.stop_reason else None,
        "turns": len(trajectory.turns),
        "tokens": trajectory.num_tokens,
        "trained": sum(sum(sample.loss_mask) for sample in trajectory.samples),
        "seconds": _short(trajectory.seconds),
        "advantage": _short(_advantage(note)),
        "dropped": note.get("dropped"),
    } | reached


def entry_row(entry: Entry, *, file: str, source: str, note: Record | None = None) -> Record:
    """Return the same row from a trajectory's index entry."""
    rubric, note = entry.rubric, note or {}
    found, read = rubric.get("ever_found_right_email"), rubric.get("ever_read_right_email")
    return {
        "id": entry.id,
        "file": file,
        "offset": entry.offset,
        "source": source,
        "step": entry.step,
        "group": entry.group_id,
        "scenario": entry.question_id,
        "kind": entry.kind,
        "question": _cut(entry.question),
        "gold": _cut(entry.gold),
        "answer": None if entry.answer is None else _cut(entry.answer),
        "reward": _short(entry.reward),
        "verdict": verdict(entry),
        "failure": failure(entry, found=found, read=read),
        "stop": entry.stop_reason,
        "turns": entry.turns,
        "tokens": entry.tokens,
        "trained": entry.trained,
        "seconds": _short(entry.seconds),
        "advantage": _short(_advantage(note)),
        "dropped": note.get("dropped"),
        "found": found,
        "read": read,
        "cited": rubric.get("sources_correct"),
    }


def detail(trajectory: Trajectory, *, note: Record | None = None, tokens: TokenTexts | None = None) -> Record:
    """Return a trajectory in full; without ``tokens``, ids replace token texts."""
    scenario, note = trajectory.scenario, note or {}
    return {
        "id": trajectory.id,
        "advantage": _short(_advantage(note)),
        "dropped": note.get("dropped"),
        "question": scenario.question,
        "gold": scenario.answer,
        "answer": trajectory.final_answer,
        "inbox": scenario.inbox_address,
        "date": scenario.query_date,
        "exception": trajectory.exception,
        "conversation": list(_conversation(trajectory)),
        "evidence": evidence(trajectory),
        "terms": {name: _short(value) for name, value in trajectory.reward_terms.items()},
        "rubric": trajectory.rubric,
        "facts": {
            "run": trajectory.run_id,
            "mode": trajectory.mode,
            "policy": trajectory.policy_version,
            "adapter": trajectory.adapter_sha256,
            "split": scenario.split,
            "realism": scenario.how_realistic,
            "sources": trajectory.final_sources,
            "cost": sum(turn.cost for turn in trajectory.turns if turn.cost is not None) or None,
        },
        "samples": _samples(trajectory, note, tokens),
    }


def _conversation(trajectory: Trajectory) -> Iterator[Record]:
    """The messages in order, each assistant message with its turn; then turns without a message."""
    turns = list(enumerate(trajectory.turns, 1))
    number, current = 0, None
    for message in trajectory.messages:
        if message.role == "assistant":
            yield from _unanswered(current, number)
            number, current = turns.pop(0) if turns else (0, None)
            yield _assistant(message, number, current)
        else:
            current = None if message.role == "tool" else current
            yield {"role": message.role, "text": message.content, "name": message.name}
    yield from _unanswered(current, number)
    for number, turn in turns:
        call = [{"name": turn.tool_name, "arguments": turn.tool_args}] if turn.tool_name else []
        yield {"role": "assistant", "text": "", "calls": call, "error": None, **_turn_facts(number, turn)}
        yield from _unanswered(turn, number)


def _assistant(message: Message, number: int, turn: Turn | None) -> Record:
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    facts = _turn_facts(number, turn) if turn else {}
    return {"role": "assistant", "text": message.content, "calls": calls, "error": message.parse_error, **facts}


def _unanswered(turn: Turn | None, number: int) -> Iterator[Record]:
    """The result of a turn that is not in the conversation, such as a refusal."""
    if turn is not None and turn.tool_result is not None:
        yield {"role": "tool", "text": turn.tool_result, "name": turn.tool_name, "turn": number}


def _turn_facts(number: int, turn: Turn) -> Record:
    sampled = [each for each in turn.logprobs if each is not None]
    return {
        "turn": number,
        "finish": turn.finish_reason,
        "tokens": len(turn.completion_ids) or turn.completion_tokens,
        "seconds": _short(turn.seconds),
        "tool_seconds": _short(turn.tool_seconds),
        "logprob": _short(sum(sampled) / len(sampled)) if sampled else None,
    }


def _samples(trajectory: Trajectory, note: Record, tokens: TokenTexts | None) -> list[Record]:
    trained: Sequence[Record] = note.get("samples", [])
    if len(trained) != len(trajectory.samples):
        trained = [{}] * len(trajectory.samples)
    return [
        _sample(sample, numbers, note.get("advantage"), tokens)
        for sample, numbers in zip(trajectory.samples, trained, strict=True)
    ]


def _sample(sample: TokenSample, trained: Record, advantage: float | None, tokens: TokenTexts | None) -> Record:
    """One sequence; uses the recorded training mask if its length matches."""
    length = len(sample.token_ids)
    record: Record = {
        "ids": sample.token_ids,
        "pieces": tokens.pieces(sample.token_ids) if tokens else None,
        "mask": sample.loss_mask,
        "logprobs": _shorts(sample.sampler_logprobs),
    }
    if len(trained.get("loss_mask", ())) != length:
        return record
    mask = trained["loss_mask"]
    numbers = {"advantages": [advantage if on else None for on in mask]} | trained
    names = {"old": "old_logprobs", "ratio": "ratio", "advantages": "advantages"}
    noted = {name: numbers[source] for name, source in names.items() if len(numbers.get(source, ())) == length}
    return record | {"mask": mask} | {name: _shorts(values) for name, values in noted.items()}


def _advantage(note: Record) -> float | None:
    """The common advantage of the trained tokens, or their mean."""
    values = [each for sample in note.get("samples", []) for each in sample.get("advantages", ()) if each is not None]
    return sum(values) / len(values) if values else note.get("advantage")


def _shorts(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _short(value: Any) -> Any:
    """A float with six significant digits: exact enough to read, half as long in the file."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
