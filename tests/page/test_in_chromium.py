"""The page in a browser: what it draws of a run, and what its address selects."""

from __future__ import annotations

import html
import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from chromium import needs_chromium, shown
from page.conftest import WRONG, make_run, write_weights, written
from tiny import make_metadata

from emailrl.base.disk import Lock
from emailrl.base.errors import UsageError
from emailrl.checkpoints import write_checkpoint
from emailrl.page.build import PageData, page
from emailrl.page.place import place_of, place_of_several, run_record, runs_record
from emailrl.page.server import PageServer, Served
from emailrl.records import write_records, write_trajectories
from emailrl.records.trajectory import TokenSample, Trajectory


@pytest.fixture
def file(tmp_path: Path, trajectory: Trajectory) -> Path:
    """The page of a run that was confirmed on other questions, and tested on eight before and after."""
    folder = make_run(tmp_path / "run", trajectory, groups=1)
    (folder / "confirmed.json").write_text(json.dumps({"step": 2, "accuracy": 0.625, **HELD}))
    (folder / "status.json").write_text(json.dumps({"state": "finished", "reason": "all steps done", "at": 1.0}))
    weights = write_weights(folder / "best_model", b"trained")
    for name, right, adapter in (("before", 1, None), ("after", 8, weights)):
        write_benchmark(tmp_path / "benchmarks" / name, trajectory, {"nano": (right, None)}, asked=8, adapter=adapter)
    return written(folder)


MEASURED = {"num_inboxes": 3, "measured_at": "2026-11-30T09:00:00+00:00", "complete": True, "base_model": "nano"}
HELD = {"accuracy_low": 0.0, "accuracy_high": 1.0, "reward": 0.5, "num_questions": 1, "num_turns": 2.0}


def write_benchmark(
    folder: Path,
    trajectory: Trajectory,
    models: dict[str, tuple[int, str | None]],
    *,
    asked: int,
    adapter: str | None = None,
) -> None:
    """The results of models, each with its number of right answers and its checkpoint, and their trajectories;
    ``adapter`` is the hash of the weights that all have."""
    results = []
    for number, (model, (right, checkpoint)) in enumerate(models.items()):
        file = folder / "trajectories" / f"{number:02}-{Path(model).name}.jsonl"
        scenarios = [
            replace(trajectory.scenario, id=f"t{n}", question=f"Who paid bill {n}?", kind=("phone", "room")[n % 2])
            for n in range(asked)
        ]
        made = [
            replace(trajectory, id=f"{model}-{n}", scenario=each, rubric=trajectory.rubric if n < right else WRONG)
            for n, each in enumerate(scenarios)
        ]
        write_trajectories(file, made)
        numbers = HELD | MEASURED | {"accuracy": right / asked, "num_questions": asked}
        results.append({"model": model, "trajectories": str(file), "checkpoint": checkpoint} | numbers)
    (folder / "results.json").write_text(json.dumps({"results": results, "comparisons": []}))
    conditions = {"adapters": [adapter] * len(models), "database": "d", "questions": "q"}
    (folder / "conditions.json").write_text(json.dumps(conditions))


def text_of(markup: str, name: str) -> str:
    """The text inside the element of an id."""
    [content] = re.findall(rf'id="{name}"[^>]*>(.*?)<', markup)
    return str(content)


@needs_chromium
def test_the_overview_has_curves_failures_and_changed_questions(file: Path, tmp_path: Path) -> None:
    markup = shown(file, tmp_path / "profile", "")
    for title in ("Accuracy", "Reward", "Entropy", "Trainable share of tokens", "Seconds by phase"):
        assert (f"<strong>{title}</strong>" in markup) == (title != "Trainable share of tokens")  # not recorded
    # Of eight pairs, seven differ, all in one direction: p = 2 / 2^7 = 0.015625.
    assert "<h2>Test accuracy</h2>" in markup and "12.5%" in markup and '<span class="is">100.0%</span>' in markup
    assert "better on 7, worse on 0" in markup and "p = 0.016 in an exact paired test over 8 questions" in markup
    for name, value in (
        ("Confirmed", "62.5%"),
        ("Selected the model", "100.0%"),
        ("Time", "7 s"),
        ("Ended", "Finished"),
    ):
        assert f'<dt>{name}</dt><dd><span class="value">{value}</span>' in markup
    assert "validation from 0.0% at step 0 to 100.0% at step 2" in markup  # what a screen reader says of the curve
    # Rewards 0, 1, 2 of one group: no interval from a single group, so no band is drawn.
    assert 'class="band' not in markup
    assert 'Wrong before, correct after <span class="count">7</span>' in markup
    assert "7 trajectories: wrong, gold email not found, test before training" in markup


