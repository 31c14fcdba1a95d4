"""Questions, trajectories and tokens of a step and a run: from settings, from the caller, or measured in a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from emailrl.base.errors import UsageError
from emailrl.checkpoints import list_checkpoints
from emailrl.engines import budget
from emailrl.model.resolve import NANO, same_base
from emailrl.model.shape import Shape
from emailrl.plan.devices import Cluster
from emailrl.questions.load import questions_file, read_questions
from emailrl.records import read_records
from emailrl.settings import Settings
from emailrl.settings.names import changed
from emailrl.training.algorithms import count_steps, needs_old_logprobs, num_epochs, questions_per_step, resolve

PROMPT: Final = 900  # Tokens of system prompt, tool schemas and question.
TOOL_RESULT: Final = 1700  # Tokens of the longest tool result: an email of 5,000 characters with its headers.
TYPICAL: Final = {"simple": (1000, 0.3), "rollout": (3800, 0.8), "masked": (3800, 0.25)}
"""Tokens per trajectory and their trained share, by mode, as in `tests/gpu/bench_train_step.py`."""
TYPICAL_OF_NANO: Final = {"simple": (350, 0.05), "rollout": (290, 0.8), "masked": (290, 0.14)}
"""The same for the packaged policy, measured on the demo mailbox, for which its tokenizer was made."""
LONGEST: Final = 1.4  # Ratio of a step's longest trajectory to the mean: 5,406 to 3,763 tokens in that benchmark.

_NEEDED: Final = {"total_tokens", "trainable_tokens", "num_trajectories", "groups_kept", "dropped", "seconds"}


@dataclass(frozen=True, slots=True)
class Measured:
    """Averages over the steps in a run's ``metrics.jsonl``."""

    per_trajectory: int
    trainable_share: float
    seconds: dict[str, float]  # Of a step, by phase, and `total`.
    evaluation: float | None = None  # Seconds of an evaluation; None if no step had one.
    base_model: str | None = None  # From the run's checkpoints; None if it has none.

    def differs_from(self, model: str) -> bool:
        return self.base_model is not None and not same_base(self.base_model, model)


@dataclass(frozen=True, slots=True)
class Known:
    """What the caller knows of a run beyond its settings."""

    per_trajectory: int | None = None
    trainable_share: float | None = None
    measured: Measured | None = None  # Averages of a similar run.
    confirmed: float = 0.0  # As in `Tokens`.


@dataclass(frozen=True, slots=True)
class Tokens:
    """Trajectories and tokens of a step, and steps of a run."""

    per_trajectory: int  # Prompt, completions and tool results of one trajectory.
    longest: int  # The longest trajectory of a step: `LONGEST` times the mean.
    most_per_trajectory: int  # MAX_TURNS turns of the most tokens with the longest emails, or the context window.
    trainable_share: float
    trajectories: int  # Of one step.
    eval_trajectories: int
    steps: int
    epochs: float  # Passes over the training questions.
    questions: int  # Training questions.
    evaluations: int
    source: str  # Where `per_trajectory` comes from: typical, given, or the run's folder.
    confirmed: float = 0.0  # Size of the last measurement of best_model, on other questions, relative to an evaluation.

    @property
    def per_step(self) -> int:
        return self.per_trajectory * self.trajectories


@dataclass(frozen=True, slots=True)
class Job:
    """A run to estimate: a model, its settings, the GPUs it gets, and what else is known of it."""

    shape: Shape
    settings: Settings
    cluster: Cluster
    known: Known = field(default_factory=Known)

    def with_settings(self, **values: object) -> Job:
        return replace(self, settings=changed(self.settings, **values))

    @property
    def on_gpu(self) -> bool:
        return self.cluster.device.is_gpu

    @property
    def window(self) -> int:
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
        return self.settings.training.mode == "simple" or self.settings.agent.max_turns == 1

    @property
    def scoring_passes(self) -> int:
        """Passes without gradients before the first update of a step."""
        beta, updates = self.settings.algorithm.beta, self.settings.training.updates_per_step
        algorithm = resolve(self.settings)
        return (beta > 0) + algorithm.has_teacher + needs_old_logprobs(algorithm, kl_coef=beta, updates=updates)

    def weights(self, itemsize: int = 2) -> int:
        """Bytes of the base."""
        return self.shape.weight_bytes(itemsize, four_bit=self.settings.model.load_in_4bit)

    def tokens(self, ranks: int = 1) -> Tokens:
        """Tokens of a step over all ``ranks``: given, measured, or typical of the mode, within the settings' limits."""
        settings, known, measured = self.settings, self.known, self.known.measured
        agent, training = settings.agent, settings.training
        turns = 1 if training.mode == "simple" else agent.max_turns
        most = min(PROMPT + turns * agent.turn_tokens + (turns - 1) * TOOL_RESULT, self.window)
        mean, share = (TYPICAL_OF_NANO if settings.model.name == NANO else TYPICAL)[training.mode]
        mean, source = min(mean, most), "typical"
        if measured is not None:
            mean, share, source = measured.per_trajectory, measured.trainable_share, "measured"
        if known.per_trajectory is not None:
            mean, source = known.per_trajectory, "given"
            if mean > self.window:
                what = f"A trajectory of {mean} tokens is longer than the model's context of {self.window}."
                raise UsageError(what, "Lower --tokens-per-trajectory, or raise MAX_MODEL_LEN.")
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
    """Lower the numbers of training and validation questions to those in the question file. The second value is the
    number of other validation questions, on which the best model is measured again, relative to those of an evaluation.
    Without a local file there are enough of all, and the third value is a note that says so. Raises UsageError for a
    file that training would refuse."""
    data = settings.data
    file = data.questions or questions_file(settings.store.db)
    if not file.exists():
        return settings, 1.0, [f"no question file at {file}: assuming {data.train_dataset_size:,} training questions"]
    unanswered, seed = settings.rewards.compares or resolve(settings).has_teacher, settings.training.seed
    found = read_questions(file, data, unanswered=unanswered)
    num_train = len(found.of("train", limit=None, seed=seed).scenarios)
    num_val = sum(bool(each.answer) for each in found.of("val", limit=None, seed=seed).scenarios)
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
    tokens, trajectories = sum(record["total_tokens"] for record in trained), 0.0
    for record in trained:  # ``total_tokens`` excludes dropped groups
        groups, kept = record["dropped"].items(), record["groups_kept"]
        dropped = sum(count for name, count in groups if name.startswith("groups_"))
        trajectories += record["num_trajectories"] * kept / (kept + dropped)
    phases = sorted({phase for record in trained for phase in record["seconds"]})
    evaluations = [record["seconds"]["evaluation"] for record in trained if "eval_accuracy" in record]
    return Measured(
        per_trajectory=max(round(tokens / trajectories), 1),
        trainable_share=sum(record["trainable_tokens"] for record in trained) / tokens,
        seconds={phase: sum(one["seconds"].get(phase, 0.0) for one in trained) / len(trained) for phase in phases},
        evaluation=sum(evaluations) / len(evaluations) if evaluations else None,
        base_model=next((one.metadata.base_model for one in reversed(list_checkpoints(run))), None),
    )
