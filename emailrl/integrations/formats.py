"""Trajectories in the formats of other viewers and trainers: Inspect's log, ATIF documents, Hugging Face's session
traces (STS), and chat messages in OpenAI's form. Each tells the same conversation; tokens and log-probabilities go into
ATIF. ``records.foreign`` reads the last and ATIF back."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, Final, NamedTuple

import emailrl
from emailrl.agent.tools import tool_schemas, tools_of
from emailrl.engines.dialects import DIALECTS, before_calls, said_in
from emailrl.records import Record, encode
from emailrl.records.trajectory import Message, Trajectory, scenario_fields
from emailrl.settings import AgentSettings

HERMES: Final = "hermes"
AGENT: Final = "emailrl"


def redacted(trajectory: Trajectory, replaced: Callable[[Any], Any]) -> Trajectory:
    """The trajectory with its texts ``replaced``, and without its tokens, which anyone with the tokenizer can read."""
    texts = [*("id", "group_id", "final_answer", "final_sources", "exception", "content", "parse_error", "arguments")]
    texts += ["question", "answer", "message_ids", "inbox_address", "twins"]

    def told(part: Any, **parts: Any) -> Any:
        held = {each.name: replaced(getattr(part, each.name)) for each in fields(part) if each.name in texts}
        return replace(part, **held | parts)

    bare: dict[str, Any] = {"completion_ids": [], "logprobs": [], "tool_args": None, "tool_result": None}
    turns = [replace(turn, **bare) for turn in trajectory.turns]  # what the calls and results were is in messages
    said = [told(each, tool_calls=[*map(told, each.tool_calls)]) for each in trajectory.messages]
    return told(trajectory, scenario=told(trajectory.scenario), messages=said, turns=turns, samples=[])


def chat(trajectory: Trajectory) -> list[Record]:
    """The conversation as chat messages; thoughts are ``reasoning_content``. Of several calls only the first was
    played, so only that one is there."""
    messages, tools = list[Record](), tool_schemas(AgentSettings(read_threads=True))
    for said in trajectory.messages:
        if said.role == "tool":
            last = messages[-1]["tool_calls"][0] if messages and messages[-1].get("tool_calls") else None
            link = {"tool_call_id": last["id"]} if last else {}
            messages.append({"role": "tool", "content": said.content, **link})
            continue
        message: Record = {"role": said.role, "content": said.content}
        if said.role == "assistant":
            message |= _spoken(said, tools, f"call_{len(messages)}")
        messages.append(message)
    return messages


def _spoken(said: Message, tools: list[Record], name: str) -> Record:
    dialect = said_in(said, HERMES, tools)
    thought, text = DIALECTS[dialect or HERMES].split(said.content)
    spoken: Record = {"content": before_calls(text, dialect) if dialect else text}
    if thought and thought.strip():
        spoken |= {"reasoning_content": thought.strip(), "content": spoken["content"].lstrip()}
    for call in said.tool_calls[:1]:
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        spoken["tool_calls"] = [{"id": call.id or name, "type": "function", "function": function}]
    return spoken


def _told(trajectory: Trajectory) -> Record:
    """What a trajectory says beside its conversation."""
    names = ("id", "group_id", "run_id", "step", "reward", "reward_terms", "rubric", "stop_reason", "exception")
    told = {name: getattr(trajectory, name) for name in names}
    return told | {"scenario": scenario_fields(trajectory.scenario)}


def _tools(trajectory: Trajectory) -> list[Record]:
    """The function schemas, if the trajectory's tools are ours."""
    used = {call.name for said in trajectory.messages for call in said.tool_calls if said.parse_error is None}
    agent = AgentSettings(read_threads="read_thread" in used)
    return tool_schemas(agent) if used.issubset(tools_of(agent)) else []


def openai(trajectories: Sequence[Trajectory], note: str) -> dict[str, bytes]:
    """One conversation a line: ``messages`` and ``tools``, and the rest as ``metadata``."""
    lines = [
        encode(
            {"messages": chat(each), "tools": _tools(each), "metadata": _told(each) | ({"note": note} if note else {})}
        )
        for each in trajectories
    ]
    return {"": b"".join(lines)}


