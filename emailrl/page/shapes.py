"""JSON-ready records for the page's script: a list row per trajectory, and one trajectory in full, with its tokens as
text, one piece per id, without torch: only ``tokenizers`` and the ``tokenizer.json`` that fits.

A row (``/data/trajectories``): ``id, file, offset`` (byte of its line), ``source, step, group, scenario, kind,
inbox, question, gold, answer, reward, verdict, failure, stop, turns, tokens, trained, seconds, advantage, dropped,
found, read, cited``.

One in full (``/data/trajectory``): ``id, advantage, dropped, question, gold, answer, inbox, date, exception,
conversation`` (items with a ``role``), ``evidence, terms, reasons, rubric, facts, samples`` (``pieces, ids, mask,
logprobs`` and, of trained ones, ``old, ratio, advantages``; lists of equal length, null where a token has no value).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from emailrl.base.errors import EmailRLError
from emailrl.base.plain import cut
from emailrl.checkpoints import list_checkpoints
from emailrl.engines.dialects import BEGINS
from emailrl.measure.evaluation import verdict
from emailrl.model.resolve import resolve_model
from emailrl.page.place import name_of, source_of
from emailrl.page.results import benchmark_record, read_object
from emailrl.records import Entry, Record, TrainingNote
from emailrl.records.trajectory import SampleNote, StopReason, Trajectory, Turn
from emailrl.rewards.rubric import reasons

_PARTIAL = "\ufffd"
_LONGEST = 199  # characters shown of a question or answer in a row
_STOPS: dict[str | None, str] = {
    StopReason.CANT_PARSE_TOOL_CALL: "tool call not readable",
    StopReason.BAD_TOOL_CALL_NAME: "no such tool",
    StopReason.BAD_TOOL_CALL_ARGS: "wrong tool arguments",
    StopReason.TRUNCATED: "cut off at a token limit",
}
"""Stop reasons that are failures in themselves, however far the search came."""


def rows(file: Path, entries: Iterable[Entry], notes: Mapping[str, TrainingNote]) -> list[Record]:
    """Return the rows of a file's trajectories; ``notes`` are training's, by id."""
    own = {"file": name_of(file), "source": source_of(file)}
    return [_row(entry, notes.get(entry.id)) | own for entry in entries if entry.id is not None]


def _row(entry: Entry, note: TrainingNote | None) -> Record:
    same = ("id", "offset", "step", "kind", "inbox", "turns", "tokens", "trained")
    return {name: getattr(entry, name) for name in same} | {
        "group": entry.group_id,
        "scenario": entry.question_id,
        "question": cut(entry.question, _LONGEST),
        "gold": cut(entry.gold, _LONGEST),
        "answer": None if entry.answer is None else cut(entry.answer, _LONGEST),
        "reward": _short(entry.reward),
        "verdict": verdict(entry),
        "failure": failure(entry),
        "stop": entry.stop_reason,
        "seconds": _short(entry.seconds),
        "advantage": _advantage(note),
        "dropped": note and note.dropped,
        "found": entry.rubric.get("ever_found_right_email"),
        "read": entry.rubric.get("ever_read_right_email"),
        "cited": entry.rubric.get("sources_correct"),
    }


def failure(entry: Entry) -> str:
    """Return why a trajectory failed, as one of a few classes; ``""`` if it was correct or has no verdict. A wrong
    answer, no answer and "I don't know" are split by whether a gold email was found and read, if there is one."""
    came_to = verdict(entry)
    if came_to in ("correct", "not judged"):
        return ""
    if came_to == "crashed" or entry.stop_reason in _STOPS:
        return "crashed" if came_to == "crashed" else _STOPS[entry.stop_reason]
    found, read = entry.rubric.get("ever_found_right_email"), entry.rubric.get("ever_read_right_email")
    if found is None:
        return came_to
    progress = "found, not read" if found else "not found"
    return f"{came_to}, gold email {'read' if read else progress}"


def detail(trajectory: Trajectory, *, note: TrainingNote | None = None, tokens: TokenTexts | None = None) -> Record:
    """Return a trajectory in full; without ``tokens``, ids replace token texts."""
    scenario = trajectory.scenario
    return {
        "id": trajectory.id,
        "advantage": _advantage(note),
        "dropped": note and note.dropped,
        "question": scenario.question,
        "gold": scenario.answer,
        "answer": trajectory.final_answer,
        "inbox": scenario.inbox_address,
        "date": scenario.query_date,
        "exception": trajectory.exception,
        "conversation": list(conversation(trajectory)),
        "evidence": evidence(trajectory),
        "terms": {name: _short(value) for name, value in trajectory.reward_terms.items()},
        "reasons": reasons(trajectory),
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
        "samples": list(_samples(trajectory, note, tokens)),
    }


def evidence(trajectory: Trajectory) -> Record:
    """Return ``gold``, a list of each gold email's ``id``, ``found``, ``read`` (turns from 1, or None) and ``cited``,
    and ``others``, the cited emails that are not gold."""
    found: dict[str, int] = {}
    read: dict[str, int] = {}
    for number, turn in enumerate(trajectory.turns, 1):
        try:
            result = json.loads(turn.tool_result or "null")
        except (ValueError, RecursionError):  # of another environment's tool, not JSON
            continue
        if turn.tool_name == "search_emails":
            hits, first = result if isinstance(result, list) else [], found
        elif turn.tool_name in ("read_email", "read_thread"):
            hits, first = result if isinstance(result, list) else [result], read
        else:
            continue
        for hit in hits:
            if isinstance(hit, dict) and isinstance(hit.get("message_id"), str):
                first.setdefault(hit["message_id"], number)
    gold, cited = trajectory.scenario.evidence, dict.fromkeys(trajectory.final_sources)
    return {
        "gold": [{"id": one, "found": found.get(one), "read": read.get(one), "cited": one in cited} for one in gold],
        "others": [each for each in cited if each not in gold],
    }


def conversation(trajectory: Trajectory) -> Iterator[Record]:
    """The messages in order, each assistant message with its turn; then turns without a message."""
    turns = list(enumerate(trajectory.turns, 1))
    number, current = 0, None
    for message in trajectory.messages:
        if message.role == "assistant":
            yield from _unanswered(current, number)
            number, current = turns.pop(0) if turns else (0, None)
            calls: list[Record] = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
            facts = _turn_facts(number, current) if current else {}
            said = BEGINS.split(message.content, 1)[0] if calls else message.content
            yield {
                "role": "assistant", "text": message.content, "said": said.strip(), "calls": calls,
                "error": message.parse_error, **facts,
            }  # fmt: skip
        else:
            current = None if message.role == "tool" else current
            yield {"role": message.role, "text": message.content, "name": message.name}
    yield from _unanswered(current, number)
    for number, turn in turns:
        calls = [{"name": turn.tool_name, "arguments": turn.tool_args}] if turn.tool_name else []
        yield {"role": "assistant", "text": "", "said": "", "calls": calls, "error": None, **_turn_facts(number, turn)}
        yield from _unanswered(turn, number)


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
        "logprob": _short(sum(sampled) / len(sampled)) if sampled else None,
    }


def _samples(trajectory: Trajectory, note: TrainingNote | None, tokens: TokenTexts | None) -> Iterator[Record]:
    """The token sequences; each with the recorded training mask and numbers if their lengths match."""
    trained = note.samples if note else []
    if len(trained) != len(trajectory.samples):
        trained = [SampleNote()] * len(trajectory.samples)
    for sample, own in zip(trajectory.samples, trained, strict=True):
        length = len(sample.token_ids)
        record: Record = {
            "ids": sample.token_ids,
            "pieces": tokens.pieces(sample.token_ids) if tokens else None,
            "mask": sample.loss_mask,
            "logprobs": list(map(_short, sample.sampler_logprobs)),
        }
        if len(own.loss_mask) == length:
            advantages = own.advantages or [note.advantage if note and on else None for on in own.loss_mask]
            numbers = {"old": own.old_logprobs, "ratio": own.ratio, "advantages": advantages}
            record["mask"] = own.loss_mask
            record |= {name: list(map(_short, each)) for name, each in numbers.items() if len(each) == length}
        yield record


def _advantage(note: TrainingNote | None) -> float | None:
    """The common advantage of the trained tokens, or their mean."""
    values = note.token_advantages if note else []
    return _short(sum(values) / len(values) if values else note and note.advantage)


def _short(value: Any) -> Any:
    """A float with six significant digits: exact enough to read, half as long in the file."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


