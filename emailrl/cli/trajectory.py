"""Trajectories on the terminal, in full or in lists; ``verbose`` adds every token with its mask and log-probability.
Everything shown is ``rich.text.Text``: email and model output are never parsed as markup."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from emailrl.base.plain import counted, cut, plain, plain_line
from emailrl.cli.output import LONGEST_ID, near, say
from emailrl.measure.evaluation import verdict
from emailrl.page.place import origin as origin_of
from emailrl.page.shapes import TokenTexts, conversation, fitting_tokenizer, tokenizer_folders
from emailrl.records import TrainingNote, TrajectoryIndex
from emailrl.records.trajectory import TokenSample, Trajectory
from emailrl.settings import Settings

TRAINED = "bold green"  # style of tokens with loss mask 1; of sampled ones if nothing was trained on them
CONTEXT = "grey58"  # style of tokens the policy only read
STYLES = {"correct": "green", "wrong": "yellow", "crashed": "red"}  # colors of verdicts; others have none
WIDTHS = {"index": 5, "step": 4, "reward": 6, "verdict": 12, "turns": 5, "tokens": 6}  # only the question is truncated
SURE = 0.99  # below this probability, a sampled token is marked with it
NARROW = 72  # below this width, ``step`` and ``tokens`` are left out, so that the question stays readable


def show_trajectories(file: Path, trajectories: Sequence[Trajectory], settings: Settings, console: Console) -> None:
    """Print a file's scored trajectories according to the settings; with both set, every token too."""
    if settings.output.show_trajectory_details:
        show_in_full(file, trajectories, settings, console)
    elif settings.output.verbose:
        for each in trajectories:
            facts = f"{verdict(each)}, reward {each.reward:.3f}, {counted(len(each.turns), 'turn')}"
            say(f"{each.id}: {facts}, {each.seconds:.1f} s: {each.scenario.question}", console)


def show_in_full(
    file: Path,
    trajectories: Sequence[Trajectory],
    settings: Settings,
    console: Console,
    *,
    where: str = "",
    notes: Mapping[str, TrainingNote] = MappingProxyType({}),
) -> None:
    """Print a file's trajectories; ``where`` says which they are, ``notes`` are training's, by id."""
    verbose, tokens = settings.output.verbose, None
    for each in trajectories:
        if verbose and tokens is None:  # a file holds trajectories of one policy
            tokens = fitting_tokenizer(tokenizer_folders(file, settings.model.name), each)
        title, made_by, note = f"{near(str(file))}{where}", origin_of(file, each), notes.get(each.id)
        console.print(render_trajectory(each, title=title, verbose=verbose, tokens=tokens, note=note, origin=made_by))


def render_trajectory(
    trajectory: Trajectory,
    *,
    title: str = "",
    verbose: bool = False,
    tokens: TokenTexts | None = None,
    note: TrainingNote | None = None,
    origin: str | None = None,
) -> RenderableType:
    """Lay out one trajectory: scenario, turns, outcome, reward terms; with ``verbose`` rubric and tokens too.
    ``tokens`` None shows ids instead of token text. ``title`` says where the trajectory is stored, ``origin`` what
    produced it; None is a training step."""
    scenario = trajectory.scenario
    made_by = origin or f"step {trajectory.step}  mode {trajectory.mode}"
    identity = f"{trajectory.id}  group {trajectory.group_id}  {made_by}"
    version = trajectory.policy_version or "unversioned"
    if not made_by.endswith(version):  # a benchmark's policy is the model it names
        identity += f"  policy {version}"
    if trajectory.adapter_sha256:
        identity += f"  adapter {trajectory.adapter_sha256[:12]}"
    came_of_it, turns = verdict(trajectory), counted(len(trajectory.turns), "turn")
    rows = {
        "Question": scenario.question,
        "Verdict": f"{came_of_it}, reward {trajectory.reward:.3f}, {turns}, {trajectory.seconds:.2f} s",
        "Inbox": f"{scenario.inbox_address}, as of {scenario.query_date}",
        "Gold answer": scenario.answer,
        "Gold emails": _ids(scenario.evidence),
        "Trajectory": identity,
    }
    style = "red" if trajectory.exception else STYLES.get(came_of_it, "none")
    header = Panel(_pairs(rows | ({"From": title} if title else {})), box=box.ROUNDED, border_style=style)
    parts: list[RenderableType] = [header, *_turns(trajectory, verbose), _outcome(trajectory, note, style)]
    if verbose:
        parts.append(_numbers("Rubric", trajectory.rubric))
        is_trained = origin is None and not (note and note.dropped)
        for number, sample in enumerate(trajectory.samples, 1):
            name = "Tokens" if len(trajectory.samples) == 1 else f"Tokens, sample {number} of {len(trajectory.samples)}"
            own = note.samples[number - 1].advantages if note and len(note.samples) >= number else []
            parts.append(_tokens(name, sample, tokens, own, is_trained=is_trained))
    return Group(*parts)


