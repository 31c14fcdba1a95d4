"""``emailrl rollout``, real parts end to end: questions, database, random policy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny import cut_matrices, make_checkpoint
from transformers import AutoTokenizer

from emailrl.agent.play import audit
from emailrl.measure.journal import Conditions
from emailrl.records import read_trajectories


def test_it_writes_trajectories_with_audited_tokens(emailrl, here: Path) -> None:
    code, out, err = emailrl("rollout", "--limit", 3, "--num-generations", 2, "--json")
    assert code == 0
    record = json.loads(out)
    assert record["num_trajectories"] == 6 and record["exceptions"] == 0 and record["seconds"] > 0
    path = here / "outputs" / "rollouts" / "rollout-001.jsonl"
    assert record["out"] == str(path)
    trajectories = list(read_trajectories(path))
    assert record["mean_reward"] == pytest.approx(sum(t.reward for t in trajectories) / 6)
    assert all(audit(trajectory) > 0 for trajectory in trajectories)
    assert {t.policy_version for t in trajectories} == {"model"}
    assert "accuracy" in err and "temperature 0.7" in err
    said = emailrl("rollout", "--limit", 1)[2]
    assert said.splitlines()[-1].endswith("emailrl inspect-trajectory outputs/rollouts/rollout-002.jsonl")


def test_the_same_seed_gives_the_same_tokens_and_nothing_is_replaced(emailrl, here: Path) -> None:
    for seed in (1, 1, 2):
        assert emailrl("rollout", "--limit", 2, "--seed", seed, "--temperature", 1)[0] == 0
    tokens = [
        [t.samples[0].token_ids for t in read_trajectories(here / f"outputs/rollouts/rollout-00{number}.jsonl")]
        for number in (1, 2, 3)
    ]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize("command", [("rollout", "--limit", "1"), ("benchmark", "--limit", "1")])
def test_an_adapter_that_does_not_fit_its_base_plays_nowhere(emailrl, here: Path, command: tuple[str, ...]) -> None:
    folder = make_checkpoint(here / "stranger", here / "model").path
    (cut_matrices(folder) / "metadata.json").unlink()
    code, out, err = emailrl(*command, "--checkpoint", "stranger")
    rejected = r"error: The adapter in stranger was rejected: its matrices for .* have size 1 × 1, .*"
    assert (code, out) == (1, "") and re.fullmatch(rejected, err.splitlines()[-1])


def test_a_checkpoint_plays_on_its_own_base_also_when_exported(emailrl, here: Path) -> None:
    best = make_checkpoint(here / "outputs" / "grpo_masked" / "best_model", here / "model")
    (here / "emailrl.toml").write_text((here / "emailrl.toml").read_text().replace('model_name = "model"\n', ""))
    assert emailrl("export", "--out", "exported")[0] == 0
    played = []
    for which, shown in (((), "outputs"), (("--checkpoint", "exported"), "exported")):  # bare: the newest best one
        code, out, err = emailrl("rollout", "--limit", 1, *which, "--temperature", 1, "--json")
        assert code == 0 and f"model with {shown}" in err
        played += read_trajectories(Path(json.loads(out)["out"]))
    assert {t.adapter_sha256 for t in played} == {best.metadata.files["adapter_model.safetensors"]}
    assert played[0].samples[0].token_ids == played[1].samples[0].token_ids


def test_nothing_is_made_or_replaced_before_there_is_something_to_write(emailrl, here: Path) -> None:
    assert emailrl("rollout", "--questions", "none.jsonl")[0] == 2
    assert emailrl("rollout", "--model", "nanno", "--out", "deep/er/mine.jsonl")[0] == 2
    assert not (here / "outputs").exists() and not (here / "deep").exists()
    (here / "mine.jsonl").write_text("precious\n")
    assert emailrl("rollout", "--limit", 1, "--out", "mine.jsonl")[0] == 2
    assert (here / "mine.jsonl").read_text() == "precious\n"
    assert emailrl("rollout", "--limit", 1, "--out", "mine.jsonl", "--overwrite")[0] == 0
    assert len(list(read_trajectories(here / "mine.jsonl"))) == 1
    (here / "taken").write_text("a file")
    code, _, err = emailrl("rollout", "--out", "taken/mine.jsonl")
    assert code == 2 and "taken is not writable" in err


def test_resuming_without_the_options_says_what_is_left_and_what_to_repeat(emailrl, here: Path) -> None:
    assert emailrl("rollout", "--limit", 2)[0] == 0
    code, _, err = emailrl("rollout", "--resume")
    assert code == 2 and "Nothing left to resume: outputs/rollouts/rollout-001.jsonl is complete." in err
    file = here / "outputs/rollouts/rollout-001.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    code, _, err = emailrl("rollout", "--resume")
    assert code == 2 and "num questions was 2, now 4. Repeat the original options with --resume, choose" in err
    assert emailrl("rollout", "--limit", 2, "--resume")[0] == 0
    assert len(list(read_trajectories(file))) == 2


@pytest.mark.parametrize("command", ["benchmark", "rollout"])
def test_trajectories_are_printed_as_the_settings_ask(emailrl, here: Path, command: str) -> None:
    _, out, error = emailrl(command, "--model", "model", "--limit", 2, "--verbose", "--json")
    assert error.startswith("Loading the model ...\n") and "Verdict" not in error and out.count("\n") == 1
    assert len(re.findall(r"^test-\S+: [a-z ]+, reward -?\d", error, re.MULTILINE)) == 2
    details = emailrl(command, "--model", "model", "--limit", 2, "--show-trajectory-details")[2]
    assert details.count("Verdict") == 2 and "sampled (" not in details
    tokens = emailrl(command, "--model", "model", "--limit", 1, "--show-trajectory-details", "--verbose")[2]
    assert "sampled (" in tokens and "token ids only" not in tokens


def test_a_name_that_another_process_plays_under_is_not_taken(emailrl, here: Path) -> None:
    folder = here / "outputs" / "rollouts"
    with Conditions(folder / "rollout-001.conditions.json", {}, resume=False):
        code, out, _ = emailrl("rollout", "--limit", 1, "--json")
        assert code == 0 and json.loads(out)["out"] == str(folder / "rollout-002.jsonl")
        for more in ((), ("--overwrite",)):
            code, _, err = emailrl("rollout", "--limit", 1, "--out", folder / "rollout-001.jsonl", *more)
            assert code == 1 and "Another process is writing" in err
    left = ["rollout-002.conditions.json", "rollout-002.jsonl", "rollout-002.jsonl.index"]
    assert sorted(file.name for file in folder.iterdir()) == left


STRIPS = """{{ enable_thinking }}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not preserve_thinking else m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_the_template_has_its_arguments_and_what_it_costs_is_said_first(emailrl, here: Path) -> None:
    code, out, err = emailrl("rollout", "--limit", 1, "--thinking", "off")
    assert (code, out) == (2, "") and err.splitlines()[-1].startswith("error: THINKING=off has no effect: the model's ")
    assert not (here / "outputs").exists()
    assert not any(line.startswith("Note: ") for line in emailrl("rollout", "--limit", 1)[2].splitlines())
    (here / "strips.jinja").write_text(STRIPS)
    toml = here / "emailrl.toml"
    toml.write_text(toml.read_text() + '[model]\nchat_template = "strips.jinja"\ntool_dialect = "hermes"\n')
    code, _, err = emailrl("rollout", "--limit", 1, "--thinking", "on")
    [note] = [line for line in err.splitlines() if line.startswith("Note: ")]
    assert (
        code == 0 and "up to 2 a rollout" in note and """CHAT_TEMPLATE_KWARGS='{"preserve_thinking": true}'""" in note
    )
    toml.write_text(toml.read_text() + "chat_template_kwargs = { preserve_thinking = true }\n")
    code, out, err = emailrl("rollout", "--limit", 1, "--thinking", "on", "--json")
    assert code == 0 and not any(line.startswith("Note: ") for line in err.splitlines())
    written = Path(json.loads(out)["out"])
    conditions = json.loads(written.with_suffix(".conditions.json").read_text())
    assert (conditions["thinking"], conditions["chat_template_kwargs"]) == ("on", '{"preserve_thinking": true}')
    [played] = read_trajectories(written)
    shown = played.samples[0].token_ids[: played.samples[0].loss_mask.index(1)]
    tokenizer = AutoTokenizer.from_pretrained(here / "model")
    assert tokenizer.decode(shown).startswith("True<|im_start|>system")
    code, _, err = emailrl("rollout", "--out", written, "--limit", 1, "--resume")
    assert code == 2 and "thinking was on, now null" in err