class TokenTexts:
    """Decodes ids with one tokenizer file."""

    def __init__(self, folder: Path) -> None:
        """Read ``folder/tokenizer.json``; raises ``EmailRLError`` where it is absent or unreadable."""
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the Rust side raises bare Exception for a malformed file
            raise EmailRLError(f"{file}: {error}") from error
        self._alone: dict[int, str] = {}

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return one text per id, joined equal to ``text(ids)`` up to what the decoder normalizes. A character split
        over several ids is shown at the last of them; the earlier ones are ``""``. Bytes that never become a character
        are shown as ``⟨id⟩``."""
        pieces: list[str] = []
        pending: list[int] = []
        for token_id in ids:
            pending.append(token_id)
            text = self.text(pending) if len(pending) > 1 else self._alone.get(token_id)
            if text is None:  # decoded once: a page decodes millions
                text = self._alone[token_id] = self.text([token_id])
            if text.endswith(_PARTIAL) and len(pending) < 4:
                pieces.append("")
                continue
            pieces.append("".join(f"⟨{i}⟩" for i in pending) if _PARTIAL in text else text)
            pending = []
        if pending:
            pieces[-1] = "".join(f"⟨{i}⟩" for i in pending)
        return pieces

    def fits(self, trajectory: Trajectory) -> bool:
        """Whether this tokenizer made the trajectory: its decoded completions contain the recorded assistant texts."""
        texts = [message.content for message in trajectory.messages if message.role == "assistant"]
        sampled = [turn.completion_ids for turn in trajectory.turns]
        pairs = [(ids, text) for ids, text in zip(sampled, texts, strict=False) if ids]
        return bool(pairs) and all(text.strip() in self.text(ids) for ids, text in pairs)


def fitting_tokenizer(folders: Iterable[Path], trajectory: Trajectory) -> TokenTexts | None:
    """Return the first tokenizer that decodes the recorded ids to the recorded texts, or None."""
    found = (TokenTexts(folder) for folder in folders if (folder / "tokenizer.json").is_file())
    return next((tokens for tokens in found if tokens.fits(trajectory)), None)


def tokenizer_folders(file: Path, model_name: str) -> Iterator[Path]:
    """Yield the folders that may hold the tokenizer of ``file``, likeliest first: the run's or benchmark's checkpoints,
    then the base models that these and a rollout's conditions name, then ``model_name``."""
    run_dir = file.parent.parent if file.parent.name == "trajectories" else file.parent
    checkpoints = list_checkpoints(run_dir)
    yield from (checkpoint.path for checkpoint in checkpoints)
    measured = benchmark_record(file)
    if measured.get("checkpoint"):
        yield Path(str(measured["checkpoint"]))
    rolled_out = read_object(file.with_suffix(".conditions.json"))
    bases = [checkpoint.metadata.base_model for checkpoint in checkpoints]
    for name in dict.fromkeys([*bases, measured.get("base_model"), rolled_out.get("model"), model_name]):
        if name and (folder := _model_folder(str(name))) is not None:
            yield folder


def _model_folder(name: str) -> Path | None:
    """A model's local files (packaged, local or in the hub's cache); does not use the network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = resolve_model(name)
    except EmailRLError:
        return None  # the folder is gone: the view shows ids instead of text, with a note
    if isinstance(found, Path):
        return found
    cached = try_to_load_from_cache(found, "tokenizer.json")
    return Path(cached).parent if isinstance(cached, str) else None