@needs_chromium
@pytest.mark.parametrize(
    ("fragment", "counted"),
    [
        ("#view=list", "24 trajectories"),
        ("#view=list&source=step&step=2", "3 of 24 trajectories"),
        ("#view=list&verdict=correct", "12 of 24 trajectories"),
        ("#view=list&file=step-000001.jsonl&rmin=0.5&rmax=2", "2 of 24 trajectories"),
        ("#view=list&q=BOB", "1 of 24 trajectories"),
        ("#view=list&q=%20ann%20%20PAID", "24 trajectories"),  # in a mail, over what marks a hit
        (
            "#view=list&q=you%20search",
            "0 of 24 trajectories: no trajectory matches the filters",
        ),  # in the prompt of all
    ],
)
def test_filters_are_in_the_address(file: Path, tmp_path: Path, fragment: str, counted: str) -> None:
    assert text_of(shown(file, tmp_path / "profile", fragment), "counted") == counted


def done(file: Path, profile: Path, *acts: str, fragment: str = "", size: str = "1280,800") -> list[str]:
    """What is focused after each act of a reader: its id, else its text."""
    script = f"""<script>(async () => {{
      const settled = () => new Promise((next) => setTimeout(next, 50));
      while (!document.documentElement.dataset.ready) await settled();
      const focused = [];
      for (const act of [{",".join(f"() => {{ {act} }}" for act in acts)}]) {{
        act();
        await settled();
        focused.push(document.activeElement.id || document.activeElement.textContent);
      }}
      document.body.dataset.focused = JSON.stringify(focused);
    }})();</script>"""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", file.read_text(encoding="utf-8"))
    acting = file.with_name("acting.html")
    acting.write_text(page + script, encoding="utf-8")
    [found] = re.findall('data-focused="(.*?)"', shown(acting, profile, fragment, f"--window-size={size}"))
    return list(json.loads(html.unescape(found)))


@needs_chromium
def test_the_focus_goes_where_the_reader_goes(file: Path, tmp_path: Path) -> None:
    to_list = 'const link = document.querySelector(".share a"); link.focus(); link.click();'
    key = "dispatchEvent(new KeyboardEvent('keydown', {key: '%s', bubbles: true}));"
    back = "document.activeElement." + key % "Escape"
    pick = "document.querySelector('.row').click();"
    assert done(file, tmp_path / "wide", to_list, back, back) == ["rows", "rows", "main"]
    # On a phone, list and trajectory take each other's place.
    assert done(file, tmp_path / "phone", to_list, pick, back, size="500,800") == ["rows", "detail", "rows"]
    zoom = "const field = document.querySelector('.controls input'); field.focus(); document.body." + key % "1"
    assert done(file, tmp_path / "still", zoom) == [""]  # which stays: nothing was left


@needs_chromium
def test_the_list_is_collapsed_by_question_with_rewards_as_dots(file: Path, tmp_path: Path) -> None:
    markup = shown(file, tmp_path / "profile", "#view=list&rows=question&sort=reward,%20high%20first")
    assert text_of(markup, "counted") == "24 trajectories of 9 questions" and 'role="tree"' in markup
    assert markup.count('aria-expanded="false"') == 9 and 'aria-level="2"' not in markup
    # Of the question of the run: three rollouts in each of two steps, and an evaluation before and after.
    drawn = [re.findall('class="(right|wrong)"', dots) for dots in re.findall(r'<svg class="dots".*?</svg>', markup)]
    assert [(dots.count("right"), dots.count("wrong")) for dots in drawn] == [(3, 5), (2, 0), *[(1, 1)] * 7]
    newest = shown(file, tmp_path / "profile", "#view=list&sort=newest%20first")
    assert re.findall('<div class="question"[^>]*>([^<]*)<', newest)[:2] == ["Who paid bill 7?", "Who paid bill 6?"]
    unfolded = shown(file, tmp_path / "profile", "#view=list&rows=question&t=step-000001.jsonl%400")
    assert unfolded.count('aria-expanded="true"') == 1 and 'aria-setsize="17"' in unfolded  # 9 + 8


