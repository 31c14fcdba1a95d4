"""What a run prints."""

from __future__ import annotations

from pathlib import Path

from runs.run_files import evaluation

from emailrl.settings import AgentSettings, ModelSettings, Settings, TrainingSettings, VllmSettings
from emailrl.training.assemble import header
from emailrl.training.report import evaluation_block, outcome, step_line
from emailrl.training.state import RunState


def test_the_header_says_what_the_seeds_header_says() -> None:
    settings = Settings(training=TrainingSettings(per_device_train_batch_size=8, num_generations=6))
    text = header(settings, run_dir=Path("outputs/grpo_masked"), num_train=4000, num_eval=100, start=0, total=200)
    assert text.splitlines()[1:-1] == [
        "Starting training: 200 steps",
        "Mode: masked (real rollouts, training only the tokens the policy sampled)",
        "Model: OpenPipe/Qwen3-14B-Instruct | algorithm: grpo",
        "Train questions: 4000 | eval questions: 100",
        "Rollouts per question: 6 | questions per step: 8 | 200 steps are 0.4 epochs",
        "Learning rate: 1e-05 (constant)",
        "KL reference: the base model",
        "Target accuracy: 95.0%",
        "Output: outputs/grpo_masked",
    ]
    servers = VllmSettings(vllm_urls="http://a:8000,http://b:8000", max_staleness=2)
    remote = Settings(agent=AgentSettings(engine="vllm"), vllm=servers)
    text = header(remote, run_dir=Path("o"), num_train=1, num_eval=1, start=0, total=2)
    assert "| algorithm: grpo | rollouts on 2 vLLM servers, up to 2 steps ahead of training\n" in text
    for algorithm, named in (
        ({"reference": "start"}, "the adapter as it was at the start"),
        ({"beta": 0}, "none (BETA=0)"),
    ):
        given = Settings.model_validate({"algorithm": algorithm})
        text = header(given, run_dir=Path("o"), num_train=1, num_eval=1, start=0, total=2)
        assert f"KL reference: {named}\n" in text
    again = header(settings, run_dir=Path("o"), num_train=1, num_eval=1, start=10, total=200)
    assert "Resuming at step 10 of 200" in again


def test_the_step_line_is_the_seeds_step_line() -> None:
    metrics = {
        "step": 1, "loss": 0.12345, "policy_loss": 0.1, "kl_loss": 0.02345, "kl": 2.345,
        "reward_mean": 0.25, "accuracy": 0.5,
        "trainable_tokens": 1234, "total_tokens": 5678, "trainable_share": 1234 / 5678, "seconds": {"total": 12.34},
        "dropped": {"groups_low_std": 0, "trajectories_exception": 0},
    }  # fmt: skip
    assert step_line(metrics, 200) == (
        "Step 1/200 | Loss: 0.1235 | Policy: 0.1000 | KL: 0.0234 | Reward: 0.250 | Acc: 50.0%"
        " | Trainable tokens: 1234/5678 (21.7%) | 12.3 s"
    )
    assert step_line(metrics, 200, 2400.0).endswith("| 12.3 s | about 40 min left")
    some = metrics | {"dropped": {"trajectories_exception": 1, "groups_too_small": 0, "groups_below_range": 3}}
    assert step_line(some, 200).endswith("(21.7%) | 12.3 s | Dropped: 1 trajectory failed, 3 groups too hard")
    assert "Loss: 0.0000 | Policy: -0.0001 |" in step_line(metrics | {"loss": -1e-5, "policy_loss": -1e-4}, 200)
    assert "| KL in the reward: 2.3450 |" in step_line(metrics | {"kl_loss": None}, 200)
    missing = dict.fromkeys(("loss", "policy_loss", "kl_loss", "kl", "trainable_share"))
    line = step_line(metrics | missing | {"trainable_tokens": 0, "total_tokens": 0}, 200)
    assert "Loss: - | Policy: - | KL: - | Reward: 0.250" in line and "Trainable tokens: 0/0 (-)" in line


def test_the_evaluation_block_says_whether_it_is_the_best() -> None:
    state = RunState(step=40, best_accuracy=0.8, best_interval=(0.49, 0.943), best_step=30)
    best = evaluation_block(evaluation(8, 10), state, is_best=True)
    assert best.splitlines() == [
        "=== Evaluation after step 40 ===",
        "Average reward: 0.500 | turns: 3.0 | exceptions: 0",
        "Eval accuracy: 80.0% (8 of 10, 95% interval 49.0% to 94.3%)",
        "Correct sources: 80.0%",
        "New best accuracy: 80.0%",
    ]
    none = RunState(best_accuracy=0.0, best_interval=(0.0, 0.278), best_step=0)
    last = evaluation_block(evaluation(0, 10), none, is_best=True).splitlines()[-1]
    assert last == "No correct answer yet; best_model stays at step 0 until there is one"
    worse = evaluation_block(evaluation(7, 10), state, is_best=False).splitlines()
    assert worse[-1] == "Best accuracy so far: 80.0% (95% interval 49.0% to 94.3%) at step 30"


def test_a_run_whose_evaluations_are_all_equal_names_a_higher_learning_rate() -> None:
    def said(*correct: int, model: str = "nano", rate: float = 1e-5, idle: int = 0) -> str:
        state = RunState(steps_without_update=idle)
        for state.step, right in zip(range(0, 130, 10), correct, strict=False):
            state.note_evaluation(evaluation(right, 25, state.step), 5)
        settings = Settings(
            model=ModelSettings(name=model), training=TrainingSettings(learning_rate=rate, mode="masked")
        )
        return outcome(state, "all steps done", 25, settings).partition("\n")[2]

    assert said(13, 13, 13).startswith("Nothing was learned: every evaluation in 20 steps had the same 52.0% correct.")
    for model, rate, better in (("nano", 1e-5, "0.002"), ("nano", 2e-3, "0.02"), ("any/model", 1e-6, "1e-05")):
        assert f"--learning-rate {better} " in said(13, 13, model=model, rate=rate)
    assert said(13, 12, 13) == said(13, 14) == said(13) == said(0) == said(0, 1) == said(13, 13, idle=8) == ""
    zero = said(*13 * [0], idle=119)  # more evaluations than patience keeps
    assert zero.startswith("Nothing was learned in 120 steps") and "emailrl sft" in zero and "rate" not in zero
