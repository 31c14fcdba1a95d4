"""The shared dataclasses: scenario, message, turn, trajectory and group.

A trajectory is one rollout of one scenario. Its tokens are authoritative: ``samples`` hold the ids exactly as the
policy sampled them, with the mask recorded at that time; ``messages`` are for people and chat servers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"
    RAN_OUT_OF_TURNS = "ran_out_of_turns"
    CANT_PARSE_TOOL_CALL = "cant_parse_tool_call"
    BAD_TOOL_CALL_NAME = "bad_tool_call_name"
    BAD_TOOL_CALL_ARGS = "bad_tool_call_args"
    TRUNCATED = "truncated"
    """The completion hit the token limit, or the prompt no longer fits the context window."""
    COMPLETED = "completed"
    """A single completion on a static prompt (mode ``simple``) reached its end."""
    EXCEPTION = "exception"


@dataclass(slots=True)
class Scenario:
    """One question about one mailbox, with its answer and the ids of the source emails (ART-E's fields)."""

    id: str
    question: str
    answer: str
    message_ids: list[str]
    inbox_address: str
    query_date: str
    """``YYYY-MM-DD``, UTC; the agent sees no email from that day or later."""
    how_realistic: float = 1.0
    split: str | None = None
    kind: str | None = None
    """The template that produced the question; None for other questions."""
    answerable: bool = True
    """False if the mailbox does not contain the answer: ``message_ids`` is then empty, and "I don't know" is right."""
    needs_all: bool = False
    """Whether the answer takes all source emails; otherwise each of them contains it."""
    shares_inbox: bool = False
    """Whether the splits of its question file share inboxes, as allowed when the file was generated."""


_UNUSUAL = {"answerable": False, "needs_all": True, "shares_inbox": True}


def scenario_fields(scenario: Scenario) -> dict[str, Any]:
    """Return a question's fields by name for files and fingerprints.

    ``answerable``, ``needs_all`` and ``shares_inbox`` are included only if they differ from their defaults.
    """
    usual = [name for name, unusual in _UNUSUAL.items() if getattr(scenario, name) is not unusual]
    return {name: value for name, value in asdict(scenario).items() if name not in usual}


@dataclass(slots=True)
class ToolCall:
    """One call as the model requested it: a tool's name and its unchecked arguments."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


@dataclass(slots=True)
class Message:
    """One chat message.

    In an assistant turn from a token engine, ``content`` is the raw sampled text including tool-call markup, and
    ``tool_calls`` is what was parsed from it.
    """

    role: str
    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None
    """The tool's name in messages with ``role="tool"``."""
    parse_error: str | None = None
    """Set if the text contains tool-call markup that cannot be parsed."""


@dataclass(slots=True)
class Turn:
    """One completion and the environment's response to it."""

    completion_ids: list[int]
    """Sampled ids, including the sampled stop token; empty for engines that return only text."""
    logprobs: list[float]
    finish_reason: str
    """``stop`` or ``length``, as reported by the engine."""
    tool_name: str | None = None
    tool_args: dict[str, Any] | None = None
    tool_result: str | None = None
    seconds: float = 0.0
    tool_seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Number of sampled tokens; counted by the server if it returns only text."""
    cost: float | None = None
    """US dollars; None for engines without a price."""
    policy_version: str = ""
    adapter_sha256: str | None = None
    """The weights that sampled this span: policy version, and hash of the adapter (None: the bare base model)."""


@dataclass(slots=True)
class TokenSample:
    """One training sequence: three lists of equal length.

    ``loss_mask`` is 1 where the policy sampled the id; elsewhere ``sampler_logprobs`` is None. A trajectory has one
    sample, or several if its chat template does not extend the tokens so far.
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    sampler_logprobs: list[float | None] = field(default_factory=list)

    def append_prompt(self, ids: list[int]) -> None:
        """Add ids that the policy was shown."""
        self.token_ids += ids
        self.loss_mask += [0] * len(ids)
        self.sampler_logprobs += [None] * len(ids)

    def append_sampled(self, ids: list[int], logprobs: list[float]) -> None:
        """Add ids that the policy sampled, with their log-probabilities."""
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled ids but {len(logprobs)} log-probabilities")
        self.token_ids += ids
        self.loss_mask += [1] * len(ids)
        self.sampler_logprobs += logprobs


@dataclass(slots=True)
class Trajectory:
    """One rollout of one scenario, from the first prompt to the reward."""

    id: str
    group_id: str
    scenario: Scenario
    run_id: str = ""
    step: int = 0
    mode: str = "masked"
    policy_version: str = ""
    adapter_sha256: str | None = None
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    samples: list[TokenSample] = field(default_factory=list)
    reward: float = 0.0
    reward_terms: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward, which sum to ``reward``."""
    rubric: dict[str, Any] = field(default_factory=dict)
    """ART-E's rubric fields (``environment.rubric.Rubric`` as a dict)."""
    final_answer: str | None = None
    final_sources: list[str] = field(default_factory=list)
    stop_reason: StopReason | None = None
    seconds: float = 0.0
    exception: str | None = None
    """``Type: message`` if the rollout itself raised (engine, database, judge); it is then never trained."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all samples; for engines that return only text, the server's count in the rubric."""
        if self.samples:
            return sum(len(sample.token_ids) for sample in self.samples)
        return sum(int(self.rubric.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))


@dataclass(slots=True)
class TrajectoryGroup:
    """The rollouts of one scenario under one policy version; advantages compare them with each other."""

    id: str
    scenario: Scenario
    trajectories: list[Trajectory]