@needs_chromium
def test_a_group_and_a_question_stand_side_by_side(file: Path, tmp_path: Path) -> None:
    markup = shown(file, tmp_path / "profile", "#view=list&t=step-000001.jsonl%400&side=group")
    columns = re.findall(r'<section class="column" aria-label="([^"]*)"', markup)
    assert columns == ["Rollout 1", "Rollout 2", "Rollout 3"]
    assert "rewards from 0 to 2, mean 1" in markup.replace(".00", "")
    markup = shown(file, tmp_path / "profile", "#view=list&t=eval-000002.jsonl%400&side=question")
    columns = re.findall(r'<section class="column" aria-label="([^"]*)"', markup)
    assert columns == ["evaluation at step 0", "evaluation at step 2"]


@needs_chromium
def test_a_question_goes_through_its_evaluations(file: Path, tmp_path: Path) -> None:
    markup = shown(file, tmp_path / "profile", "#view=list&t=eval-000002.jsonl%400&side=through")
    said = 'type="range" min="0" max="1" step="1" value="1" aria-label="Evaluation"'
    assert said in markup and 'aria-valuetext="evaluation at step 2: correct, reward 1.380"' in markup
    ticks = re.findall(r'<button[^>]*title="(evaluation[^"]*)"', markup)
    assert ticks == ["evaluation at step 0: wrong, reward 1.380", "evaluation at step 2: correct, reward 1.380"]
    assert "The same tokens as the one before." in markup and ">final answer<" in markup


@needs_chromium
def test_a_run_without_trajectories_shows_its_curves_and_says_so(tmp_path: Path) -> None:
    steps = [{"step": 1, "loss": 0.5, "val_loss": None}, {"step": 2, "loss": 0.25, "val_loss": 0.4}]
    write_records(tmp_path / "sft" / "metrics.jsonl", steps)
    target = written(tmp_path / "sft")
    markup = shown(target, tmp_path / "profile")
    assert "loss from 0.500 at step 1 to 0.250 at step 2; validation from 0.400 at step 2" in markup
    assert "0.500 → 0.250" in markup and "This run kept no trajectories" in markup
    assert "Click a point" not in markup and "Crashed" not in markup
    assert "No trajectories" in shown(target, tmp_path / "profile", "#view=list")


@needs_chromium
def test_two_benchmarked_policies_are_compared_by_name(tmp_path: Path, trajectory: Trajectory) -> None:
    # The benchmark has the trained policy first; the page is about what came of the untrained one.
    checkpoint = "/runs/ann/outputs/grpo/best_model"
    write_benchmark(tmp_path / "bench", trajectory, {checkpoint: (11, checkpoint), "small": (1, None)}, asked=12)
    target = written(tmp_path / "bench")
    markup = shown(target, tmp_path / "profile")
    assert re.search(r"<h1[^>]*>small → grpo/best_model</h1>", markup)
    assert "<title>small → grpo/best_model · emailrl</title>" in markup
    assert '<span class="was">8.3%</span>' in markup and '<span class="is">91.7%</span>' in markup
    assert 'Only grpo/best_model was correct <span class="count">10</span>' in markup
    assert 'Only small was correct <span class="count">0</span>' in markup
    assert 'Both were wrong <span class="count">1</span>' in markup
    # Ten of twelve differ, all in one direction: 2 / 2^10; and 10 ± 2.201 √(12² / 11 · 10/12 · 2/12) of 12.
    assert "+83.3 points (95% interval +58.6 to +100), p = 0.002 in an exact paired test over 12 questions" in markup
    assert '<span class="who">2 more</span>' in markup  # eight are listed, the others folded
    # The first eleven are right, of which six ask for a phone and five for a room: where it is weakest comes first.
    assert markup.index("5 of 6 correct: room, grpo/best_model") < markup.index(
        "6 of 6 correct: phone, grpo/best_model"
    )
    assert "0 of 6 correct: room, small" in markup and "By inbox" not in markup  # there is only one
    rows = re.findall(r'<tr><th scope="row"[^>]*>([a-z ]+)</th>((?:<td[^>]*>[^<]*</td>)+)</tr>', markup)
    metrics = {name: re.findall(">([^<]+)<", cells) for name, cells in rows}
    assert metrics["accuracy"] == ["8.3%", "91.7%"] and metrics["questions"] == ["12", "12"]
    kind = shown(target, tmp_path / "profile", "#view=list&kind=room&verdict=correct")
    assert text_of(kind, "counted") == "5 of 24 trajectories"
    side = shown(target, tmp_path / "profile", "#view=list&t=bench/01-small.jsonl%400&side=question")
    assert ">email cited</span>" in side
    one = shown(target, tmp_path / "profile", "#view=list&t=bench/01-small.jsonl%400")
    strip = one[one.index(">The same question<") :]
    assert re.findall(r'<span class="under">([^<]*)<', strip)[:2] == ["grpo/best_model", "small"]