def _turns(trajectory: Trajectory, verbose: bool) -> Iterator[RenderableType]:
    """Yield the conversation: opening messages (``verbose``), then each assistant message with its tool result."""
    number = 0
    for item in conversation(trajectory):
        role, text = item["role"], item["text"]
        if role == "assistant":
            number += 1
            facts = [f"turn {number}"]
            if "turn" in item:
                facts += [f"{item['tokens']} tokens"] * bool(item["tokens"])
                facts += [f"{item['seconds']:.2f} s", f"finish {plain_line(item['finish'])}"]
            yield Rule(Text(" · ".join(facts)), align="left", style="cyan")
            if said := item["said"]:
                yield _labelled("assistant", said, "")
            yield from (_call(call["name"], call["arguments"] or {}) for call in item["calls"])
            if item["error"]:
                yield _labelled("unparsable", item["error"], "red")
        elif role == "tool":
            yield _result(f"result of {plain_line(item['name'] or 'tool')}", text)
        elif verbose or role not in ("system", "user") or number:
            yield _labelled(role, text, CONTEXT)


def _call(name: str, arguments: dict[str, Any]) -> Padding:
    values = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    call = Text.assemble("→ ", (plain_line(name), "bold yellow"), f"({plain_line(values)})", style="yellow")
    return Padding(call, (0, 0, 0, 2))


def _labelled(label: str, content: str, style: str) -> Padding:
    return Padding(Text.assemble((f"{label}: ", "dim"), (content, style)), (0, 0, 0, 2))


def _result(label: str, content: str) -> Padding:
    """A tool's result; what a search has matched is bold instead of between tags, which other texts keep."""
    text = _tool_result(content)
    parts = re.split(r"<b>(.*?)</b>", text, flags=re.DOTALL) if text.startswith("\n•") else [text]
    matches = [(part, "bold cyan" if number % 2 else "cyan") for number, part in enumerate(parts)]
    return Padding(Text.assemble((f"{label}: ", "dim"), *matches), (0, 0, 0, 2))


