"""Benchmark: significance by hand, the JSON contract, interruption, and the whole path with a real engine."""

from __future__ import annotations

import csv
import fcntl
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tiny import make_checkpoint, make_database, make_model, make_questions, settings_of

from emailrl.agent.play import Collector
from emailrl.agent.task import Rubric
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.cli.inputs import choose_subjects
from emailrl.measure import benchmark
from emailrl.measure.benchmark import Report, Subject, is_unfinished, run_benchmark
from emailrl.measure.journal import Busy
from emailrl.model.resolve import Adapter
from emailrl.records import read_trajectories
from emailrl.records.trajectory import Scenario, StopReason, TokenSample, Trajectory, Turn
from emailrl.settings import Settings


class Scripted:
    """Plays what a collector asks: right on the named questions, raising on others, and perhaps interrupted."""

    def __init__(
        self, right: set[str], *, raising: frozenset[str] = frozenset(), stop_after: int | None = None
    ) -> None:
        self.right, self.raising, self.stop_after = right, raising, stop_after
        self.calls: list[int] = []
        self.ended = 0

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            if trajectory.exception is None:
                trajectory.rubric["answer_correct"] = trajectory.scenario.id in self.right
                trajectory.reward = 1.0 if trajectory.rubric["answer_correct"] else -1.0
                trajectory.reward_terms = {"outcome": trajectory.reward}

    def play(self, trajectories: Sequence[Trajectory], *sampling: object) -> Sequence[Trajectory]:
        self.calls.append(len(trajectories))
        progress: Any = sampling[-1]
        for one in reversed(trajectories):  # the last one ends first
            if self.ended == self.stop_after:
                raise KeyboardInterrupt
            one.seconds, one.turns = 0.5, [Turn([1], [-0.1], "stop")]
            one.samples = [TokenSample([0, 1], [0, 1], [None, -0.1])]
            one.rubric = {"answer_correct": False, "num_turns": 1}
            if one.scenario.id in self.raising:
                one.exception, one.stop_reason = "OSError: gone", StopReason.EXCEPTION
            self.ended += 1
            progress(one)
        return trajectories


