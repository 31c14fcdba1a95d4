"""Questions, trajectories and tokens of a step and a run: from settings, from the caller, or measured in a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from emailrl.base.errors import UsageError
from emailrl.checkpoints import list_checkpoints
from emailrl.engines import budget
from emailrl.model.resolve import NANO, same_base
from emailrl.model.shape import Shape
from emailrl.plan.devices import Cluster
from emailrl.questions import read_questions
from emailrl.questions.beside import questions_file
from emailrl.records import read_records
from emailrl.settings import Settings
from emailrl.settings.names import changed
from emailrl.training.algorithms import count_steps, num_epochs, questions_per_step

PROMPT: Final = 900
"""Tokens of system prompt, tool schemas and question."""
TOOL_RESULT: Final = 1700
"""Tokens of the longest tool result: an email of 5,000 characters with its headers."""
TYPICAL: Final = {"simple": (1000, 0.3), "rollout": (3800, 0.8), "masked": (3800, 0.25)}
"""Tokens per trajectory and their trained share, by mode, as in `tests/gpu/bench_train_step.py`."""
TYPICAL_OF_NANO: Final = {"simple": (350, 0.05), "rollout": (290, 0.8), "masked": (290, 0.14)}
"""The same for the packaged policy, measured on the demo mailbox, for which its tokenizer was made."""
LONGEST: Final = 1.4
"""Ratio of a step's longest trajectory to the mean: 5,406 to 3,763 tokens in that benchmark."""

_NEEDED: Final = {"total_tokens", "trainable_tokens", "num_trajectories", "groups_kept", "dropped", "seconds"}


@dataclass(frozen=True, slots=True)
class Measured:
    """Averages over the steps in a run's ``metrics.jsonl``."""

    per_trajectory: int
    trainable_share: float
    seconds: dict[str, float]
    """Of a step, by phase, and ``total``."""
    steps: int
    evaluation: float | None = None
    """Seconds of an evaluation; None if no step had one."""
    base_model: str | None = None
    """From the run's checkpoints; None if it has none."""

    def is_of(self, model: str) -> bool:
        """Whether the run may have used this model: no checkpoint names another."""
        return self.base_model is None or same_base(self.base_model, model)

    def remarks_on(self, model: str) -> list[str]:
        """Notes about the run for a plan of ``model``."""
        if self.base_model is None:
            return [f"no checkpoint of the run names its model: assuming {model}"]
        if self.is_of(model):
            return []
        return [f"the run used {self.base_model}, not {model}: its token counts apply, its times do not"]


@dataclass(frozen=True, slots=True)
class Known:
    """What the caller knows of a run beyond its settings."""

    per_trajectory: int | None = None
    trainable_share: float | None = None
    measured: Measured | None = None
    """Averages of a similar run."""
    utilization: float | None = None
    """Share of a GPU's FLOP/s that training reaches."""
    confirmed: float = 0.0
    """As in ``Tokens``."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Trajectories and tokens of a step, and steps of a run."""

    per_trajectory: int
    """Prompt, completions and tool results of one trajectory."""
    longest: int
    """The longest trajectory of a step: ``LONGEST`` times the mean."""
    most_per_trajectory: int
    """MAX_TURNS completions of MAX_TOKENS with the longest emails, or the context window."""
    trainable_share: float
    trajectories: int
    """Of one step."""
    eval_trajectories: int
    steps: int
    epochs: float
    """Passes over the training questions."""
    questions: int
    """Training questions."""
    evaluations: int
    source: str
    """Where ``per_trajectory`` comes from: typical, given, or the run's folder."""
    confirmed: float = 0.0
    """Size of the last measurement of best_model, on other questions, relative to an evaluation."""

    @property
    def per_step(self) -> int:
        """Tokens that a step trains or reads."""
        return self.per_trajectory * self.trajectories

    @property
    def at_once(self) -> int:
        """Maximum number of trajectories sampled together."""
        return max(self.trajectories, self.eval_trajectories)

    def at_worst(self) -> Tokens:
        """The same with one trajectory as long as the settings allow."""
        return replace(self, longest=self.most_per_trajectory)