def _tool_result(content: str) -> str:
    """Format a JSON result so that an email body keeps its lines; anything else is shown unchanged."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if isinstance(value, list):
        return "".join(f"\n• {_flat(item)}" for item in value) or "[] (no results)"
    if isinstance(value, dict):
        return "".join(f"\n{plain_line(str(key))}: {_flat(item)}" for key, item in value.items())
    return content


def _flat(value: Any) -> str:
    if isinstance(value, dict | list):
        return "  ".join(map(str, value.values())) if isinstance(value, dict) else ", ".join(map(str, value))
    return "none" if value is None else str(value)


def _outcome(trajectory: Trajectory, note: TrainingNote | None, style: str) -> Panel:
    rows = {
        "Answer": "none given" if trajectory.final_answer is None else trajectory.final_answer,
        "Sources": _ids(trajectory.final_sources),
        "Stop reason": str(trajectory.stop_reason.value) if trajectory.stop_reason else "unknown",
    }
    if note and (advantages := note.token_advantages):
        mean = sum(advantages) / len(advantages)
        rows["Advantage"] = f"{mean:+.4f} on average, {min(advantages):+.4f} to {max(advantages):+.4f} by token"
    elif note and note.advantage is not None:
        rows["Advantage"] = f"{note.advantage:+.4f}"
    rows |= {"Not trained": note.dropped} if note and note.dropped else {}
    rows |= {"Exception": trajectory.exception} if trajectory.exception else {}
    terms = trajectory.reward_terms  # without zeros, most of which do not apply; the outcome is always kept
    telling = {name: value for name, value in terms.items() if value or name == "outcome"} or terms
    content = Group(_pairs(rows), _numbers("Reward terms", telling))
    return Panel(content, title="Outcome", title_align="left", box=box.ROUNDED, border_style=style)


def _ids(message_ids: Sequence[str]) -> str:
    return ", ".join(cut(message_id, LONGEST_ID) for message_id in message_ids) or "none"


def _pairs(rows: dict[str, str]) -> Table:
    table = Table.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _numbers(title: str, values: dict[str, Any]) -> RenderableType:
    if not values:
        return Text()
    columns = "", Column(justify="right")
    table = Table(*columns, title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    for name, value in values.items():
        shown = f"{value:+.4f}" if isinstance(value, float) else str(value)
        if value is not None:
            table.add_row(Text(plain_line(name).replace("_", " ")), Text(plain_line(shown)))
    return table


def _tokens(
    name: str, sample: TokenSample, tokens: TokenTexts | None, advantages: list[float | None], *, is_trained: bool
) -> Panel:
    """Every token of one sequence; those sampled with a probability below ``SURE`` are followed by it, ``⟨73%⟩``, and
    all sampled ones by their advantage if it differs per token (``⟨73% +0.50⟩``). Trained tokens stand out, or sampled
    ones without training."""
    total, what = len(sample.token_ids), "trained" if is_trained else "sampled"
    known = [logprob for logprob in sample.sampler_logprobs if logprob is not None]
    mask = sample.loss_mask if is_trained else [logprob is not None for logprob in sample.sampler_logprobs]
    facts = f"{sum(mask)} of {total} {what} ({sum(mask) / max(total, 1):.1%})"
    if known:
        sampled = f"{len(known)} sampled, " if is_trained else ""
        facts += f", {sampled}mean log-probability {sum(known) / len(known):.3f}, minimum {min(known):.3f}"
    facts += "" if tokens else "\ntoken ids only: no matching tokenizer found; name the model with --model"
    pieces = tokens.pieces(sample.token_ids) if tokens else [f"{token_id} " for token_id in sample.token_ids]
    text, shown = Text(overflow="fold"), advantages if len(advantages) == total else [None] * total
    for piece, marked, logprob, advantage in zip(pieces, mask, sample.sampler_logprobs, shown, strict=True):
        text.append(plain(piece).replace("\n", "⏎\n"), style=TRAINED if marked else CONTEXT)
        share = 1.0 if logprob is None else math.exp(logprob)
        told = [f"{100 * share:.2g}%"] * (share < SURE) + ([] if advantage is None else [f"{advantage:+.2f}"])
        if told:
            text.append(f"⟨{' '.join(told)}⟩", style="yellow dim" if share >= 0.1 else "red")
    meaning = f", ⟨probability of a sampled token below {SURE:.0%}" + (", its advantage⟩" if any(shown) else "⟩")
    legend = Text.assemble((what, TRAINED), ", ", ("context", CONTEXT), meaning)
    return Panel(Group(Text(facts, style="dim"), legend, Text(), text), title=name, title_align="left")


def trajectory_list(index: TrajectoryIndex, first: int, limit: int, width: int) -> RenderableType:
    """A table of ``limit`` trajectories from position ``first`` on, for a terminal of ``width`` columns."""
    names = [name for name in WIDTHS if width >= NARROW or name not in ("step", "tokens")]
    columns = [Column(name, justify="right", no_wrap=True, min_width=WIDTHS[name]) for name in names]
    columns[names.index("verdict")].justify = "left"
    table = Table(*columns, "question", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    shown = index.entries(first, first + limit)
    for position, entry in enumerate(shown, first):
        if entry.id is None:  # a line without a trajectory
            continue
        came_of_it = verdict(entry)
        cells = {
            "index": Text(str(position)),
            "step": Text(str(entry.step)),
            "reward": Text("-" if entry.reward is None else f"{entry.reward:.3f}"),
            "verdict": Text(came_of_it, style=STYLES.get(came_of_it, "")),
            "turns": Text(str(entry.turns)),
            "tokens": Text(str(entry.tokens)),
        }
        table.add_row(*map(cells.get, names), Text(plain_line(entry.question), no_wrap=True, overflow="ellipsis"))
    part = f"index {first} to {first + len(shown) - 1} of {counted(len(index), 'trajectory')}"
    part += "; choose others with --index and --limit" if len(shown) < len(index) else ""
    return Group(*(Text(plain_line(line), style="bold") for line in (near(str(index.path)), part)), table)
