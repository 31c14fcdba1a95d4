"""The three typical combinations of OpenRLHF's list, converted, scaled down and trained with nano on demo mail.

The first is for eight A100 with vLLM; its GPUs become two ranks here, and its engine the one that needs none. What it
optimises, PPO with a critic, is trained as it stands.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from end_to_end.conftest import Options
from end_to_end.test_ranks import rank
from ranks.processes import in_ranks

from emailrl.checkpoints import read_checkpoint
from emailrl.openrlhf import to_toml
from emailrl.questions.load import questions_file, write_demo
from emailrl.records import read_records
from emailrl.settings import StoreSettings, load_settings
from emailrl.training.loop import train

SEED = Path(__file__).resolve().parents[3] / "shared" / "seeds" / "openrlhf_options.zh.txt"

HYBRID_ENGINE = (
    "--actor_num_gpus_per_node 8 --critic_num_gpus_per_node 8 --ref_num_gpus_per_node 8 --reward_num_gpus_per_node 8 "
    "--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --vllm_enable_sleep "
    "--deepspeed_enable_sleep --vllm_gpu_memory_utilization 0.5"
)
REINFORCE_BASELINE = (
    "--advantage_estimator reinforce_baseline --n_samples_per_prompt 8 --init_kl_coef 1e-5 --use_kl_loss "
    "--kl_estimator k2"
)
FILTERING = "--dynamic_filtering --dynamic_filtering_reward_range 0.0 1.0 --n_samples_per_prompt 8"


def test_these_are_the_combinations_of_the_list() -> None:
    if not SEED.is_file():
        pytest.skip(f"no list of OpenRLHF's options at {SEED}")
    text = SEED.read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text[text.index("8x A100") :], re.DOTALL)
    found = [" ".join(block.replace("\\", "").split()) for block in blocks]
    assert found == [HYBRID_ENGINE, REINFORCE_BASELINE, FILTERING]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Demo mail and settings that make a run small."""
    db = tmp_path_factory.mktemp("demo") / "mail.db"
    write_demo(db, seed=42, settings=StoreSettings())
    small = {"model_name": "nano", "db": db, "questions": questions_file(db), "judge": "offline"}
    small |= {"max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-3, "temperature": 1.0, "wandb_mode": "disabled"}
    small |= {"max_turns": 5, "max_tokens": 96, "per_device_train_batch_size": 2, "num_generations": 3}
    return small | {"eval_dataset_size": 2, "eval_steps": 2}


def left_by(run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The steps' metrics and the final checkpoint's settings."""
    return list(read_records(run_dir / "metrics.jsonl")), read_checkpoint(run_dir / "final").metadata.settings


def run(flags: str, demo: dict[str, Any], folder: Path, **scaled: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train as the flags say, scaled down."""
    (folder / "emailrl.toml").write_text(to_toml(flags), encoding="utf-8")
    settings = load_settings(demo | {"output_dir": folder / "grpo"} | scaled, cwd=folder, environ={}, trust=True)
    result = train(settings)
    assert result.steps == 2
    return left_by(result.run_dir)


def test_hybrid_engine_scaled_down_to_two_ranks(options: Options, tmp_path: Path) -> None:
    (tmp_path / "emailrl.toml").write_text(to_toml(HYBRID_ENGINE), encoding="utf-8")
    assert load_settings(cwd=tmp_path, environ={}, trust=True).training.nproc == 8
    changes = {"max_steps": 2, "num_mini_batches": 1, "device": "cpu", "nproc": 2, "engine": "transformers"}
    scaled = {name: value for name, value in options(tmp_path, **changes).items() if not name.startswith("kl_")}
    chosen = load_settings(scaled, cwd=tmp_path, environ={}, trust=True)
    run_dir = in_ranks(2, partial(rank, chosen), tmp_path)[0].run_dir
    steps, settings = left_by(run_dir)
    assert [step["num_trajectories"] for step in steps] == [12, 12]  # two questions a rank, three rollouts each
    assert "rollouts run on 2 engines, each on 1 of 2 ranks" in (run_dir / "training.log").read_text()
    assert all(step["rank_tokens_max"] >= step["rank_tokens_mean"] > 0 for step in steps)
    assert settings["training"]["algorithm"] == "ppo" and settings["algorithm"]["kl_in"] == "reward"
    assert (settings["vllm"]["vllm_tensor_parallel_size"], settings["vllm"]["vllm_gpu_memory_utilization"]) == (2, 0.5)
    for step in steps:
        assert step["trainable_tokens"] > 0 and step["value_loss"] > 0 and step["grad_norm"] > 0
    assert steps[0]["kl"] == 0.0 != steps[1]["kl"]  # the adapter has moved


def test_reinforce_with_a_baseline(demo: dict[str, Any], tmp_path: Path) -> None:
    steps, settings = run(REINFORCE_BASELINE, demo, tmp_path)
    assert settings["training"]["algorithm"] == "reinforce_pp_baseline"
    for step in steps:
        assert step["trainable_tokens"] > 0 and step["grad_norm"] > 0 and step["kl_coef"] == 1e-5
        # The KL is in the loss: k2, at the start of a step's only update.
        assert step["loss"] == pytest.approx(step["policy_loss"] + 1e-5 * step["kl"], abs=1e-9)
    assert steps[0]["kl"] == 0.0 < steps[1]["kl"]


def test_dynamic_filtering(demo: dict[str, Any], tmp_path: Path) -> None:
    steps, settings = run(FILTERING, demo, tmp_path, max_refill_rounds=2)
    assert settings["algorithm"]["dynamic_filtering"] is True and settings["training"]["algorithm"] == "ppo"
    trained = [step for step in steps if step["trainable_tokens"]]
    assert trained and all(step["grad_norm"] > 0 for step in trained)
    for number, step in enumerate(steps, 1):
        right: dict[str, list[bool]] = {}
        for line in read_records(tmp_path / f"grpo_masked/trajectories/step-{number:06d}.jsonl"):
            right.setdefault(line["group_id"], []).append(line["rubric"]["answer_correct"])
        for line in read_records(tmp_path / f"grpo_masked/training/step-{number:06d}.jsonl"):
            is_kept = line["advantage"] is not None or line["samples"]
            assert len(set(right[line["group_id"]])) == 2 or not is_kept  # all right or all wrong teaches nothing
        assert step["num_trajectories"] >= 6  # 2 questions x 3, and what was asked in place of those dropped