class Bench:
    """Runs benchmarks of scripted policies in one folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.out, self.monkeypatch, self.heard = folder, folder / "out", monkeypatch, list[str]()

    def __call__(
        self, *policies: Scripted, questions: int | list[Scenario] = 2, settings: Settings | None = None, **how: Any
    ) -> Report:
        """Policy n plays for model-n."""
        subjects = [Subject(f"model-{number}", "nano") for number in range(len(policies))]

        def players(chosen: Sequence[Subject], given: Settings) -> Iterator[tuple[Subject, Collector]]:
            for subject in chosen:
                one = policies[subjects.index(subject)]
                yield subject, Collector(one.play, one.score, given.agent, "masked")

        self.monkeypatch.setattr(benchmark, "players", players)
        asked = make_questions(questions) if isinstance(questions, int) else questions
        how |= {"progress": lambda _, trajectory: self.heard.append(trajectory.scenario.id)}
        return run_benchmark(subjects, asked, settings or settings_of(self.folder), self.out, **how)

    def table(self, name: str) -> list[dict[str, str]]:
        return list(csv.DictReader((self.out / name).open(newline="")))

    def results(self) -> dict[str, Any]:
        return json.loads((self.out / "results.json").read_text())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def played(path: Path) -> list[str]:
    return [trajectory.scenario.id for trajectory in read_trajectories(path)]


def test_records_hold_the_contract_and_count_exceptions_as_wrong(bench: Bench) -> None:
    collector = Scripted({"q0", "q1", "q2"}, raising=frozenset({"q2"}))
    [record] = bench(collector, questions=4, notes=["shared inbox"]).records()
    assert record["model"] == "model-0"
    assert record["accuracy"] == 0.5 and record["num_questions"] == 4 and record["exceptions"] == 1
    # Wilson for 2 of 4: centre 0.5, half-width z·√(1 + z²/4)/(4 + z²) with z = 1.959964.
    assert record["accuracy_low"] == pytest.approx(0.150036, abs=1e-5)
    assert record["accuracy_high"] == pytest.approx(0.849964, abs=1e-5)
    assert record["reward"] == pytest.approx(1 / 3)  # +1, +1, -1; the one that raised has none
    assert record["latency_seconds"] == 0.5 and record["tokens"] == 2.0 and record["cost"] is None
    assert set(Rubric.__dataclass_fields__) <= record.keys()
    assert record["num_turns"] == 1.0 and record["sources_correct"] is None
    assert record["num_inboxes"] == 1 and datetime.fromisoformat(record["measured_at"]).tzinfo is UTC
    assert record["split"] == "test" and record["temperature"] == 0.0 and record["notes"] == ["shared inbox"]
    assert played(record["trajectories"]) == ["q0", "q1", "q2", "q3"]


def test_the_address_of_a_reward_is_recorded_without_its_credentials(bench: Bench, tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    rewards = settings.rewards.model_copy(update={"reward": "http://me:hunter2@host/score?api_key=hunter2"})
    report = bench(Scripted({"q0"}), settings=settings.model_copy(update={"rewards": rewards}))
    assert report.conditions["reward_name"] == "http://host/score?api_key=***"
    assert all("hunter2" not in file.read_text() for file in bench.out.glob("*.*"))


def test_models_are_compared_question_by_question(bench: Bench) -> None:
    names = [f"q{n}" for n in range(10)]
    [comparison] = bench(Scripted(set(names[:1])), Scripted(set(names[1:7])), questions=10).comparisons
    assert (comparison["first"], comparison["second"], comparison["num_questions"]) == ("model-0", "model-1", 10)
    assert (comparison["better_first"], comparison["better_second"]) == (1, 6)
    assert comparison["difference"] == pytest.approx(0.5)  # of the second
    assert (comparison["p_value"], comparison["unit"]) == (pytest.approx(0.125), "question")  # 2 · (1 + 7)/128
    written = bench.results()
    assert [record["accuracy"] for record in written["results"]] == [0.1, 0.6]
    assert written["comparisons"][0]["p_value"] == pytest.approx(0.125)
    rows = bench.table("questions.csv")
    assert len(rows) == 20 and rows[10]["model"] == "model-1" and rows[11]["correct"] == "True"
    assert [row["verdict"] for row in rows[9:12]] == ["wrong", "wrong", "correct"]
    assert [row["accuracy"] for row in bench.table("results.csv")] == ["0.1", "0.6"]


def test_questions_about_the_same_inbox_are_compared_together(bench: Bench) -> None:
    questions = [replace(each, inbox_address=f"{n % 6}@x") for n, each in enumerate(make_questions(12))]
    [comparison] = bench(Scripted({each.id for each in questions}), Scripted(set()), questions=questions).comparisons
    assert (comparison["p_value"], comparison["unit"]) == (2 / 2**6, "inbox")


def test_an_interrupt_keeps_the_finished_questions(bench: Bench) -> None:
    report = bench(Scripted({"q3", "q4"}), Scripted({"q4"}, stop_after=2), questions=5)
    assert report.interrupted and [result.complete for result in report.results] == [True, False]
    half = report.results[1].evaluation
    assert (half.num_questions, half.num_correct) == (2, 1)  # q4 and q3 had ended; q4 is right
    [comparison] = report.comparisons
    assert (comparison["num_questions"], comparison["better_first"], comparison["better_second"]) == (2, 1, 0)
    assert len(played(report.results[1].trajectories)) == 2


def test_a_crash_of_the_scorer_loses_nothing_and_resuming_plays_nothing_again(bench: Bench) -> None:
    class Crashing(Scripted):
        def score(self, trajectories: Sequence[Trajectory]) -> None:
            raise MemoryError("the scorer died")

    with pytest.raises(MemoryError):
        bench(Crashing(set()), questions=3)
    [file] = (bench.out / "trajectories").glob("*.jsonl")
    assert played(file) == ["q2", "q1", "q0"] and is_unfinished(bench.out)
    second = Scripted({"q1"})
    bench.heard.clear()
    [result] = bench(second, questions=3, resume=True).results
    assert second.calls == [0] and bench.heard == ["q2", "q1", "q0"]
    assert result.complete and result.evaluation.num_correct == 1
    assert played(file) == ["q0", "q1", "q2"] and not is_unfinished(bench.out)


def test_only_what_lacks_a_verdict_is_scored_again(bench: Bench) -> None:
    class Away(Scripted):
        def score(self, trajectories: Sequence[Trajectory]) -> None:
            super().score(trajectories)
            for trajectory in trajectories:
                if trajectory.scenario.id in ("q1", "q3"):
                    trajectory.exception, trajectory.reward, trajectory.reward_terms = "JudgeError: away", 0.0, {}
                    trajectory.rubric["answer_correct"] = None

    [record] = bench(Away({"q0", "q1"}, raising=frozenset({"q4"})), questions=5).records()
    # Judged: q0 right, q2 wrong, q4 raised; Wilson of 1 of 3.
    assert (record["accuracy"], record["unjudged"], record["exceptions"], record["num_questions"]) == (1 / 3, 2, 3, 5)
    assert (record["accuracy_low"], record["accuracy_high"]) == pytest.approx((0.0614919, 0.7923404), abs=1e-6)
    assert [(row["correct"], row["verdict"]) for row in bench.table("questions.csv")] == [
        ("True", "correct"), ("", "not judged"), ("False", "wrong"), ("", "not judged"), ("False", "crashed")
    ]  # fmt: skip
    assert bench.table("results.csv")[0]["unjudged"] == "2"
    back = Scripted({"q0", "q1", "q2"})
    [record] = bench(back, questions=5, resume=True).records()
    assert back.calls == [1]  # q4 alone, which raised
    assert (record["accuracy"], record["unjudged"], record["exceptions"]) == (2 / 5, 0, 0)  # q2 keeps its verdict
    again = Scripted(set())
    assert bench(again, questions=5, resume=True).records() == [record]
    assert again.calls == []  # not even its model is loaded


def test_other_conditions_are_refused_and_two_processes_never_play_together(bench: Bench, tmp_path: Path) -> None:
    collector, changed = Scripted({"q0"}), make_questions(2)
    changed[0].answer = "30 May 2002"
    with pytest.raises(UsageError, match="Nothing to resume"):
        bench(collector, resume=True)
    bench(collector)
    other = settings_of(tmp_path, eval_temperature=0.5, max_turns=3)
    with pytest.raises(UsageError, match=r"max turns was 2, now 3; temperature was 0.0, now 0.5\."):
        bench(collector, settings=other, resume=True)
    with pytest.raises(UsageError, match=r"under other conditions: other questions\. "):
        bench(collector, questions=changed, resume=True)
    with (bench.out / "conditions.json").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EmailRLError, match="Another process is writing"):
            bench(collector, resume=True)


def test_a_folder_in_which_another_process_plays_is_left_alone(bench: Bench) -> None:
    refused: list[str] = []

    class Beside(Scripted):
        def play(self, trajectories: Sequence[Trajectory], *sampling: object) -> Sequence[Trajectory]:
            played = super().play(trajectories, *sampling)
            for more in ({}, {"overwrite": True}, {"resume": True}):
                with pytest.raises(Busy) as caught:
                    bench(self, **more)
                refused.append(caught.value.message)
            return played

    report = bench(Beside({"q0"}))
    assert refused == [f"Another process is writing {bench.out / 'conditions.json'}."] * 3
    assert len(played(report.results[0].trajectories)) == 2
    with pytest.raises(UsageError, match="already holds a benchmark"):
        bench(Scripted(set()))
    assert bench.results()["results"][0]["accuracy"] == 0.5
    assert bench(Scripted(set()), overwrite=True).records()[0]["accuracy"] == 0.0


def test_without_anything_ended_an_interrupt_leaves_no_report(bench: Bench) -> None:
    report = bench(Scripted(set(), stop_after=0))
    assert report.interrupted and report.results == [] and not bench.out.exists()


def test_sequential_plays_one_question_at_a_time(bench: Bench, tmp_path: Path) -> None:
    collector = Scripted({"q1"})
    report = bench(collector, questions=3, settings=settings_of(tmp_path, bench_sequential=True))
    assert collector.calls == [1, 1, 1] and bench.heard == ["q0", "q1", "q2"]
    assert report.conditions["sequential"] and report.conditions["environment"] == "mail"
    assert report.results[0].evaluation.num_correct == 1


def test_when_everything_raises_the_first_error_is_told(bench: Bench) -> None:
    with pytest.raises(EmailRLError, match=r"every rollout failed: gone\. .* rerun .* --resume --out .*/out"):
        bench(Scripted(set(), raising=frozenset({"q0", "q1"})))
    assert (bench.out / "results.json").is_file()


def test_a_folder_that_holds_no_benchmark_is_left_alone(bench: Bench) -> None:
    mine = bench.out / "trajectories" / "rollout.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("{}\n")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="other than a benchmark"):
            bench(Scripted(set()), overwrite=overwrite)
    assert [path for path in bench.out.rglob("*") if path.is_file()] == [mine]


def test_the_subjects_chosen(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, model_name="nano")
    assert choose_subjects([], [], settings) == [Subject("nano", "nano")]
    with pytest.raises(EmailRLError, match="No run has a checkpoint"):
        choose_subjects(["best"], [], settings)
    model = make_model(tmp_path / "model")
    best = make_checkpoint(tmp_path / "outputs" / "grpo_masked" / "best_model", model)
    [bare] = choose_subjects([], [], settings)
    assert bare == Subject(str(best.path), str(model), Adapter.of(best))
    both = choose_subjects(["best", str(best.path)], ["nano"], settings)
    assert [subject.label for subject in both] == ["nano", str(best.path)]  # as they were before training


def test_checkpoint_and_base_play_for_real(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    checkpoint = make_checkpoint(tmp_path / "outputs" / "grpo_masked" / "best_model", model)
    settings = settings_of(
        tmp_path, model_name=str(model), db=make_database(tmp_path / "mail.db"), eval_temperature=1.0
    )
    subjects = choose_subjects(["best"], [str(model)], settings)
    report = run_benchmark(subjects, make_questions(3), settings, tmp_path / "out")
    base, adapted = (list(read_trajectories(result.trajectories)) for result in report.results)
    assert {t.adapter_sha256 for t in adapted} == {checkpoint.metadata.files["adapter_model.safetensors"]}
    assert {t.run_id for t in adapted} == {"grpo_masked"} and {t.adapter_sha256 for t in base} == {None}
    assert [t.turns[0].completion_ids for t in adapted] != [t.turns[0].completion_ids for t in base]
    assert [record["num_questions"] for record in report.records()] == [3, 3]
    section = settings.benchmark.model_copy(update={"bench_sequential": True})
    sequential = settings.model_copy(update={"benchmark": section})
    again = run_benchmark(subjects, make_questions(3), sequential, tmp_path / "again")
    for result, before in zip(again.results, (base, adapted), strict=True):
        ids = [t.turns[0].completion_ids for t in read_trajectories(result.trajectories)]
        assert ids == [t.turns[0].completion_ids for t in before]  # the same draws, alone or in a crowd
