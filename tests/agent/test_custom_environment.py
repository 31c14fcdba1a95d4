"""Environments of the user's own: what is asked of them, what they are held to, and where their errors end up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from mail_calls import INBOX

from emailrl.agent import Rubric, tool_schemas
from emailrl.agent.task import CustomEnvironment, load_task
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.mail import open_mailbox
from emailrl.records.trajectory import Message, Scenario, StopReason
from emailrl.settings import AgentSettings, Settings

SOURCE = '''
from dataclasses import dataclass

from emailrl.agent import StepResult
from emailrl.records.trajectory import Message, StopReason


class Echo:
    """Repeats what it is told; "answer X" answers X."""

    def __init__(self, scenario, mailbox, settings):
        self.scenario, self.mailbox, self.settings = scenario, mailbox, settings

    def start(self):
        subjects = [hit.message_id for hit in self.mailbox.search(["pump"])]
        return [Message("user", f"{self.scenario.question} {subjects}")]

    def step(self, message):
        said = message.content
        if said.startswith("answer "):
            self.final_answer, self.final_sources = said.removeprefix("answer "), ["<1@x>", "<1@x>", 3]
            return StepResult(done=True)
        return StepResult([Message("user", said)], tool_name="echo", tool_args={"said": said}, tool_result=said)


class Scored(Echo):
    @property
    def rubric(self):
        return {"found": True, "num_turns": 99, "note": None}


@dataclass
class Marks:
    mark: float = 0.5


class Marked(Echo):
    tools = []
    rubric = Marks()


def by_function(scenario, mailbox, settings):
    return Echo(scenario, mailbox, settings)


by_function.tools = [{"type": "function", "function": {"name": "echo", "parameters": {}}}]


def breaks_when_made(scenario, mailbox, settings): raise OSError("no such disk")
def of_nothing(scenario, mailbox, settings): return object()


class Odd(Echo):
    def start(self): return self.scenario.question.split("|")[0] and eval(self.scenario.question)
    def step(self, message): return eval(message.content)


class BadRubric(Echo):
    rubric = {"all": {1, 2}}


class BadTools(Echo):
    tools = ["search"]
'''


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return file


Make = Callable[..., CustomEnvironment]


@pytest.fixture
def make(path: Path, db: Path, scenario: Scenario) -> Make:
    def make(name: str, *, max_turns: int = 10, **changes: Any) -> CustomEnvironment:
        mailbox, settings = open_mailbox(db, INBOX, until=scenario.query_date), AgentSettings(max_turns=max_turns)
        environment = load_task(f"{path}:{name}", Settings(agent=settings)).make(replace(scenario, **changes), mailbox)
        assert isinstance(environment, CustomEnvironment)
        return environment

    return make


def say(text: str) -> Message:
    return Message("assistant", text)


def test_it_plays_on_the_scenarios_mailbox_and_records_what_was_called(make: Make) -> None:
    environment = make("Echo")
    # The mail of day 20 and the one between others stay unseen: the mailbox is the scenario's.
    assert environment.start() == [Message("user", "When is the pump order due? ['<2@x>', '<1@x>']")]
    result = environment.step(say("hello"))
    assert result.messages == [Message("user", "hello")] and not result.done
    assert (result.tool_name, result.tool_args, result.tool_result) == ("echo", {"said": "hello"}, "hello")


@pytest.mark.parametrize(
    ("name", "said", "rubric", "own"),
    [
        ("Echo", "answer May 20", {"attempted_answer": True, "num_sources": 2, "sources_correct": True}, {}),
        ("Echo", "two", {"num_turns": 3, "ran_out_of_turns": True}, {}),
        ("Scored", "two", {"ran_out_of_turns": True}, {"found": True, "num_turns": 99, "note": None}),
        ("Marked", "two", {"num_turns": 3, "ran_out_of_turns": True}, {"mark": 0.5}),
    ],
)
def test_its_rubric_is_art_es_under_its_own_and_it_ends_when_the_turns_are_used_up(
    make: Make, name: str, said: str, rubric: dict[str, Any], own: dict[str, Any]
) -> None:
    environment = make(name, max_turns=2)
    environment.start()
    assert environment.step(say("one")).done is False
    last, answered = environment.step(say(said)), said != "two"
    assert (last.done, len(last.messages)) == (True, 0 if answered else 1)
    assert last.stop_reason == (StopReason.ANSWERED if answered else StopReason.RAN_OUT_OF_TURNS)
    assert environment.final_answer == ("May 20" if answered else None)
    assert environment.final_sources == (["<1@x>", "<1@x>", "3"] if answered else [])
    assert environment.rubric == asdict(Rubric(num_turns=2)) | rubric | own


def test_the_tools_are_its_own_or_those_of_mail(path: Path) -> None:
    assert load_task("mail").tools == load_task(f"{path}:Echo").tools == tool_schemas()
    assert load_task(f"{path}:Marked").tools == []
    assert [tool["function"]["name"] for tool in load_task(f"{path}:by_function").tools] == ["echo"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("male", "Unknown environment: 'male'"),
        ("{path}:Nothing", "no function or class 'Nothing' for the environment"),
        ("{path}:BadTools", "has tools that are not function schemas"),
        ("{path}_.py:Echo", "No such file"),
        ("no_such_module_here:Echo", "ModuleNotFoundError"),
    ],
)
def test_what_is_no_environment(path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_task(name.format(path=path))


@pytest.mark.parametrize(
    ("name", "question", "message"),
    [
        ("breaks_when_made", "?", r"making the environment .* raised: .*mine.py, line 49: OSError: no such disk"),
        ("of_nothing", "?", r"returned <object .*, not an object with start\(\)"),
        ("Odd", "1 / 0", r"start\(\) of the environment .* raised: .*mine.py, line 54: ZeroDivisionError"),
        ("Odd", "[]", r"returned \[\], not at least one Message"),
        ("Odd", "'text'", "returned 'text', not a list of Messages"),
        ("Odd", "[Message('user', 3)]", "not a list of Messages"),
        ("Odd", "[Message('user', 'a\\ud83d')]", r"returned '\\ud83d', not valid Unicode"),
    ],
)
def test_what_goes_wrong_at_the_start(make: Make, name: str, question: str, message: str) -> None:
    environment = make(name, question=question)  # making one never raises: the trajectory's start does
    with pytest.raises(EmailRLError, match=message):
        environment.start()


@pytest.mark.parametrize(
    ("name", "said", "message"),
    [
        ("Odd", "1 / 0", r"step\(\) of the environment .* raised: .*mine.py, line 55: ZeroDivisionError"),
        ("Odd", "None", r"returned None, not a StepResult"),
        ("Odd", "StepResult(['x'])", "not a list of Messages"),
        ("Odd", "StepResult([Message('tool', chr(0xdcff))])", r"step\(\) of .* returned '\\udcff', not valid Unicode"),
        (
            "Odd",
            "StepResult(tool_args={'x': {1}})",
            "tool_args of the environment .* raised: TypeError: Object of type",
        ),
        ("Odd", "StepResult(done='maybe')", "returned 'maybe', not a bool as done"),
        ("Odd", "StepResult(done=True, stop_reason=7)", "returned 7, not a StopReason"),
        ("Odd", "exit(3)", r"raised: .*SystemExit: 3"),
        ("BadRubric", "hello", "rubric of the environment .* raised: .*'all' is a set"),
    ],
)
def test_what_goes_wrong_in_play(make: Make, name: str, said: str, message: str) -> None:
    environment = make(name, question="[Message('user', 'Q?')]")
    environment.start()
    with pytest.raises(EmailRLError, match=message):
        environment.step(say(said))
    assert environment.rubric == asdict(Rubric())  # still readable, as the runner reads it after an exception
