"""Scoring trajectories in place: verdicts, terms, outages; what an answer looks like, and what a long one costs."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hang import must_end

from emailrl.agent import Rubric
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.measure.evaluation import disagreement
from emailrl.records.trajectory import Scenario, StopReason, TokenSample, Trajectory, Turn
from emailrl.rewards.judge import JudgeError
from emailrl.rewards.rubric import BatchReward, Terms, simple_reward
from emailrl.rewards.scorer import (
    MeasuringScorer,
    OfflineMatcher,
    OverlongScorer,
    Scorer,
    build_scorer,
    count_candidates,
    measure,
)
from emailrl.settings import AgentSettings, RewardSettings, RewardWeightSettings

SCENARIO = Scenario("1", "When is the drill?", "May 20", ["<1@x>"], "ida@corvane.test", "2002-05-10")


def answered(answer: str, **fields: object) -> Trajectory:
    rubric = Rubric(attempted_answer=True, num_turns=3, **fields)  # type: ignore[arg-type]
    return Trajectory(
        answer, "g", SCENARIO, rubric=asdict(rubric), final_answer=answer, stop_reason=StopReason.ANSWERED
    )


def given_up() -> Trajectory:
    rubric = Rubric(returned_i_dont_know=True, num_turns=2)
    return Trajectory("idk", "g", SCENARIO, rubric=asdict(rubric), final_answer="I don't know")


class FakeJudge:
    """True for answers with "20"; raises for "outage"; notes what it was asked and how many at once."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.asked: list[str] = []
        self.busiest = self.running = 0
        self.lock = threading.Lock()

    def check(self, question: str, reference: str, answer: str, kind: str | None = None) -> bool:
        with self.lock:
            self.asked.append(answer)
            self.running += 1
            self.busiest = max(self.busiest, self.running)
        time.sleep(0.02)
        with self.lock:
            self.running -= 1
        if answer == "outage":
            raise JudgeError("The judge is down.", "Wait.")
        return "20" in answer


def test_default_scorer_is_art_e_with_the_offline_matcher() -> None:
    right = answered("On May 20.", sources_correct=True, num_sources=1, ever_found_right_email=True)
    wrong = answered("May 21", ever_found_right_email=True)
    idk = given_up()
    build_scorer(RewardSettings(), RewardWeightSettings(), AgentSettings(max_turns=6)).score([right, wrong, idk])
    assert [t.rubric["answer_correct"] for t in (right, wrong, idk)] == [True, False, False]
    assert right.reward == pytest.approx(1 + 0.3 + 0.1 + 0.1 * (1 - 3 / 6), abs=1e-9)
    assert wrong.reward == pytest.approx(-1 + 0.2, abs=1e-9)
    assert idk.reward == pytest.approx(0.1, abs=1e-9)
    assert all(t.reward == sum(t.reward_terms.values()) for t in (right, wrong, idk)), "to the last bit"


def test_where_the_mailbox_holds_no_answer_only_not_knowing_is_right() -> None:
    judge = FakeJudge(1)
    absent = replace(SCENARIO, answer="I don't know", message_ids=[], answerable=False)
    idk, guess = given_up(), answered("On the 20th; I don't know")
    out_of_turns = Trajectory("late", "g", absent, rubric=asdict(Rubric(ran_out_of_turns=True, num_turns=7)))
    for trajectory in (idk, guess):
        trajectory.scenario = absent
    idk.turns = [Turn([], [], "stop", tool_name=tool) for tool in ("search_emails", "return_final_answer")]
    Scorer(judge, simple_reward).score([idk, guess, out_of_turns])
    assert [t.reward for t in (idk, guess, out_of_turns)] == [1.0, 0.0, 0.0]
    assert judge.asked == [] and guess.rubric["answer_words"] == 6


def test_an_outage_is_an_exception_and_no_reward() -> None:
    trajectories = [answered("May 20"), answered("outage"), answered("May 3")]
    Scorer(FakeJudge(3), simple_reward).score(trajectories)
    assert [t.reward for t in trajectories if t.exception is None] == [1.0, 0.0]
    assert trajectories[1].exception == "JudgeError: The judge is down. Wait."
    assert [t.rubric["answer_correct"] for t in trajectories] == [True, None, False]
    assert trajectories[1].reward_terms == {}


def test_where_no_reward_is_needed_no_failure_drops_a_rollout_and_only_a_reference_gives_a_verdict() -> None:
    rewarded: list[str | None] = []

    def reward(trajectory: Trajectory) -> dict[str, float]:
        rewarded.append(trajectory.final_answer)
        return {"outcome": 1.0 / (trajectory.final_answer != "20 May")}

    judge, (right, outage, unpaid, free, broken) = FakeJudge(1), map(answered, ("20", "outage", "20 May", "20!", "20?"))
    free.scenario, broken.exception = replace(SCENARIO, answer=""), "OSError: gone"
    MeasuringScorer(Scorer(judge, reward)).score([right, outage, unpaid, free, broken])
    assert [t.exception for t in (right, outage, unpaid, free, broken)] == [None] * 4 + ["OSError: gone"]
    assert [t.rubric["answer_correct"] for t in (right, outage, unpaid, free)] == [True, None, True, None]
    assert right.reward == 1.0 and rewarded == ["20", "20 May"] and judge.asked == ["20", "20 May", "outage"]


