"""Rewards by the user's own code: a Python function, or a server."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from typing import Any, Final

import httpx

from emailrl.base.credentials import redacted, secrets_in, split_credentials, without_credentials
from emailrl.base.custom import is_path, load_part
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.http import Client, Failed, pause_asked_for, retried, tell, wait_for
from emailrl.engines.dialects import said_in
from emailrl.records import trajectory_to_dict
from emailrl.records.trajectory import Message, Trajectory
from emailrl.rewards.rubric import BatchReward, Reward, Terms
from emailrl.settings import RewardSettings

logger = logging.getLogger(__name__)

_OPENRLHF = ["queries", "prompts", "labels"]


def load_reward(name: str) -> Reward | BatchReward:
    """The reward at a Python path; raises ``UsageError`` if it is missing or cannot be loaded. When called, it raises
    ``EmailRLError`` if the user's code raises or returns an invalid reward."""
    if not is_path(name):
        hint = (
            "Built-in rewards: art_e, simple, heuristic, ruler. Your own: module:attribute, path.py:attribute or a URL."
        )
        raise UsageError(f"Unknown reward: {name!r}.", hint)
    part = load_part(name, "reward")

    def reward(trajectory: Trajectory) -> dict[str, float]:
        return read_terms(part.run("The reward", part.call, trajectory), part.attribute, f"The reward {name}")

    def openrlhf(trajectories: Sequence[Trajectory]) -> Sequence[Terms]:
        """A function of OpenRLHF's signature is called once for all trajectories of a step."""
        body = request_body(trajectories)
        reply = part.run("The reward", part.call, *(body[name] for name in ("query", "prompts", "labels")))
        return read_reply(_plain(reply), trajectories, f"The reward {name}")

    with suppress(TypeError, ValueError):  # a callable written in C has no signature to read
        if [name for name in inspect.signature(part.call).parameters if name != "kwargs"] == _OPENRLHF:
            return BatchReward(openrlhf)
    return reward


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


VERSION: Final = 1
_TERM: Final = "remote"
MAX_REWARD: Final = 1e9  # Larger rewards are rejected: their squares, used for standard deviations, would overflow.