def sts(trajectories: Sequence[Trajectory], note: str) -> dict[str, bytes]:
    """A session a file: its header, then a message a line."""
    files = {}
    for number, each in enumerate(trajectories):
        header = {"type": "session", "harness": AGENT, "id": each.id, "name": each.scenario.question} | _told(each)
        header |= {"note": note} if note else {}
        lines = [encode(header)]
        for said in chat(each):
            camel = {"reasoning_content": "reasoningContent", "tool_calls": "toolCalls", "tool_call_id": "toolCallId"}
            lines.append(encode({"type": "message", "message": {camel.get(key, key): said[key] for key in said}}))
        files[f"{number:06d}.jsonl"] = b"".join(lines)
    return files


def atif(trajectories: Sequence[Trajectory], note: str) -> dict[str, bytes]:
    """A document a file."""
    return {f"{number:06d}.json": encode(_document(each, note)) for number, each in enumerate(trajectories)}


def _document(trajectory: Trajectory, note: str) -> Record:
    steps, turns = list[Record](), iter(trajectory.turns)
    for said in chat(trajectory):
        if said["role"] == "tool":
            result = {"source_call_id": said.get("tool_call_id"), "content": said["content"]}
            steps[-1]["observation"] = {"results": [result]}
            continue
        is_agent = said["role"] == "assistant"
        step: Record = {"step_id": len(steps) + 1, "source": "agent" if is_agent else said["role"]}
        step["message"] = said["content"]
        if is_agent:
            step |= {"reasoning_content": said["reasoning_content"]} if "reasoning_content" in said else {}
            for call in said.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                called = {"tool_call_id": call["id"], "function_name": call["function"]["name"], "arguments": arguments}
                step["tool_calls"] = [called]
            if (turn := next(turns, None)) is not None:
                metrics: Record = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens}
                if turn.completion_ids:
                    metrics["completion_token_ids"] = turn.completion_ids
                if turn.logprobs and None not in turn.logprobs:
                    metrics["logprobs"] = turn.logprobs
                step["metrics"] = metrics | ({} if turn.cost is None else {"cost_usd": turn.cost})
        steps.append(step)
    agent: Record = {"name": AGENT, "version": emailrl.__version__, "tool_definitions": _tools(trajectory)}
    agent |= {"model_name": trajectory.policy_version} if trajectory.policy_version else {}
    counts = {f"total_{name}": int(trajectory.rubric.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
    document = {"schema_version": "ATIF-v1.8", "trajectory_id": trajectory.id, "agent": agent, "steps": steps}
    document |= {"final_metrics": counts | {"total_steps": len(steps)}, "extra": _told(trajectory)}
    return document | ({"notes": note} if note else {})


def inspect(trajectories: Sequence[Trajectory], note: str) -> dict[str, bytes]:
    """Inspect's log, an archive of a JSON file a sample; a question's rollouts are its epochs."""
    samples, times = list[Record](), Counter[str]()
    for each in trajectories:
        times[each.scenario.id] += 1
        samples.append(_sample(each, times[each.scenario.id]))
    digest = hashlib.sha256(encode({"samples": samples})).hexdigest()[:22]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    models = Counter(each.policy_version or AGENT for each in trajectories)
    ids = list(dict.fromkeys(sample["id"] for sample in samples))
    spec = {
        "eval_id": digest, "run_id": digest, "task_id": digest, "created": now, "task": "mail_search",
        "dataset": {"name": "mail_search", "samples": len(ids), "sample_ids": ids, "shuffled": False},
        "model": next(iter(models), AGENT), "config": {"epochs": max(times.values(), default=1)},
        "packages": {AGENT: emailrl.__version__}, "metadata": {"note": note} if note else {},
    }  # fmt: skip
    scores = []
    for name in ("accuracy", "reward"):
        values = [sample["scores"]["reward"]["value"][name] for sample in samples if sample["scores"]]
        values = [value for value in values if value is not None]
        mean = {"mean": {"name": "mean", "value": fmean(values), "params": {}}} if values else {}
        scores.append({"name": name, "scorer": "reward", "scored_samples": len(values), "params": {}, "metrics": mean})
    done = {"total_samples": len(samples), "completed_samples": sum(sample["error"] is None for sample in samples)}
    start = {"version": 2, "eval": spec, "plan": {}}
    stats = {"started_at": now, "completed_at": now}
    header = start | {"status": "success", "results": done | {"scores": scores}, "stats": stats}
    shown = ("id", "epoch", "input", "target", "metadata", "scores", "model_usage", "total_time")
    summaries = [
        {name: sample[name] for name in shown}
        | {"error": sample["error"] and sample["error"]["message"], "message_count": len(sample["messages"])}
        for sample in samples
    ]
    files: dict[str, Any] = {"_journal/start.json": start, "header.json": header, "summaries.json": summaries}
    # Its reader asks for a sample by these names, whatever its id holds.
    files |= {f"samples/{sample['id']}_epoch_{sample['epoch']}.json": sample for sample in samples}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
        for name, value in files.items():
            written.writestr(name, encode(value))
    return {"": archive.getvalue()}


def _sample(trajectory: Trajectory, epoch: int) -> Record:
    messages, told = chat(trajectory), _told(trajectory)
    for number, said in enumerate(messages):
        said["id"] = f"{trajectory.id}-{number}"
        if (thought := said.pop("reasoning_content", None)) is not None:
            parts = [{"type": "reasoning", "reasoning": thought}, {"type": "text", "text": said["content"]}]
            said["content"] = parts
        if calls := said.get("tool_calls"):
            said["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": call["function"]["name"],
                 "arguments": json.loads(call["function"]["arguments"])} for call in calls
            ]  # fmt: skip
    score, rubric = None, trajectory.rubric
    if trajectory.exception is None:
        correct = rubric.get("answer_correct")
        value = {"accuracy": None if correct is None else float(correct), "reward": trajectory.reward}
        explained = {name: told[name] for name in ("reward_terms", "rubric", "stop_reason")}
        score = {"reward": {"value": value, "answer": trajectory.final_answer, "metadata": explained}}
    asked, said_back = (int(rubric.get(f"{name}_tokens") or 0) for name in ("prompt", "completion"))
    usage = {"input_tokens": asked, "output_tokens": said_back, "total_tokens": asked + said_back}
    failed = trajectory.exception and {"message": trajectory.exception, "traceback": "", "traceback_ansi": ""}
    begun = next((number for number, said in enumerate(messages) if said["role"] == "assistant"), len(messages))
    return {
        "id": trajectory.scenario.id, "epoch": epoch, "input": messages[:begun], "target": trajectory.scenario.answer,
        "messages": messages, "scores": score or {}, "error": failed or None, "total_time": trajectory.seconds,
        "model_usage": {trajectory.policy_version or AGENT: usage},
        "metadata": told["scenario"] | {"trajectory": trajectory.id, "run_id": trajectory.run_id},
    }  # fmt: skip


class Format(NamedTuple):
    write: Callable[[Sequence[Trajectory], str], dict[str, bytes]]
    """The contents by file name, of trajectories and a note for each."""
    suffix: str  # of the default name
    is_file: bool = False
    """Whether it is one file, whose name is then empty, and not a folder."""


FORMATS: Final = {
    "inspect": Format(inspect, ".eval", True),
    "atif": Format(atif, "-atif"),
    "sts": Format(sts, "-sts"),
    "openai": Format(openai, "-openai.jsonl", True),
}


def is_demo(trajectories: Iterable[Trajectory]) -> bool:
    """Whether all are on demo mail, whose people do not exist: no mail program writes such ids and addresses."""
    return all(
        each.scenario.inbox_address.endswith(".example")
        and all(re.fullmatch("<[0-9]{6}>", source) for source in each.scenario.evidence)
        for each in trajectories
    )