def test_remote_checks_run_side_by_side_up_to_the_limit_and_once_for_an_answer() -> None:
    judge = FakeJudge(3)
    trajectories = [answered(f"answer {number % 9}") for number in range(12)]
    Scorer(judge, simple_reward).score(trajectories)
    assert judge.busiest == 3 and len(judge.asked) == 9
    assert [t.reward for t in trajectories] == [0.0] * 12


def test_only_attempts_are_judged_and_broken_trajectories_left_alone() -> None:
    judge = FakeJudge(1)
    broken = answered("May 20")
    broken.exception = "RuntimeError: the engine died"
    Scorer(judge, simple_reward).score([given_up(), broken])
    assert judge.asked == []
    assert broken.reward == 0.0 and broken.reward_terms == {} and broken.rubric["answer_correct"] is False


def test_an_attempted_answer_is_measured_and_another_is_not() -> None:
    listing, idk = answered("May 20, 21 or 22"), given_up()
    Scorer(OfflineMatcher(), simple_reward).score([listing, idk])
    looks = ("answer_words", "answer_candidates", "answer_capitals", "offline_correct")
    assert [listing.rubric[name] for name in looks] == [5, 3, pytest.approx(1 / 5), None]  # M of M a y o r
    assert [idk.rubric[name] for name in looks] == [None] * 4


def test_a_judge_is_compared_with_the_offline_check_on_a_sample_both_ways() -> None:
    gullible = SimpleNamespace(concurrency=1, check=lambda question, reference, answer, kind: answer[0] == "S")
    believed = [f"Surely June {number}" for number in range(60)]
    refused = [f"{' ' * number}May 20" for number in range(60)]
    trajectories = [answered(answer) for answer in (*believed, *refused)]
    Scorer(gullible, simple_reward).score(trajectories)
    offline = [trajectory.rubric["offline_correct"] for trajectory in trajectories]
    compared = [verdict is not None for verdict in offline]
    assert 35 <= sum(compared) <= 85  # half of 120, give or take four and a half standard deviations
    assert disagreement(trajectories) == {
        "judge_compared": sum(compared),
        "only_judge_right": sum(compared[:60]),
        "only_offline_right": sum(compared[60:]),
    }
    again = [answered(trajectory.final_answer or "") for trajectory in reversed(trajectories)]
    Scorer(gullible, simple_reward).score(again)
    assert [trajectory.rubric["offline_correct"] for trajectory in reversed(again)] == offline  # the same sample


def test_a_named_reward_overrides_the_configured_one() -> None:
    trajectory = answered("May 20")
    build_scorer(RewardSettings(), RewardWeightSettings(), AgentSettings(), reward="simple").score([trajectory])
    assert trajectory.reward_terms == {"outcome": 1.0}


def test_whatever_a_check_raises_is_its_own_trajectorys(caplog: pytest.LogCaptureFixture) -> None:
    def check(question: str, reference: str, answer: str, kind: str) -> bool:
        if answer == "stop":
            raise KeyboardInterrupt
        return {"May 20": True, "May 3": False}[answer]

    scorer = Scorer(SimpleNamespace(concurrency=1, check=check), simple_reward)
    trajectories = [answered("May 20"), answered("https://ann:hush@host"), answered("May 3")]
    scorer.score(trajectories)
    assert [t.exception for t in trajectories] == [None, "KeyError: 'https://host'", None]
    assert [t.reward for t in trajectories] == [1.0, 0.0, 0.0] and trajectories[1].reward_terms == {}
    assert "an answer could not be judged: KeyError: 'https://host'" in caplog.text and "hush" not in caplog.text
    with pytest.raises(KeyboardInterrupt):
        scorer.score([answered("stop")])


def test_whatever_a_reward_raises_is_its_own_trajectorys(caplog: pytest.LogCaptureFixture) -> None:
    def reward(trajectory: Trajectory) -> dict[str, float]:
        if trajectory.final_answer == "May 4":
            raise EmailRLError("The reward r.py:bad raised: no.", "Fix it.")
        return {"inverse": 1 / len((trajectory.final_answer or "").replace("May 3", ""))}

    trajectories = [answered("May 20"), answered("May 3"), answered("May 3"), answered("May 4")]
    Scorer(FakeJudge(1), reward).score(trajectories)
    told = "The reward r.py:bad raised: no. Fix it."
    zero = "ZeroDivisionError: division by zero"
    assert [t.exception for t in trajectories] == [None, zero, zero, f"EmailRLError: {told}"]
    assert trajectories[1].reward_terms == {} and trajectories[1].rubric["answer_correct"] is False
    assert caplog.messages == [f"2 trajectories got no reward: {zero}", f"1 trajectory got no reward: {told}"]


