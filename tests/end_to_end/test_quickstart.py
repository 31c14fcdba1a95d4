"""The quickstart as README.md, docs/index.md and docs/start/quickstart.md show it, and the policy it rests on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.commands import begin, exit_code
from runs.run_files import write

from emailrl.agent.task import prompts
from emailrl.agent.tools import tool_schemas
from emailrl.base.errors import UsageError
from emailrl.cli.quickstart import SETTINGS, free_folder, quickstart
from emailrl.engines.renderer import ChatRenderer
from emailrl.mail.demo import demo_questions
from emailrl.model.resolve import resolve_model
from emailrl.records.trajectory import Message
from emailrl.settings import AgentSettings

NANO = Path(resolve_model("nano"))


def emailrl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "emailrl", *arguments], cwd=cwd, capture_output=True, text=True)


def test_nano_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in NANO.iterdir()) <= 15_000_000


def test_nano_reads_todays_prompt_in_few_tokens() -> None:
    """Its tokenizer holds the prompt's and the tools' fixed phrases: a change of theirs asks for a new nano."""
    from transformers import AutoTokenizer

    scenario = demo_questions(42)[0]
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(NANO), tool_schemas())
    messages = [Message("system", prompts(scenario, AgentSettings(max_turns=6))[0]), Message("user", scenario.question)]
    assert len(renderer.start(messages).ids) <= 70


def test_folders_are_never_overwritten(tmp_path: Path) -> None:
    wanted = tmp_path / "quickstart"
    assert free_folder(wanted) == wanted
    (wanted / "notes").mkdir(parents=True)
    assert free_folder(wanted) == tmp_path / "quickstart-2"
    for is_set_up in (False, True):
        if is_set_up:
            (wanted / "emailrl.toml").write_text('model_name = "my/model"\n')
        for overwrite, said in ((False, "not empty"), (True, "something other")):
            with pytest.raises(UsageError, match=said):
                quickstart(out=wanted, overwrite=overwrite)
    assert (wanted / "emailrl.toml").read_text() == 'model_name = "my/model"\n'
    (wanted / "emailrl.toml").write_text(SETTINGS)
    assert free_folder(wanted) == wanted  # begun and not finished: taken up again
    (wanted / "quickstart.json").touch()
    assert free_folder(wanted) == tmp_path / "quickstart-2"


def test_an_interrupt_says_what_is_kept_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("emailrl.measure.benchmark.run_benchmark", interrupted)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        quickstart()
    told = capsys.readouterr().err
    assert "Loading the model ..." in told
    assert "Benchmarking nano on questions about held-out mailboxes" in told
    assert told.splitlines()[-1] == "Stopped: training had not started. Run the same command again to continue."
    write(tmp_path / "quickstart/outputs/grpo_masked/checkpoint-3", step=3)
    with pytest.raises(KeyboardInterrupt):
        quickstart()
    told = " ".join(capsys.readouterr().err.split())
    assert "Stopped: training up to step 3 is saved in quickstart. Run the same command again to continue." in told


def test_a_small_one_leaves_a_page_and_a_folder_for_bare_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = SETTINGS.replace("test_set_size = 300", "test_set_size = 4")
    fewer = fewer.replace("eval_dataset_size = 75", "eval_dataset_size = 2").replace("batch_size = 8", "batch_size = 2")
    monkeypatch.setattr("emailrl.cli.quickstart.SETTINGS", fewer)
    assert exit_code(begin(tmp_path, "quickstart", "--max-steps", "1", "--out", "demo", "--json")) == 0
    said, folder = (tmp_path / "output.txt").read_text(), tmp_path / "demo"
    outcome = json.loads(said.splitlines()[-1])
    assert outcome["before"]["num_questions"] == outcome["after"]["num_questions"] == 4 and "cd demo && " in said
    assert "view demo/outputs # serves the page\n" in said
    assert Path(outcome["page"]) == folder / "quickstart.html" and "redacted" in Path(outcome["page"]).read_text()
    (folder / ".env").write_text("TEST_SET_SIZE=2\nEVAL_DATASET_SIZE=2\n")
    for command in ("gen-db", "train --mode masked", "benchmark --sequential", "inspect-trajectory --verbose"):
        assert exit_code(begin(folder, *command.split())) == 0, (folder / "output.txt").read_text()
    assert (folder / "outputs/grpo_masked-2/best_model/metadata.json").is_file()


@pytest.mark.slow
def test_accuracy_rises_and_the_four_commands_run_bare(tmp_path: Path) -> None:
    done = emailrl("quickstart", "--out", "demo", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Next: cd demo && " in done.stderr
    assert "Benchmarking the trained policy on questions about held-out mailboxes" in done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    before, after = outcome["before"], outcome["after"]
    assert before["num_questions"] == after["num_questions"] == 300
    assert 0.3 <= before["accuracy"] <= 0.5
    assert after["accuracy"] - before["accuracy"] >= 0.25
    assert after["accuracy_low"] > before["accuracy_high"]
    assert Path(outcome["curve"]).read_bytes().startswith(b"\x89PNG")
    folder = tmp_path / "demo"
    assert Path(outcome["page"]) == folder / "quickstart.html" and (folder / "quickstart.html").stat().st_size > 500_000
    assert Path(outcome["run_dir"]).is_relative_to(folder)
    (folder / ".env").write_text("TEST_SET_SIZE=5\nMAX_STEPS=1\nEVAL_DATASET_SIZE=5\n")
    for command in (["gen-db"], ["train", "--mode", "masked"], ["benchmark", "--sequential"],
                    ["inspect-trajectory", "--verbose"]):  # fmt: skip
        done = emailrl(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
    assert (folder / "outputs" / "grpo_masked-2" / "best_model" / "metadata.json").is_file()