def test_a_checkpoint_is_played_with_its_own_settings(emailrl, here: Path) -> None:
    own, usual = {"chat_template_kwargs": '{"a": 1}', "short_message_ids": True}, {"count_matches": False}
    make_checkpoint(here / "best_model", here / "model", **own)
    make_checkpoint(here / "other", here / "model")
    for given, num_notes in ((), 0), (("--chat-template-kwargs", '{"b": 2}'), 1):
        for command in (("rollout", "--limit", 1, "--out", f"{num_notes}.jsonl"), ("ask", "When?")):
            code, _, err = emailrl(*command, "--checkpoint", "best_model", *given)
            told = """Note: best_model is played with its own CHAT_TEMPLATE_KWARGS={"a": 1}, not {"b": 2}."""
            assert code == (command[0] == "ask")  # random weights give no answer
            assert err.count(told) == num_notes
        noted = json.loads((here / f"{num_notes}.conditions.json").read_text())
        assert noted | own | usual == noted
    both = "--checkpoint", "best_model", "--checkpoint", "other"
    assert emailrl("benchmark", "--limit", 1, *both, "--out", "b", "--overwrite")[0] == 0
    noted = json.loads((here / "b" / "conditions.json").read_text())
    assert noted["short_message_ids"] == [True, False] and noted["chat_template_kwargs"] == ['{"a": 1}', None]
    assert emailrl("benchmark", "--limit", 1, *both, "--out", "b", "--resume")[0] == 0
    saved = AutoTokenizer.from_pretrained(here / "best_model").chat_template
    assert saved.startswith("{% set a = a if a is defined else 1 %}")  # other programs render it as it was trained
