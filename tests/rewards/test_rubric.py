"""ART-E's reward and that of mode simple, case by case, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emailrl.agent import Rubric
from emailrl.base.errors import EmailRLError
from emailrl.records.trajectory import Message, Scenario, StopReason, ToolCall, Trajectory, Turn
from emailrl.rewards.rubric import art_e_reward, heuristic_reward, reasons, simple_reward
from emailrl.rewards.scorer import build_scorer
from emailrl.settings import AgentSettings, RewardSettings, RewardWeightSettings

SCENARIO = Scenario("1", "When?", "May 20", ["<1@x>"], "ida@corvane.test", "2002-05-10")


def played(stop_reason: StopReason = StopReason.ANSWERED, **fields: object) -> Trajectory:
    rubric = Rubric(num_turns=4, **fields)  # type: ignore[arg-type]
    return Trajectory("t", "g", SCENARIO, rubric=asdict(rubric), stop_reason=stop_reason)


FOUND = {"ever_found_right_email": True}
READ = {"ever_read_right_email": True}
INVALID = {"ever_tried_to_read_invalid_email": True}
RIGHT = {"attempted_answer": True, "answer_correct": True}
WRONG = {"attempted_answer": True}
CITED = {"sources_correct": True}

CASES = [
    # p = 0.1 found + 0.1 read + 0.1 no invalid id + 0.1 cited
    (-2.0 + 0.1, {"cant_parse_tool_call": True}),
    (-2.0, {"cant_parse_tool_call": True, **INVALID}),
    (-2.0 + 0.3, {"cant_parse_tool_call": True, **FOUND, **READ}),
    (-1.9 + 0.2, {"bad_tool_call_name": True, **FOUND}),
    (-1.8 + 0.2, {"bad_tool_call_args": True, **FOUND, **READ, **INVALID}),
    (-1.8 + 0.2, {"stop_reason": StopReason.TRUNCATED, **FOUND}),  # counts as a bad call
    (-1.0 + 0.1, WRONG),
    (-1.0 + 0.4, WRONG | FOUND | READ | CITED | {"num_sources": 1}),
    (-1.0 + 0.3, WRONG | FOUND | READ | {"num_sources": 3}),
    (0.0 + 0.1, {"returned_i_dont_know": True}),
    (0.0 + 0.3, {"returned_i_dont_know": True, **FOUND, **READ, "num_sources": 1}),
    (0.0 + 0.2, {"ran_out_of_turns": True, **FOUND}),
    # 1 + 0.3 cited + 0.1 / num_sources + 0.1 (1 - 4 / 10)
    (1.0 + 0.06, RIGHT | FOUND | READ),
    (1.0 + 0.1 + 0.06, RIGHT | {"num_sources": 1}),
    (1.0 + 0.3 + 0.1 + 0.06, RIGHT | FOUND | READ | CITED | {"num_sources": 1}),
    (1.0 + 0.3 + 0.025 + 0.06, RIGHT | CITED | {"num_sources": 4}),
    (1.0 + 0.3 + 0.05 + 0.06, RIGHT | CITED | INVALID | {"num_sources": 2}),
]
ART_E = art_e_reward(RewardWeightSettings(), max_turns=10)


@pytest.mark.parametrize(("expected", "fields"), CASES)
def test_art_e_case_by_case(expected: float, fields: dict) -> None:
    assert sum(ART_E(played(**fields)).values()) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (RIGHT | CITED | FOUND | {"num_sources": 2}, [1, 0, 0, 0, 0.3, 0.05, 0.06]),
        (WRONG | READ | {"num_sources": 1}, [-1, 0, 0.1, 0.1, 0, 0, 0]),
    ],
)
def test_the_terms_are_named(fields: dict, expected: list[float]) -> None:
    terms = ART_E(played(**fields))
    assert [*terms] == ["outcome", "found", "read", "no_invalid_id", "cited", "few_sources", "few_turns"]
    assert [*terms.values()] == pytest.approx(expected)


@pytest.mark.parametrize(("num_sources", "few"), [(1, 0.1), (3, 0.1), (6, 0.05)])
def test_mails_that_are_all_needed_are_not_too_many(num_sources: int, few: float) -> None:
    trajectory = played(**RIGHT, **CITED, num_sources=num_sources)
    trajectory.scenario = replace(SCENARIO, message_ids=["<1@x>", "<2@x>", "<3@x>"], needs_all=True)
    assert ART_E(trajectory)["few_sources"] == pytest.approx(few)


def test_not_knowing_what_nobody_can_know() -> None:
    def rewards(*tools: str, **fields: object) -> tuple[float, float]:
        trajectory = played(returned_i_dont_know=True, answer_correct=True, num_sources=1, **fields)
        trajectory.scenario = replace(SCENARIO, answer="I don't know", message_ids=[], answerable=False)
        trajectory.turns = [Turn([], [], "stop", tool_name=tool) for tool in (*tools, "return_final_answer")]
        trajectory.rubric["num_turns"] = len(trajectory.turns)
        return sum(ART_E(trajectory).values()), simple_reward(trajectory)["outcome"]

    assert rewards("search_emails") == rewards("search_emails", "read_email", "search_emails") == (1.0, 1.0)
    assert rewards() == rewards("read_email") == (0.1, 0.0)  # said at once: as on a question that has an answer
    assert rewards("read_email", **INVALID) == (0.0, 0.0)


def test_weights_are_settings() -> None:
    weights = RewardWeightSettings(reward_wrong=-3, bonus_found=0.5, bonus_no_invalid_id=0.25)
    terms = art_e_reward(weights, max_turns=10)(played(**WRONG, **FOUND))
    assert sum(terms.values()) == pytest.approx(-2.25)


def test_no_outcome_is_a_mistake_not_a_zero() -> None:
    with pytest.raises(EmailRLError, match="does not cover this outcome"):
        ART_E(played(StopReason.COMPLETED))


@pytest.mark.parametrize("correct", [True, False])
def test_simple(correct: bool) -> None:
    assert simple_reward(played(attempted_answer=True, answer_correct=correct)) == {"outcome": float(correct)}


names = ("ever_found_right_email", "ever_read_right_email", "ever_tried_to_read_invalid_email")
flags = st.fixed_dictionaries({name: st.booleans() for name in names})
OUTCOMES = {
    "cant_parse_tool_call": (-2.0, -1.7),
    "bad_tool_call_name": (-1.9, -1.6),
    "bad_tool_call_args": (-1.8, -1.5),
    "attempted_answer": (-1.0, -0.6),
    "returned_i_dont_know": (0.0, 0.3),
    "ran_out_of_turns": (0.0, 0.3),
}


@given(outcome=st.sampled_from(sorted(OUTCOMES)), flags=flags, cited=st.booleans())
def test_every_outcome_stays_in_its_range(outcome: str, flags: dict, cited: bool) -> None:
    fields = {outcome: True, **flags, "sources_correct": cited and outcome == "attempted_answer"}
    total = sum(ART_E(played(**fields)).values())
    low, high = OUTCOMES[outcome]
    assert low - 1e-9 <= total <= high + 1e-9


@given(flags=flags, cited=st.booleans(), num_sources=st.integers(0, 9), num_turns=st.integers(1, 10))
def test_a_right_answer_is_worth_most(flags: dict, cited: bool, num_sources: int, num_turns: int) -> None:
    trajectory = played(**RIGHT, **flags, sources_correct=cited, num_sources=num_sources)
    trajectory.rubric["num_turns"] = num_turns
    terms = ART_E(trajectory)
    assert 1.0 <= sum(terms.values()) <= 1.49 + 1e-9
    assert all(value >= 0 for value in terms.values())


PUMP = Scenario("1", "When is the pump order due?", "May 20", ["<1@x>"], "ida@corvane.test", "2002-05-10")


def completed(message: Message, tokens: int = 25) -> Trajectory:
    turn = Turn(list(range(tokens)), [0.0] * tokens, "stop")
    messages = [Message("system", "s"), Message("user", PUMP.question), message]
    return Trajectory("t", "g", PUMP, mode="simple", messages=messages, turns=[turn])


def calls(name: str, /, **arguments: object) -> Message:
    return Message("assistant", "", [ToolCall(name, arguments)])


@pytest.mark.parametrize(
    ("message", "readable", "valid", "useful"),
    [
        (Message("assistant", "<tool_call>{", parse_error="cut off"), -0.25, 0, 0),
        (Message("assistant", "It is due on May 20."), 0, 0, 0),
        (calls("find_mail", keywords=["pump"]), 0.25, 0, 0),
        (calls("search_emails", keywords="pump"), 0.25, 0, 0),
        (calls("search_emails", keywords=[]), 0.25, 0.25, 0),
        (calls("search_emails", keywords=["Pump order"]), 0.25, 0.25, 0.5),
        (calls("search_emails", keywords=["pump", "valve"]), 0.25, 0.25, 0.25),
        # six words of the question: 0.5 * 6/6 * 3/6
        (calls("search_emails", keywords=["when is the pump order due"]), 0.25, 0.25, 0.25),
        (calls("read_email", message_id="<1@x>"), 0.25, 0.25, 0),
        (calls("return_final_answer", answer="May 20", sources=[]), 0.25, 0.25, 0.5),
        (calls("return_final_answer", answer="May 21", sources=None), 0.25, 0.25, 0),
    ],
)
def test_terms(message: Message, readable: float, valid: float, useful: float) -> None:
    terms = heuristic_reward(max_tokens=100)(completed(message))
    assert terms == pytest.approx({"readable": readable, "valid": valid, "useful": useful, "brevity": 0.075})


def test_brevity_never_punishes() -> None:
    terms = heuristic_reward(max_tokens=100)(completed(Message("assistant", ""), tokens=120))
    assert terms["brevity"] == 0


def test_mode_simple_is_scored_by_the_tokens_of_a_turn_and_nothing_played_gets_no_reward() -> None:
    agent = AgentSettings(max_tokens=60, max_thinking_tokens=40)
    call, empty = completed(calls("search_emails", keywords=["Pump order"])), completed(Message("user", "Please."))
    build_scorer(RewardSettings(), RewardWeightSettings(), agent, reward="heuristic").score([call, empty])
    assert call.reward == pytest.approx(0.25 + 0.25 + 0.5 + 0.1 * (1 - 25 / 100))
    assert empty.exception == "ValueError: trajectory t holds no completion" and empty.reward_terms == {}


def test_each_term_has_a_reason_that_agrees_with_its_value_and_its_setting() -> None:
    weights = RewardWeightSettings()
    settings = {name: field.description for name, field in RewardWeightSettings.model_fields.items()}
    for _, fields in CASES:
        trajectory = played(**fields)
        trajectory.reward_terms = ART_E(trajectory)
        why = reasons(trajectory)
        assert why.keys() == trajectory.reward_terms.keys()
        for name, value in trajectory.reward_terms.items():
            if name != "outcome":
                its = [text.rstrip(".") for each, text in settings.items() if each.startswith(f"bonus_{name}")]
                assert any(why[name].startswith(text) for text in its) == (value != 0), (name, why[name])
        [case] = {name for name in settings if name.startswith("reward") and settings[name] == why["outcome"]}
        assert getattr(weights, case) == trajectory.reward_terms["outcome"]
    right = played(**RIGHT, **CITED, num_sources=4)
    right.reward_terms = ART_E(right)
    assert reasons(right)["few_sources"] == "For a correct answer, divided by the number of emails it cites: 4."
    right.scenario = replace(SCENARIO, message_ids=["<1@x>", "<2@x>"], needs_all=True)
    assert reasons(right)["few_sources"].endswith("cites: 2 needed of 4.")
    unsought = played(**{"returned_i_dont_know": True, "answer_correct": True})
    unsought.scenario = replace(SCENARIO, answerable=False)
    unsought.reward_terms = simple_reward(unsought)
    assert unsought.reward_terms == {"outcome": 0.0}
    assert reasons(unsought) == {"outcome": 'Answer "I don\'t know", or out of turns.'}
    assert reasons(replace(unsought, reward_terms={"mine": 1.0})) == {}