def test_whatever_a_reward_of_many_raises_is_theirs(caplog: pytest.LogCaptureFixture) -> None:
    def reward(trajectories: object) -> list[Terms]:
        raise RuntimeError("x" * 900)

    trajectories = [answered("May 20"), answered("May 3"), given_up()]
    Scorer(FakeJudge(1), BatchReward(reward)).score(trajectories)
    assert [t.exception for t in trajectories] == ["RuntimeError: " + "x" * 500] * 3
    assert "3 trajectories got no reward" in caplog.text


@pytest.mark.parametrize(
    ("answer", "candidates"),
    [
        ("May 20", 1),
        ("Tuesday, May 20, 2001", 1),  # a year after its day is no item
        ("On Monday, he said that the meeting would be moved.", 1),  # clauses are no items
        ("Jill and Tom Reed", 1),  # a pair is an answer
        ("It is in <a/b@x> or so I believe it to be.", 1),
        ("Tuesday or Friday", 2),
        ("he/she", 2),
        ("May 3, May 4, or May 5", 3),
        ("5 or 6. Perhaps 7, 8 or 9.", 3),  # the longest list of all sentences
        ("One of these:\n- red\n- green\n* blue", 3),
        ("1. red\n2) green", 2),
        ("", 1),
    ],
)
def test_candidates_are_the_items_of_the_longest_list_or_choice(answer: str, candidates: int) -> None:
    assert count_candidates(answer) == candidates


def test_words_and_capitals_by_hand() -> None:
    assert measure("MAY 20, at Ida's") == {
        "answer_words": 4,
        "answer_candidates": 1,
        "answer_capitals": pytest.approx(4 / 9),  # M A Y I of M A Y a t I d a s
    }
    assert measure("20")["answer_capitals"] == 0.0


@pytest.mark.parametrize("piece", [" ", "<", ", ", "a or ", "/ ", "1. \n"])
def test_a_long_answer_of_anything_is_measured_at_once(piece: str) -> None:
    with must_end():
        measure(piece * 200_000)


def played(*lengths: int, **fields: Any) -> Trajectory:
    """A trajectory of completions of these lengths, each followed by a tool result of 1000 tokens."""
    tokens = TokenSample([], [], [])
    turns = []
    for length in lengths:
        turns.append(Turn([7] * length, [-0.5] * length, "stop"))
        tokens.append_sampled([7] * length, [-0.5] * length)
        tokens.append_prompt([8] * 1000)
    return Trajectory("t", "g", SCENARIO, turns=turns, samples=[tokens], **fields)


def overlong(penalty: float = 1.0, buffer: int = 20, terms: dict[str, float] | None = None) -> OverlongScorer:
    given = {"outcome": 0.75} if terms is None else terms
    return OverlongScorer(Scorer(OfflineMatcher(), lambda trajectory: given), 100, buffer, penalty)


@pytest.mark.parametrize(
    ("lengths", "penalty", "buffer", "charge"),
    [
        ([80], 1.0, 20, 0.0),  # the ramp begins behind max_tokens - buffer
        ([81], 1.0, 20, 0.05),
        ([90], 0.4, 20, 0.2),
        ([100], 1.0, 20, 1.0),
        ([79, 60, 70], 1.0, 20, 0.0),  # 209 tokens in all, 3000 of tool results: no completion comes near the limit
        ([30, 95, 85], 1.0, 20, 0.75),  # the longest alone
        ([], 1.0, 20, 0.0),
        ([99], 1.0, 1, 0.0),
        ([100], 1.0, 1, 1.0),
        ([1], 1.0, 100, 0.01),
        ([], 1.0, 100, 0.0),
    ],
)
def test_the_longest_completion_is_charged_along_the_buffer(
    lengths: list[int], penalty: float, buffer: int, charge: float
) -> None:
    assert overlong(penalty, buffer).charge(played(*lengths)) == pytest.approx(charge, abs=1e-12)


@pytest.mark.parametrize(
    ("terms", "exception", "charged"),
    [
        ({"outcome": 0.75}, None, {"outcome": 0.75, "overlong": -0.75}),
        ({"overlong": 0.5}, None, {"overlong": -0.25}),  # a term of the reward's own is kept
        ({"outcome": 0.75}, "OSError: gone", {}),
    ],
)
def test_the_charge_is_a_term_and_the_terms_add_up(
    terms: dict[str, float], exception: str | None, charged: dict[str, float]
) -> None:
    trajectory = played(95, exception=exception)
    overlong(terms=terms).score([trajectory])
    assert trajectory.reward_terms == charged and trajectory.reward == sum(charged.values())


@pytest.mark.parametrize("buffer", [101, 0])
def test_a_buffer_that_does_not_fit_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(UsageError, match=f"OVERLONG_BUFFER={buffer} does not fit into MAX_TOKENS=100"):
        overlong(buffer=buffer)