@needs_chromium
def test_a_served_benchmark_is_live_only_while_it_is_played(tmp_path: Path, trajectory: Trajectory) -> None:
    write_benchmark(tmp_path / "bench", trajectory, {"nano": (1, None)}, asked=2)
    with PageServer(Served(tmp_path / "bench", model_name="nano")) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        title, live = (re.compile(each) for each in ("<title>(.*?)</title>", 'id="live">(.*?)<'))

        def state() -> tuple[str, str]:
            markup = shown(server.address, tmp_path / "profile")
            return title.findall(markup)[0], live.findall(markup)[0]

        with Lock(tmp_path / "bench" / "conditions.json"):
            assert state() == ("nano · emailrl", "live")
        assert state() == ("finished · nano · emailrl", "Finished")
        results = tmp_path / "bench" / "results.json"
        results.write_text(results.read_text().replace('"complete": true', '"complete": false'))
        assert state() == ("incomplete · nano · emailrl", "Incomplete")
        results.unlink()
        assert state() == ("bench · emailrl", "Ended")  # interrupted before it had anything to say
        server.shutdown()


@needs_chromium
@pytest.mark.parametrize(
    ("states", "kind", "said"),
    [(("finished", "finished"), "done", "2 finished"), (("finished", "failed"), "warn", "1 failed, 1 finished")],
)
def test_served_runs_are_done_only_if_all_finished(tmp_path: Path, states: list[str], kind: str, said: str) -> None:
    for number, state in enumerate(reversed(states)):
        write_records(tmp_path / "runs" / f"run-{number}" / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
        (tmp_path / "runs" / f"run-{number}" / "status.json").write_text(json.dumps({"state": state, "at": 1.0}))
    with PageServer(Served(tmp_path / "runs", model_name="nano")) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        markup = shown(server.address, tmp_path / "profile")
        server.shutdown()
    [found] = re.findall('<span class="live ([^"]*)" id="live">([^<]*)<', markup)
    assert found == (kind, said)


@needs_chromium
def test_what_the_machine_did_is_drawn_over_the_steps(tmp_path: Path) -> None:
    rolled = {"num_trajectories": 9, "exceptions": 1, "duration": 3.0, "total_tokens": 480}
    spent = {"rollout": 4.0, "update": 8.0, "evaluation": 2.0, "total": 14.0}
    step = rolled | {"seconds": spent, "peak_memory_gib": 6.0, "gpu_memory_gib": 7.5, "servers_up": None}
    # Of rollouts beside the updates, the "rollout" phase is the trainer's wait for them.
    waits = {"trainer_wait": 3.0, "sampler_wait": 1.5, "handover": 1.0, "adapter_load": 2.0}
    ahead = step | {"seconds": spent | waits, "servers_up": 2}
    write_records(tmp_path / "run" / "metrics.jsonl", [{"step": 1} | step, {"step": 2} | ahead])
    markup = shown(written(tmp_path / "run"), tmp_path / "profile")
    said = [html.unescape(each) for each in re.findall('role="img" aria-label="([^"]*)"', markup)]
    for each in (
        "Seconds by phase: rollout 8 s in all; update 16 s in all; evaluation 4 s in all",
        "Tokens a second: tokens from 40 at step 1 to 40 at step 2",
        "Rollouts a second: rollouts from 2.250 at step 1 to 0.750 at step 2",  # 9 in 4 seconds, 9 in 12
        "Rollouts in flight: rollouts from 6 at step 1 to 2 at step 2",  # 8 of 3 seconds each
        "trainer, for rollouts from 3 at step 2 to 3 at step 2; samplers, for the trainer from 1.500 at",
        "GPU memory, GiB: peak of the update from 6 at step 1 to 6 at step 2; all processes, after it from 7.5 at",
        "Servers in use: servers from 2 at step 2 to 2 at step 2",
    ):
        assert any(each in one for one in said), (each, said)


@needs_chromium
@pytest.mark.parametrize(("last", "kind"), [(0.25, "is fell"), (0.75, "is"), (0.5, "is")])
def test_an_evaluation_that_fell_does_not_look_like_a_gain(tmp_path: Path, last: float, kind: str) -> None:
    write_records(tmp_path / "run" / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
    evaluations = [{"step": step, "accuracy": accuracy, **HELD} for step, accuracy in ((0, 0.5), (1, last))]
    write_records(tmp_path / "run" / "evaluations.jsonl", evaluations)
    status = {"state": "running", "step": 1, "steps": 9, "phase": "", "done": 0, "rollouts": 0, "at": time.time()}
    (tmp_path / "run" / "status.json").write_text(json.dumps(status))
    assert f'<span class="{kind}">{last:.1%}</span>' in shown(written(tmp_path / "run"), tmp_path / "profile")


@needs_chromium
def test_no_two_ticks_of_an_axis_read_the_same(tmp_path: Path) -> None:
    # Of three intervals, the round step is 5e-6 for 0 to 1.4e-5, and 0.001 for 2.301 to 2.303.
    values = [
        {"step": 1, "sampler_gap_max": 1e-6, "loss": 2.301},
        {"step": 2, "sampler_gap_max": 1.4e-5, "loss": 2.303},
    ]
    write_records(tmp_path / "run" / "metrics.jsonl", values)
    markup = shown(written(tmp_path / "run"), tmp_path / "profile")
    ticks = re.findall(r'<text class="tick"[^>]*text-anchor="end"[^>]*>([^<]*)<', markup)
    assert ticks == ["2.301", "2.302", "2.303", "2", "0", "5e-6", "1e-5", "1.5e-5", "2"]  # each axis of steps ends at 2


@needs_chromium
def test_one_evaluation_is_no_highest_of_several(tmp_path: Path) -> None:
    write_records(tmp_path / "run" / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
    evaluations = [{"step": step, "accuracy": step / 4, **HELD} for step in (0, 1)]
    for count, said in ((1, "1 validation question; the only evaluation"), (2, "the highest of 2 evaluations, so too")):
        write_records(tmp_path / "run" / "evaluations.jsonl", evaluations[:count])
        assert said in shown(written(tmp_path / "run"), tmp_path / "profile")


@needs_chromium
def test_two_benchmarks_are_shown_as_one_with_both_and_three_in_a_table(tmp_path: Path, trajectory: Trajectory) -> None:
    home = tmp_path / "benchmarks"
    for name, right, checkpoint in (("b", 1, None), ("a", 11, "/runs/ann/outputs/grpo/best_model")):
        write_benchmark(home / name, trajectory, {checkpoint or "small": (right, checkpoint)}, asked=12)
    assert place_of(home) == place_of_several([home / "a", home / "b"])  # the untrained one first
    for name, limit in (("b", 4), ("a", 6)):
        conditions = {"database": "d", "questions": "q", "adapters": [None], "limits": {"max_turns": limit, "top_k": 0}}
        (home / name / "conditions.json").write_text(json.dumps(conditions))
    assert place_of(home).pair and ">4 → 6</td>" in shown(written(home), tmp_path / "profile", "#view=about")
    markup = shown(written(home), tmp_path / "profile")
    assert "base model nano" in markup and "measured 2026-11-30 09:00" in markup and "from 3 inboxes" in markup
    assert re.search(r"<h1[^>]*>small → grpo/best_model</h1>", markup) and ">95% interval" in markup
    assert '<span class="was">8.3%</span>' in markup and "Only small was correct" in markup
    write_benchmark(home / "c", trajectory, {"other": (2, None)}, asked=12)
    assert place_of(home).runs == (home / "a", home / "b", home / "c")
    markup = shown(written(home), tmp_path / "profile")
    assert "8.3%" in markup and "91.7%" in markup and "<h2>Curves" not in markup and "[null]" not in markup
    (home / "b" / "conditions.json").write_text('{"questions": "others"}')
    assert place_of_several([home / "a", home / "b"]).pair is None


def test_a_benchmark_is_found_by_the_weights_that_it_measured(tmp_path: Path, trajectory: Trajectory) -> None:
    def tests_of(run: Path) -> tuple[float | None, float] | None:
        pair = place_of(run).pair
        return pair and (pair.before and pair.before["accuracy"], pair.after["accuracy"])

    home = tmp_path / "outputs"
    for name, content, parent in (("grpo", b"one", None), ("grpo-2", b"two", "one:2"), ("grpo-3", b"three", None)):
        write_records(home / name / "metrics.jsonl", [{"step": 1, "loss": 0.5}])
        run_id = {"grpo": "one"}.get(name, name)
        weights = write_weights(home / name / "best_model", content, run_id=run_id, parent=parent)
        if name != "grpo-3":
            right = {"nano": (4 if parent else 2, None)}
            write_benchmark(home / "benchmarks" / name, trajectory, right, asked=8, adapter=weights)
    write_benchmark(home / "benchmarks" / "base", trajectory, {"nano": (1, None)}, asked=8)
    assert tests_of(home / "grpo") == (0.125, 0.25)
    assert tests_of(home / "grpo-2") == (0.25, 0.5)  # from its parent's, not the base model's
    assert tests_of(home / "grpo-3") is None
    moved = home.rename(tmp_path / "elsewhere")
    (moved / "grpo").rename(moved / "renamed")
    (moved / "grpo-3").rename(moved / "grpo")  # has the name of the run that was measured, not its weights
    assert tests_of(moved / "renamed") == (0.125, 0.25) and tests_of(moved / "grpo-2") == (0.25, 0.5)
    assert tests_of(moved / "grpo") is None
    write_weights(moved / "renamed" / "best_model", b"trained further")
    assert tests_of(moved / "renamed") is None


@needs_chromium
def test_before_anything_is_measured_the_page_says_what_runs_and_how_far_it_is(tmp_path: Path) -> None:
    now = {"state": "running", "step": 0, "steps": 9, "phase": "evaluation after step 0", "done": 14, "rollouts": 75}
    (tmp_path / "status.json").write_text(json.dumps(now | {"at": time.time()}))
    lines = ["=" * 60, "Model: nano | algorithm: grpo", "Learning rate: 0.002 (constant)", "=" * 60, "Other: no"]
    (tmp_path / "training.log").write_text("".join(f"2026-11-30 09:00:00,000 INFO {line}\n" for line in lines))
    told = {"Model": "nano", "algorithm": "grpo", "Learning rate": "0.002 (constant)"}
    assert run_record(place_of(tmp_path), [])["settings"] == {"run": told}
    markup = shown(written(tmp_path), tmp_path / "profile")
    assert ">14 of 75</span>" in markup and ">0.002 (constant)</td>" in markup and "kept no trajectories" not in markup
    write_records(tmp_path / "metrics.jsonl", [{"step": 1, "accuracy": 0.25, "reward_mean": 0.5}])
    (tmp_path / "status.json").write_text(json.dumps(now | {"step": 1, "at": time.time()}))
    tiles = tiles_of(shown(written(tmp_path), tmp_path / "profile"))
    assert tiles == {"Steps": "1 of 9", "Training accuracy": "25.0%", "Training reward": "0.500"}
    (tmp_path / "status.json").write_text(json.dumps(now | {"state": "finished", "at": time.time()}))
    assert tiles_of(shown(written(tmp_path), tmp_path / "profile")) == {"Ended": "Finished"}


def tiles_of(markup: str) -> dict[str, str]:
    return dict(re.findall(r'<dt>([^<]*)</dt><dd><span class="value">([^<]*)<', markup))


@needs_chromium
def test_several_runs_are_in_one_table_and_over_each_other(tmp_path: Path) -> None:
    for name, rate, ends in (("slow", 1e-4, (0.25, 0.5, 0.5)), ("fast", 1e-3, (0.25, 0.75, 0.5))):
        folder = tmp_path / name
        write_records(folder / "metrics.jsonl", [{"step": n, "loss": rate, "reward_mean": n * 1.0} for n in (1, 2)])
        write_records(folder / "evaluations.jsonl", [{"step": n, "accuracy": end} for n, end in enumerate(ends)])
        given = {"learning_rate": rate, "seed": 1, "resume": name}  # the last is no method
        write_checkpoint(folder / "final", make_metadata(kind="final", settings={"training": given}), lambda _: None)
    target = tmp_path / "runs.html"
    data = PageData(runs_record([tmp_path / "slow", tmp_path / "fast"]))
    assert [run["given"] for run in data.run["runs"]] == [{"learning_rate": 1e-4}, {"learning_rate": 1e-3}]
    target.write_text(page(data), encoding="utf-8")
    markup = shown(target, tmp_path / "profile", "#order=best&by=learning_rate&smooth=yes")
    rows = re.findall(r'<th scope="row" class="key.*?</tr>', markup)
    cells = [re.sub(r"<[^>]+>", " ", row).split() for row in rows]
    # The area under 25%, 75%, 50% is (0.5 + 0.625) / 2; under 25%, 50%, 50% it is (0.375 + 0.5) / 2.
    assert cells == [
        ["fast", "75.0%", "step", "1", "50.0%", "56.3%", "2", "0.001"],
        ["slow", "50.0%", "step", "1", "50.0%", "43.8%", "2", "0.0001"],
    ]
    assert "They differ in learning rate." in markup and 'aria-sort="descending"' in markup
    assert "slow, 0.0001 from 25.0% at step 0 to 50.0% at step 2; fast, 0.001 from" in markup
    assert markup.count('class="line raw series-0"') == markup.count('class="line raw series-1"') == 2  # reward, loss
    zoomed = shown(target, tmp_path / "profile", "#from=1&to=2")
    assert "slow from 50.0% at step 1 to 50.0% at step 2; fast from 75.0%" in zoomed and ">All steps<" in zoomed
    assert "No value in these steps." in shown(target, tmp_path / "profile", "#from=0&to=0")
    shutil.copytree(tmp_path / "fast", tmp_path / "fast-again")
    write_records(tmp_path / "fast-again" / "evaluations.jsonl", [{"step": 0, "accuracy": 0.25}])
    runs = PageData(runs_record([tmp_path / "slow", tmp_path / "fast", tmp_path / "fast-again"]))
    target.write_text(page(runs), encoding="utf-8")
    markup = shown(target, tmp_path / "profile")  # colored by what several runs share
    tiles = [re.sub(r"<[^>]+>", " ", tile).split() for tile in re.findall(r'class="tile">.*?</div>', markup)]
    assert [tile[3:5] for tile in tiles] == [["0.0001", "50.0%"], ["0.001", "37.5%"]]
    assert "mean of 2 runs: 50.0%, 25.0%" in markup
    with pytest.raises(UsageError, match="holds no metrics"):
        place_of_several([tmp_path / "slow", tmp_path])


@needs_chromium
def test_a_rollout_says_where_it_leaves_another_and_a_dead_link_that_it_is_one(
    tmp_path: Path, trajectory: Trajectory
) -> None:
    other = TokenSample()
    other.append_prompt([1, 2])
    other.append_sampled([3, 5], [-0.25, -0.01])  # the other sampled 3 0
    write_trajectories(tmp_path / "two.jsonl", [trajectory, replace(trajectory, id="u", samples=[other])])
    target = written(tmp_path / "two.jsonl")
    markup = shown(target, tmp_path / "profile", "#view=list&t=two.jsonl%400&side=group")
    [said] = re.findall(r'<p class="note">(Leaves this trajectory at token .*?)</p>', markup)
    assert re.sub(r"<[^>]+>", "", said) == "Leaves this trajectory at token 3: 1 2 3 5  instead of 0 "
    markup = shown(target, tmp_path / "profile", "#view=list&t=two.jsonl%4077")
    assert "This trajectory is not here" in markup and ">two.jsonl@77</code>, which this page does not hold." in markup