def request_body(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The request for these trajectories as JSON values; no token ids, they are the policy's own."""
    own = ("id", "group_id", "final_answer", "final_sources", "stop_reason", "rubric", "messages")
    scenarios = [trajectory.scenario for trajectory in trajectories]
    records = map(trajectory_to_dict, trajectories)
    return {
        "version": VERSION,
        "query": [_text(trajectory.messages) for trajectory in trajectories],
        "prompts": [_text(takewhile(lambda m: m.role != "assistant", each.messages)) for each in trajectories],
        "labels": [scenario.answer for scenario in scenarios],
        "trajectories": [
            {
                "question": scenario.question,
                "reference_answer": scenario.answer,
                "reference_sources": scenario.evidence,
                "inbox_address": scenario.inbox_address,
                "query_date": scenario.query_date,
                **{name: record[name] for name in own},
            }
            for scenario, record in zip(scenarios, records, strict=True)
        ],
    }


def _text(messages: Iterable[Message]) -> str:
    return "\n\n".join(f"{message.role}: {said(message)}" for message in messages)


def said(message: Message) -> str:
    """The content, with the calls of a chat server's message; sampled text holds its calls already."""
    is_said = "<tool_call>" in message.content or said_in(message, "hermes") is not None
    calls = [] if is_said else message.tool_calls
    spoken = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    return "\n".join(filter(None, [message.content, *spoken])) if spoken else message.content


def read_reply(
    reply: Any, trajectories: Sequence[Trajectory], scorer: str, tellable: Callable[[str], str] = str
) -> list[dict[str, float]]:
    """One dict of terms a trajectory; scores and extra logs are written into the rubrics. ``scorer`` names the sender
    in errors; ``tellable`` hides secrets. Raises EmailRLError unless there is one finite reward per trajectory, in
    order, under names without secrets: a partly valid reply is not used."""
    if not isinstance(reply, dict) or "rewards" not in reply:
        raise EmailRLError(f"{scorer} replied without rewards: {_shown(reply)}.", 'Reply {"rewards": [number, …]}.')
    if "ids" in reply and reply["ids"] != [trajectory.id for trajectory in trajectories]:
        raise EmailRLError(f"{scorer} replied with ids that differ from those sent, or in another order.")

    def column(values: Any, name: str, term: str) -> list[dict[str, float]]:
        if not isinstance(values, list) or len(values) != len(trajectories):
            found = f"{len(values)} {name}" if isinstance(values, list) else f"{name} that are not a list"
            raise EmailRLError(f"{scorer} replied with {found} for {len(trajectories)} trajectories.")
        return [read_terms(value, term, scorer) for value in values]

    terms = column(reply["rewards"], "rewards", _TERM)
    extras = {"score": reply["scores"]} if reply.get("scores") is not None else {}
    logs = reply.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise EmailRLError(f"{scorer} replied with extra_logs that are not an object: {_shown(logs)}.")
    names = " ".join(" ".join([*(name for each in terms for name in each), *map(str, logs)]).split())
    if tellable(names) != names:
        raise EmailRLError(f"{scorer} replied with too many names, or with secrets in them.", "Give short names.")
    columns = {name: column(values, name, name) for name, values in (extras | logs).items()}
    for number, trajectory in enumerate(trajectories):
        trajectory.rubric |= {f"remote_{name}": found[number][name] for name, found in columns.items()}
    return terms


def read_terms(value: Any, term: str, scorer: str) -> dict[str, float]:
    """A reward as named terms: a number becomes the one called ``term``; raises EmailRLError for anything else."""
    values = value if isinstance(value, dict) else {term: value}
    try:
        terms = {str(name): float(number) for name, number in values.items() if not isinstance(number, str)}
    except (TypeError, ValueError, OverflowError):
        terms = {}
    wrong = None
    if not terms or len(terms) != len(values):
        wrong = "Return a number, or a dict of numbers."
    elif not all(math.isfinite(number) for number in terms.values()):
        wrong = "Rewards must be finite."
    elif any(abs(number) > MAX_REWARD for number in (*terms.values(), sum(terms.values()))):
        wrong = f"Rewards must lie within ±{MAX_REWARD:g}."
    if wrong:
        raise EmailRLError(f"{scorer} returned {_shown(value)}.", wrong)
    return terms


def _shown(value: Any) -> str:
    """Whole: it is cut where secrets are taken out of it, for half of one would not be found."""
    return " ".join(repr(value).split())


class _Client(Client):
    max_bytes = 64 << 20  # Maximum size of a scorer's reply.


def http_reward(url: str, settings: RewardSettings, *, concurrency: int) -> BatchReward:
    """Posts trajectories to ``url``, ``REWARD_BATCH_SIZE`` in one request and at most ``concurrency`` requests at once.
    A batch is retried after 1, 2, 4, … seconds if the server is down, busy or failing, ``REWARD_RETRIES`` times; a
    final failure, or an invalid reply, is an error of that batch's trajectories."""
    try:
        problem = "" if httpx.URL(url).host else "has no host"
    except httpx.InvalidURL as error:
        problem = f"is invalid: {error}"
    if problem:
        raise UsageError(f"The reward's URL {problem}.", "Expected http://host:port/path.")
    key = settings.reward_api_key.get_secret_value() if settings.reward_api_key else ""
    address, credentials = split_credentials(url)  # httpx logs request URLs
    tell(url, "reward", with_key=bool(key or credentials))
    scorer = f"The scorer {without_credentials(url)}"
    bearer = {"Authorization": f"Bearer {key}"} if key and credentials is None else {}
    headers = {"Content-Type": "application/json"} | bearer
    client = _Client(auth=credentials, headers=headers, timeout=settings.reward_timeout)

    def tellable(text: str) -> str:
        return redacted(text, key, *secrets_in(url), limit=10_000)

    def score(batch: Sequence[Trajectory]) -> Sequence[Terms]:
        content = json.dumps(request_body(batch)).encode()  # ASCII only: email text may not be encodable

        async def attempt() -> httpx.Response:
            try:
                response = await client.post(address, content=content)
            except httpx.HTTPError as error:
                raise Failed(f"{type(error).__name__}: {error}") from error
            if not response.is_success:
                why = f"HTTP {response.status_code}: {response.text}"
                raise Failed(why, response.status_code, pause_asked_for(response.headers))
            return response

        try:
            reply = wait_for(retried(attempt, settings.reward_retries))
            if isinstance(reply, Failed):
                why = f"{scorer} returned no rewards: {reply.why.rstrip('.')}."
                raise EmailRLError(why, "Check the server and its URL.")
            try:
                value = reply.json()
            except (ValueError, RecursionError):  # nested too deep to be read
                raise EmailRLError(f"{scorer} replied with invalid JSON: {reply.text!r}") from None
            return read_reply(value, batch, scorer, tellable)
        except EmailRLError as error:
            masked = EmailRLError(tellable(error.message)[:500], error.hint)
            logger.warning("%d trajectories got no reward: %s", len(batch), masked)
            return [masked] * len(batch)

    def score_all(trajectories: Sequence[Trajectory]) -> list[Terms]:
        size = settings.reward_batch_size
        batches = [trajectories[start : start + size] for start in range(0, len(trajectories), size)]
        with ThreadPoolExecutor(max(1, min(concurrency, len(batches))), thread_name_prefix="reward") as pool:
            return [terms for scored in pool.map(score, batches) for terms in scored]

    return BatchReward(score_all)
