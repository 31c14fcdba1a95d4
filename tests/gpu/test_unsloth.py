"""The whole loop by Unsloth beside the same run by transformers, each in processes of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu.loop import RunLeft, finish, gaps, make_workplace, policy_logprobs, start
from torch import Tensor

from emailrl.model.policy import load_policy
from emailrl.model.resolve import NANO_DIR
from emailrl.questions.load import read_questions
from emailrl.settings import Settings, load_settings

pytestmark = pytest.mark.gpu
BACKENDS = ("transformers", "unsloth")


@pytest.fixture(scope="module")
def runs(needs: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunLeft]:
    """Three steps of the packaged policy on the demo mailbox by either backend, at the same time."""
    needs("unsloth")
    folder = make_workplace(tmp_path_factory.mktemp("loop"))
    started = {
        name: start(folder, "--backend", name, "--out", f"outputs/{name}", "--save-steps", "1") for name in BACKENDS
    }
    for process in started.values():
        finish(process)
    return {name: RunLeft(folder / "outputs" / f"{name}_masked") for name in BACKENDS}


def test_the_first_step_is_the_same(runs: dict[str, RunLeft]) -> None:
    """Same adapter, same sampling; log-probabilities, gradient norm and updated weights within bf16's rounding."""
    plain, fast = (runs[name] for name in BACKENDS)
    theirs, ours = ({one.trajectory_id: one for one in run.samples(1)} for run in (plain, fast))
    same = [name for name in theirs.keys() & ours.keys() if theirs[name].token_ids == ours[name].token_ids]
    share = len(same) / len(theirs)
    old, new = plain.old_logprobs(1), fast.old_logprobs(1)
    gap = gaps({name: old[name] for name in same}, new)
    cosine = alike(*(run.adapter("checkpoint-1") for run in (plain, fast)))
    print(f"{share:.0%} of {len(theirs)} trajectories alike; log-probabilities differ by {gap.mean():.4f} on average,"
           f" {gap.max():.3f} at most; cosine of the updates {cosine:.3f}")  # fmt: skip
    assert share > 0.5 and gap.mean() < 0.02 and gap.max() < 0.5 and cosine > 0.9
    assert fast.metrics[0]["grad_norm"] == pytest.approx(plain.metrics[0]["grad_norm"], rel=0.1)
    assert fast.metrics[0]["loss"] == pytest.approx(plain.metrics[0]["loss"], abs=0.01)


def alike(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The cosine between two adapters' B matrices, which begin as zeros."""
    assert left.keys() == right.keys()
    one, other = (torch.cat([half[name].flatten() for name in half if "lora_B" in name]) for half in (left, right))
    assert one.norm() > 0 and other.norm() > 0
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def test_every_step_trained(runs: dict[str, RunLeft]) -> None:
    metrics = runs["unsloth"].metrics
    print(f"gap to the sampler {[round(one['sampler_gap_mean'], 4) for one in metrics]}")
    assert [one["step"] for one in metrics] == [1, 2, 3]
    assert all(one["sampler_gap_mean"] < 0.05 and one["grad_norm"] > 0 for one in metrics)


def test_its_adapter_is_the_same_policy_in_transformers(runs: dict[str, RunLeft]) -> None:
    run = runs["unsloth"]
    settings = Settings.model_validate({"model": {"name": "nano"}})
    policy = load_policy(settings, adapter=run.directory / "policy" / "v-000002")
    bare = load_policy(settings)
    samples = run.samples(3)
    gap = gaps(policy_logprobs(policy, samples), run.old_logprobs(3))
    off = gaps(policy_logprobs(bare, samples), run.old_logprobs(3))
    print(f"log-probabilities differ by {gap.mean():.4f} on average; those of the bare base by {off.mean():.4f}")
    assert gap.mean() < 0.02 and gap.mean() < off.mean() / 3


def test_it_resumes(runs: dict[str, RunLeft]) -> None:
    """On a copy, from the third step's checkpoint to a fourth step."""
    outputs = runs["unsloth"].directory.parent
    shutil.copytree(runs["unsloth"].directory, outputs / "again_masked")
    before = RunLeft(outputs / "again_masked").adapter("checkpoint-3")
    more = ("--resume", "latest", "--max-steps", "4")
    said = finish(start(outputs.parent, "--backend", "unsloth", "--out", "outputs/again", *more))
    run = RunLeft(outputs / "again_masked")
    assert [one["step"] for one in run.metrics] == [1, 2, 3, 4], said[-2000:]
    assert alike(run.adapter("policy/v-000003"), before) == pytest.approx(1, abs=1e-5)
    print(f"step 4: gap to the sampler {run.metrics[3]['sampler_gap_mean']:.4f}")
    assert run.metrics[3]["sampler_gap_mean"] < 0.05
    assert alike(run.adapter("final"), before) < 1 - 1e-6


ASK = """
import json, sys
adapter, question, inbox, way = sys.argv[1:]
if way == "unsloth":
    from unsloth import FastLanguageModel
    given = FastLanguageModel.from_pretrained(adapter, max_seq_length=4096, load_in_4bit=False)
else:
    given = (adapter,)
from emailrl import EmailAgent
agent = EmailAgent(*given, config={"db": "demo.db", "max_turns": 6, "max_tokens": 96})
answer = agent.answer(question, inbox=inbox)
(sample,) = answer.trajectory.samples
print(json.dumps({"answer": answer.answer, "ids": sample.token_ids}))
"""


def test_a_model_of_fast_language_model_answers_as_the_agent(tmp_path: Path, needs: Callable[..., None]) -> None:
    """``FastLanguageModel.from_pretrained(best_model)`` handed to ``EmailAgent`` with its tokenizer."""
    needs("unsloth")
    folder = make_workplace(tmp_path / "work")
    base = shutil.copytree(NANO_DIR, tmp_path / "base")
    settings = load_settings({"model_name": str(base)}, environ={}, cwd=folder)
    policy = load_policy(settings, trainable=True)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in policy.trainable_parameters():
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    policy.save_adapter(tmp_path / "best_model")
    file = folder / "demo_questions.jsonl"
    questions = read_questions(file, settings.data).of("val", limit=2, seed=0).scenarios
    for one in questions:
        said = {}
        for way in ("transformers", "unsloth"):
            command = [sys.executable, "-c", ASK, str(tmp_path / "best_model"), one.question, one.inbox_address, way]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr[-3000:]
            said[way] = json.loads(done.stdout.strip().splitlines()[-1])
        ours, theirs = said["transformers"]["ids"], said["unsloth"]["ids"]
        same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
        print(f"{same} of {len(ours)} tokens the same; answers {said['transformers']['answer']!r},"
               f" {said['unsloth']['answer']!r}")  # fmt: skip
        assert said["unsloth"]["answer"] and same > 0.5 * len(ours)
