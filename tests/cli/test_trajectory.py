"""The terminal rendering: what stands there, how tokens are colored, and that hostile text stays text."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from emailrl.cli.console import PlainConsole
from emailrl.cli.trajectory import CONTEXT, TRAINED, render_trajectory
from emailrl.page.shapes import TokenTexts
from emailrl.records.trajectory import Message, SampleNote, StopReason, ToolCall, TrainingNote, Trajectory


def shown(trajectory: Trajectory, **options: object) -> str:
    console = PlainConsole()
    console.width, console.no_color = 120, True
    with console.capture() as captured:
        console.print(render_trajectory(trajectory, **options))  # type: ignore[arg-type]
    return captured.get()


def test_plain_view_tells_the_story_in_order(trajectory: Trajectory) -> None:
    text = shown(trajectory, title="step-000003.jsonl, 1 of 1")
    story = [
        "Question     Who paid?",
        "Verdict      correct, reward 1.380, 2 turns, 0.75 s",
        "bob@example.com, as of 2001-05-14",
        "Gold answer  Ann",
        "Gold emails  <m1@x>",
        "t-7  group g-2  step 3  mode masked  policy v3  adapter abababababab",
        "From         step-000003.jsonl, 1 of 1",
        "turn 1 · 2 tokens · 0.50 s · finish stop",
        '→ search_emails(keywords=["paid"])',
        "result of search_emails:",
        "• <m1@x>  Ann paid",
        "turn 2 · 2 tokens · 0.25 s · finish stop",
        '→ return_final_answer(answer="Ann", sources=["<m1@x>"])',
        "Answer       Ann",
        "Stop reason  answered",
        "sources  +0.3000",
    ]
    places = [text.find(line) for line in story]
    assert -1 not in places, story[places.index(-1)]
    assert places == sorted(places)
    assert "You search mail." not in text and "trained" not in text


def test_verbose_adds_prompt_rubric_mask_and_logprobs(trajectory: Trajectory, tokenizer_folder: Path) -> None:
    note = TrainingNote(id="t", advantage=-0.5)
    text = shown(trajectory, verbose=True, tokens=TokenTexts(tokenizer_folder), note=note)
    assert "You search mail." in text
    assert "Advantage    -0.5000" in text
    assert "num turns" in text
    assert "4 of 8 trained (50.0%), 4 sampled, mean log-probability -1.065, minimum -3.500" in text
    assert "Who paid<call>⟨78%⟩<|end|> result⏎" in text  # e^-0.25; e^-0.01 is 99.005%
    assert "Ann⟨3%⟩<|end|>⟨61%⟩" in text
    text = shown(trajectory, verbose=True)
    assert "token ids only: no matching tokenizer found" in text
    assert "1 2 3 ⟨78%⟩0 5 6 4 ⟨3%⟩" in text

    for where in ({"origin": "evaluation at step 0"}, {"note": TrainingNote(id="t", dropped="low_std")}):
        text = shown(trajectory, verbose=True, **where)
        assert "4 of 8 sampled (50.0%), mean log-probability -1.065" in text
        assert "of 8 trained" not in text and "sampled, context, ⟨" in text


def test_tokens_are_colored_by_the_mask(trajectory: Trajectory, tokenizer_folder: Path) -> None:
    console = Console(width=200, color_system="truecolor", force_terminal=True)
    tokens = TokenTexts(tokenizer_folder)
    for call, result in ((TRAINED, CONTEXT), (CONTEXT, TRAINED)):
        segments = list(console.render(render_trajectory(trajectory, verbose=True, tokens=tokens)))
        styles = {segment.text.strip(): str(segment.style) for segment in segments}
        assert (styles["<call>"], styles["result"]) == (call, result)
        trajectory.samples[0].loss_mask[2:5] = [0, 1, 1]


def test_hostile_text_cannot_act_on_the_terminal(trajectory: Trajectory) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07[bold red]boo[/]\u202egnp.exe\r[/nonsense"
    trajectory.scenario.question = evil
    trajectory.scenario.answer = evil
    trajectory.scenario.inbox_address = evil
    trajectory.messages[2] = Message("assistant", evil, [ToolCall(evil, {evil: evil})], parse_error=evil)
    trajectory.messages[3] = Message("tool", f'{{"{evil}', name=evil)
    trajectory.messages.append(Message("tool", '[{"body": "\\u001b[31m\\u202e"}]', name="read_email"))
    trajectory.final_answer = evil
    trajectory.final_sources = [evil]
    trajectory.rubric = {evil: evil, "answer_correct": False}
    trajectory.reward_terms = {evil: -1.0}
    trajectory.exception = evil
    text = shown(trajectory, verbose=True, title=evil)
    assert not set(text) & {"\x1b", "\x07", "\r", "\u202e"}
    assert "[bold red]boo[/]" in text and "[/nonsense" in text and "␛[2J" in text
    assert "␛[31m<U+202E>" in text


def test_terms_that_add_nothing_and_the_rest_of_long_ids_are_not_shown(trajectory: Trajectory) -> None:
    trajectory.final_sources = ["<m1@x>", "Z" * 5000]
    outcome = shown(trajectory).partition("Outcome")[2]
    assert "<m1@x>, " in outcome and outcome.count("Z") == 200 and "…" in outcome
    trajectory.reward_terms = {"outcome": 0.0, "found": 0.1, "few_turns": 0.0}
    text = shown(trajectory)
    assert "outcome" in text and "found" in text and "few_turns" not in text


def test_one_who_does_not_know_is_not_wrong_and_one_that_broke_has_crashed(trajectory: Trajectory) -> None:
    trajectory.rubric = {"answer_correct": False, "attempted_answer": False, "returned_i_dont_know": True}
    trajectory.final_answer = "I don't know"
    assert "Verdict      did not know" in shown(trajectory)
    trajectory.rubric["returned_i_dont_know"], trajectory.final_answer = False, None
    assert "Verdict      no answer" in shown(trajectory)
    trajectory.rubric["attempted_answer"], trajectory.final_answer = True, "Bob"
    assert "Verdict      wrong" in shown(trajectory)
    trajectory.messages, trajectory.turns, trajectory.samples = [], [], []
    trajectory.stop_reason, trajectory.exception = StopReason.EXCEPTION, "OSError: disk full"
    trajectory.rubric, trajectory.final_answer = {}, None
    text = shown(trajectory, verbose=True)
    assert "OSError: disk full" in text and "Verdict      crashed" in text and "Answer       none given" in text


def test_where_tokens_have_advantages_of_their_own_theirs_are_shown(
    trajectory: Trajectory, tokenizer_folder: Path
) -> None:
    worth = [None, None, 0.5, -0.25, None, None, 1.0, 0.75]
    note = TrainingNote(id="t-7", samples=[SampleNote(advantages=worth)])
    text = shown(trajectory, verbose=True, tokens=TokenTexts(tokenizer_folder), note=note)
    assert "Advantage    +0.5000 on average, -0.2500 to +1.0000 by token" in text
    assert "Who paid<call>⟨78% +0.50⟩<|end|>⟨-0.25⟩ result⏎" in text
    assert "⟨probability of a sampled token below 99%, its advantage⟩" in text