@dataclass(frozen=True, slots=True)
class Job:
    """A run to estimate: a model, its settings, the GPUs it gets, and what else is known of it."""

    shape: Shape
    settings: Settings
    cluster: Cluster
    known: Known = field(default_factory=Known)

    def with_settings(self, **values: object) -> Job:
        """The same with other values of settings, by field name."""
        return replace(self, settings=changed(self.settings, **values))

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on GPUs."""
        return self.cluster.device.is_gpu

    @property
    def window(self) -> int:
        """Tokens of the context window."""
        return min(self.settings.model.max_model_len or self.shape.context, self.shape.context)

    @property
    def adapter(self) -> int:
        """Parameters of the adapter."""
        return self.shape.lora_parameters(self.settings.lora.lora_rank, self.settings.lora.target_modules)

    @property
    def samples_in_process(self) -> bool:
        """Whether transformers samples in the trainer's process."""
        return self.settings.agent.engine in ("auto", "transformers")

    @property
    def samples_merged(self) -> bool:
        """Whether the in-process engine samples from its own merged weights."""
        return budget.merges(self.shape.parameters, quantized=self.settings.model.load_in_4bit)

    @property
    def has_one_turn(self) -> bool:
        """Whether a trajectory is a prompt and one completion."""
        return self.settings.training.mode == "simple" or self.settings.agent.max_turns == 1

    def weights(self, itemsize: int = 2) -> int:
        """Bytes of the base."""
        return self.shape.weight_bytes(itemsize, four_bit=self.settings.model.load_in_4bit)

    def tokens(self, ranks: int = 1) -> Tokens:
        """Tokens of a step over all ``ranks``: given, measured, or typical of the mode, within the settings' limits."""
        settings, known = self.settings, self.known
        agent, training = settings.agent, settings.training
        turns = 1 if training.mode == "simple" else agent.max_turns
        most = min(PROMPT + turns * agent.max_tokens + (turns - 1) * TOOL_RESULT, self.window)
        mean, share = (TYPICAL_OF_NANO if settings.model.name == NANO else TYPICAL)[training.mode]
        mean, source = min(mean, most), "typical"
        if known.measured is not None:
            mean, share, source = known.measured.per_trajectory, known.measured.trainable_share, "measured"
        if known.per_trajectory is not None:
            mean, source = known.per_trajectory, "given"
            if mean > self.window:
                raise UsageError(
                    f"A trajectory of {mean} tokens is longer than the model's context of {self.window}.",
                    "Lower --tokens-per-trajectory, or raise MAX_MODEL_LEN.",
                )
        most = max(most, mean)
        per_step, questions = questions_per_step(training, ranks), settings.data.train_dataset_size
        epochs = None if training.mode == "masked" else training.num_train_epochs
        steps = count_steps(questions, per_step, training.max_steps, epochs)
        return Tokens(
            per_trajectory=mean,
            longest=min(round(LONGEST * mean), most),
            most_per_trajectory=most,
            trainable_share=share if known.trainable_share is None else known.trainable_share,
            trajectories=per_step * training.num_generations,
            eval_trajectories=settings.data.eval_dataset_size * settings.evaluation.eval_samples,
            steps=steps,
            epochs=num_epochs(steps, per_step, questions),
            questions=questions,
            evaluations=1 + math.ceil(steps / settings.evaluation.eval_steps),
            source=source,
            confirmed=known.confirmed,
        )


def limit_to_questions(settings: Settings) -> tuple[Settings, float, list[str]]:
    """Lower the numbers of training and validation questions to those in the question file.

    The second value is the number of other validation questions, on which the best model is measured again, relative to
    those of an evaluation. Without a local file there are enough of all, and the third value is a note that says so.
    Raises UsageError for a file that training would refuse.
    """
    data = settings.data
    file = data.questions or questions_file(settings.store.db)
    if not file.exists():
        return settings, 1.0, [f"no question file at {file}: assuming {data.train_dataset_size:,} training questions"]
    found, seed = read_questions(file, data), settings.training.seed
    num_train, num_val = (len(found.of(split, limit=None, seed=seed).scenarios) for split in ("train", "val"))
    evaluated = min(num_val, data.eval_dataset_size)
    limited = changed(settings, train_dataset_size=min(num_train, data.train_dataset_size), eval_dataset_size=evaluated)
    return limited, min(num_val / max(evaluated, 1) - 1, 1.0), []


def measure_run(run: Path) -> Measured:
    """Averages over a run's steps with an update; UsageError if the folder has none."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise UsageError(f"{run} has no metrics.jsonl.", "Name a run's folder, such as outputs/grpo_masked.")
    trained = [record for record in read_records(metrics) if record.keys() >= _NEEDED and record["total_tokens"]]
    if not trained:
        raise UsageError(f"{metrics} has no step with an update.", "Name a run with at least one update.")
    tokens = sum(record["total_tokens"] for record in trained)
    trajectories = sum(_kept_trajectories(record) for record in trained)
    phases = sorted({phase for record in trained for phase in record["seconds"]})
    evaluations = [record["seconds"]["evaluation"] for record in trained if "eval_accuracy" in record]
    return Measured(
        per_trajectory=max(round(tokens / trajectories), 1),
        trainable_share=sum(record["trainable_tokens"] for record in trained) / tokens,
        seconds={phase: sum(one["seconds"].get(phase, 0.0) for one in trained) / len(trained) for phase in phases},
        steps=len(trained),
        evaluation=sum(evaluations) / len(evaluations) if evaluations else None,
        base_model=next((one.metadata.base_model for one in reversed(list_checkpoints(run))), None),
    )


def base_of(settings: Settings, measured: Measured) -> Settings:
    """The settings with the measured run's model, if none was named and its checkpoints name one."""
    if "name" in settings.model.model_fields_set or measured.base_model is None:
        return settings
    return changed(settings, model_name=measured.base_model)


def _kept_trajectories(record: Mapping[str, Any]) -> float:
    """Trajectories of kept groups; ``total_tokens`` excludes dropped groups."""
    kept = record["groups_kept"]
    dropped = sum(count for name, count in record["dropped"].items() if name.startswith("groups_"))
    return record["num_trajectories"] * kept / (kept + dropped)
