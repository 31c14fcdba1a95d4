"""The table of algorithms, and the overrides of the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from emailrl.base.errors import UsageError
from emailrl.model.resolve import NANO_DIR
from emailrl.settings import Settings, TrainingSettings
from emailrl.settings.names import by_name
from emailrl.settings.needs import NEEDS
from emailrl.training.advantages import ESTIMATORS
from emailrl.training.algorithms import (
    ALGORITHMS,
    Algorithm,
    advice,
    auto_rate,
    needs_old_logprobs,
    resolve,
    with_rate,
)


def resolved(name: str = "grpo", training: Mapping[str, Any] = MappingProxyType({}), **overrides: Any) -> Algorithm:
    return resolve(Settings.model_validate({"training": {"algorithm": name} | dict(training), "algorithm": overrides}))


def test_default_is_grpo_with_k3_in_the_loss_and_token_mean() -> None:
    assert resolve(Settings()) == Algorithm(
        name="grpo", advantage="group_norm", whiten=False, clip_low=0.2, clip_high=0.2, dual_clip=None,
        ratio_level="token", aggregation="token_mean", kl_estimator="k3", kl_in="loss",
    )  # fmt: skip


def test_every_row_names_an_estimator_and_some_compare_no_rollouts() -> None:
    assert all(algorithm.advantage in {*ESTIMATORS, "gae", "teacher"} for algorithm in ALGORITHMS.values())
    singles = [name for name, algorithm in ALGORITHMS.items() if not algorithm.compares_rollouts]
    assert singles == ["reinforce_pp", "ppo", "opd"]
    assert [name for name, algorithm in ALGORITHMS.items() if algorithm.has_critic] == ["ppo"]
    assert [name for name, algorithm in ALGORITHMS.items() if algorithm.has_teacher] == ["opd"]
    with pytest.raises(FrozenInstanceError):
        ALGORITHMS["grpo"].clip_low = 0.5  # type: ignore[misc]


def test_unknown_name() -> None:
    with pytest.raises(UsageError, match=r"Unknown algorithm 'grop'\. Did you mean grpo\? Known: grpo, "):
        resolved("grop")
    with pytest.raises(UsageError, match=r"Unknown algorithm 'xyz'\. Known: "):
        resolved("xyz")


def test_every_field_can_be_overridden() -> None:
    algorithm = resolved(
        "grpo", advantage_estimator="rloo", whiten_advantages=True, ratio_level="token", clip_low=0.1, clip_high=0.3,
        surrogate="cispo", loss_aggregation="constant", kl_in="reward", kl_estimator="k1", dynamic_filtering=True,
    )  # fmt: skip
    assert algorithm == Algorithm(
        "grpo", "rloo", whiten=True, clip_low=0.1, clip_high=0.3, surrogate="cispo", aggregation="constant",
        kl_in="reward", kl_estimator="k1", dynamic_filtering=True,
    )  # fmt: skip
    assert resolved("grpo", dual_clip=3.0).dual_clip == 3.0
    assert ALGORITHMS["grpo"].clip_low == 0.2 and resolved("dapo", clip_low=0.0).clip_low == 0.0
    assert resolved("gspo", ratio_level="token").ratio_level == "token"
    assert resolved("reinforce_pp", whiten_advantages=False).whiten is False
    assert resolved("grpo", advantage_estimator="gae", value_clip=0.2).value_clip == 0.2
    assert resolved("ppo").value_clip == 0.5 and resolved("ppo", advantage_estimator="rloo").value_clip is None


ONE, THREE = ({"training": {"num_generations": number}} for number in (1, 3))
SIMPLE = {"training": {"num_generations": 3, "mode": "simple"}}
TAUGHT = {"training": {"teacher": "nano"}}
SERVED_TEACHER = {"training": {"teacher": "http://a"}}  # at the default temperature of 0.7
IMPOSSIBLE: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("grpo", {"value_clip": 0.2}, ("VALUE_CLIP=0.2", "ADVANTAGE_ESTIMATOR=gae")),
    ("grpo", {"value_coef": 0.5}, ("VALUE_COEF=0.5", "ADVANTAGE_ESTIMATOR=gae")),
    ("grpo", {"critic_warmup_steps": 3}, ("CRITIC_WARMUP_STEPS=3", "ADVANTAGE_ESTIMATOR=gae")),
    ("grpo", {"gamma": 0.9}, ("EMAILRL_GAMMA=0.9", "gae or reinforce")),
    ("grpo", {"constant_length": 9}, ("CONSTANT_LENGTH=9", "LOSS_AGGREGATION=constant")),
    ("grpo", {"kl_target": 0.1, "beta": 0}, ("KL_TARGET=0.1", "BETA above 0")),
    ("grpo", {"correction_low": 0.1}, ("CORRECTION_LOW=0.1", "IMPORTANCE_CORRECTION=tis")),
    ("ppo", {"ratio_level": "sequence"}, ("RATIO_LEVEL=sequence", "ADVANTAGE_ESTIMATOR=gae", "RATIO_LEVEL=token")),
    ("rloo", {"ratio_level": "sequence"}, ("RATIO_LEVEL=sequence", "KL_IN=reward", "KL_IN=loss, BETA=0")),
    ("reinforce_pp", {"ratio_level": "sequence", "gamma": 0.9, "kl_in": "loss"}, ("=sequence", "EMAILRL_GAMMA=0.9")),
    ("grpo", {"importance_correction": "icepop", "correction_low": 2.0, "correction_high": 2.0}, ("CORRECTION_LOW=2",)),
    ("grpo", {"reward_clip_low": 1.0, "reward_clip_high": 1.0}, ("REWARD_CLIP_LOW=1", "REWARD_CLIP_HIGH=1")),
    ("ppo", {"critic_warmup_steps": 200}, ("CRITIC_WARMUP_STEPS=200", "MAX_STEPS=200")),
    # Of three answers none, 1/3, 2/3 or all are right.
    ("dapo", {"filter_low": 0.4, "filter_high": 0.6} | THREE, ("drops every question with NUM_GENERATIONS=3",)),
    ("dapo", {"filter_low": 0.4, "filter_high": 0.4} | THREE, ("between FILTER_LOW=0.4 and FILTER_HIGH=0.4",)),
    ("dapo", {"filter_low": 0.4, "filter_high": 0.6, "filter_on": "accuracy"} | SIMPLE, ("drops every question",)),
    ("reinforce_pp", {"dynamic_filtering": True} | ONE, ("drops every question with NUM_GENERATIONS=1",)),
    ("grpo", {"filter_low": 0.4}, ("FILTER_LOW=0.4 has no effect",)),
    ("dapo", {"dynamic_filtering": False, "max_refill_rounds": 3}, ("MAX_REFILL_ROUNDS=3 has no effect",)),
    ("grpo", {"overlong_penalty": 0.5}, ("OVERLONG_PENALTY=0.5 has no effect",)),
    ("cispo", {"dual_clip": 3.0}, ("DUAL_CLIP=3 has no effect: it needs EMAILRL_SURROGATE=ppo",)),
    ("dapo", {"filter_on": "spread", "filter_low": 0.4}, ("FILTER_LOW=0.4 has no effect: it needs FILTER_ON=",)),
    ("dapo", {"overlong_penalty": 0.5, "overlong_buffer": 0}, ("has no effect: it needs OVERLONG_BUFFER",)),
    ("opd", {}, ("ADVANTAGE_ESTIMATOR=teacher (--algorithm opd) needs a TEACHER", "--teacher")),
    ("grpo", TAUGHT, ("TEACHER=nano has no effect", "--algorithm opd")),
    ("opd", {"gamma": 0.9} | TAUGHT, ("EMAILRL_GAMMA=0.9", "gae or reinforce")),
    ("opd", {"ratio_level": "sequence"} | TAUGHT, ("RATIO_LEVEL=sequence", "ADVANTAGE_ESTIMATOR=teacher")),
    ("opd", {"kl_in": "reward"} | TAUGHT, ("KL_IN=reward", "KL_IN=loss or BETA=0")),
    ("opd", SERVED_TEACHER, ("TEMPERATURE=1, not 0.7",)),
]


@pytest.mark.parametrize(("name", "overrides", "said"), IMPOSSIBLE)
def test_an_impossible_mix_names_both_settings_and_a_way_out(
    name: str, overrides: dict[str, Any], said: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(name, **overrides)
    whole = f"{caught.value} {caught.value.hint}"
    assert [part for part in said if part not in whole] == [] and caught.value.hint


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("ppo", {"value_clip": 0.2, "value_coef": 0.5, "critic_warmup_steps": 199, "gamma": 0.9, "gae_lambda": 0.9}),
        ("reinforce_pp", {"gamma": 0.9}),
        ("dr_grpo", {"constant_length": 9}),
        ("grpo", {"importance_correction": "icepop", "correction_low": 0.9, "correction_high": 1.1}),
        ("rloo", {"ratio_level": "sequence", "kl_in": "loss"}),
        ("grpo", {"reward_clip_low": -1.0, "reward_clip_high": 1.0}),
        ("reinforce_pp", {"dynamic_filtering": True, "filter_on": "reward"} | ONE),
        ("dapo", {"filter_low": 0.8, "filter_high": 1.2} | THREE),  # all three right: a share of 1
        ("dapo", {"filter_low": 0.4, "filter_high": 0.6} | SIMPLE),  # a mean of rewards can lie there
        ("grpo", {"dynamic_filtering": True, "filter_low": 0.1, "max_refill_rounds": 0} | THREE),
        ("grpo", {"overlong_penalty": 0.5, "overlong_buffer": 100}),
        ("dapo", {"overlong_penalty": 0.5}),
        ("opd", TAUGHT),
        *((name, {"kl_in": place, "kl_estimator": k}) for name in ("grpo", "ppo") for place in ("loss", "reward")
          for k in ("k1", "k2", "k3")),
    ],
)  # fmt: skip
def test_possible_mixes(name: str, overrides: dict[str, Any]) -> None:
    assert resolved(name, **overrides).name == name


def test_rollouts_that_cannot_be_compared_or_weighed() -> None:
    one = {"num_generations": 1}
    for name, algorithm in ALGORITHMS.items():
        taught = {"teacher": "nano"} if algorithm.has_teacher else {}
        settings = Settings.model_validate({"training": {"algorithm": name} | one | taught})
        if algorithm.compares_rollouts:
            with pytest.raises(UsageError, match=f"NUM_GENERATIONS=1 is too low for {name}, .*ADVANTAGE_ESTIMATOR="):
                resolve(settings)
        else:
            assert resolve(settings).name == name
    engine = {"agent": {"engine": "openai"}, "algorithm": {"importance_correction": "tis"}}
    with pytest.raises(UsageError, match=r"IMPORTANCE_CORRECTION=tis .* EMAILRL_ENGINE=openai"):
        resolve(Settings.model_validate(engine))


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("grpo", {"kl_estimator": "k1"}, "KL_ESTIMATOR=k1 with KL_IN=loss has zero gradient"),
        ("grpo", {"kl_in": "reward"}, "KL_ESTIMATOR=k3 with KL_IN=reward does not follow"),
        ("grpo", {"ratio_level": "sequence"}, "RATIO_LEVEL=sequence averages over tokens: CLIP_LOW=0.2"),
        ("grpo", {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 0.2}, "hardly ever clip"),
        ("reinforce_pp", {"whiten_advantages": False}, "without WHITEN_ADVANTAGES has no baseline"),
    ],
)
def test_advice(name: str, overrides: dict[str, Any], said: str) -> None:
    settings = Settings.model_validate({"training": {"algorithm": name}, "algorithm": overrides})
    assert any(said in note for note in advice(settings))
    noisy = {"lora": {"lora_dropout": 0.1}, "training": {"update_epochs": 2}}
    assert len(advice(Settings.model_validate(noisy))) == 1


@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [("auto", None, "off"), ("transformers", None, "off"), ("vllm", None, "tis"), ("vllm", "off", "off"),
     ("auto", "icepop", "icepop"), ("vllm", "sequence_mask", "sequence_mask")],
)  # fmt: skip
def test_the_sampler_is_corrected_for_where_it_is_vllm(engine: str, given: str | None, expected: str) -> None:
    settings = Settings.model_validate({"agent": {"engine": engine}, "algorithm": {"importance_correction": given}})
    assert resolve(settings).importance_correction == expected


def test_the_rate_of_a_model(tmp_path: Path) -> None:
    """3e-4 · (2000 / hidden)^p / (2000 / 576)^0.781, with p 0.0775 for Qwen, 0.781 for Llama, else the lower rate."""
    rates = {
        ("llama", 576): 3e-4, ("llama", 4096): 6.5e-5, ("qwen3", 5120): 1.1e-4, ("qwen2", 1024): 1.2e-4,
        ("gemma3", 1152): 1.2e-4, ("mistral", 4096): 6.5e-5,
    }  # fmt: skip
    assert {key: auto_rate(*key) for key in rates} == rates
    config = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, rate, why in (
        ("nano", 2e-3, "measured with nano"), (str(NANO_DIR), 2e-3, "measured"), ("smol", 3e-4, "measured with smol"),
        (str(tmp_path), 6.5e-5, "by hidden size 4096 of llama"),
    ):  # fmt: skip
        training = {"learning_rate": "auto"}
        settings, [note] = with_rate(Settings.model_validate({"model": {"name": name}, "training": training}))
        assert settings.training.peak_rate == rate and why in note
        assert with_rate(settings) == (settings, [])
    with pytest.raises(ValueError, match="LEARNING_RATE=auto"):
        _ = TrainingSettings(learning_rate="auto").peak_rate


IDLE: list[tuple[str, dict[str, dict[str, Any]], str]] = [
    ("grpo", {"algorithm": {"clip_low": 0.1}}, "CLIP_LOW has no effect"),
    ("ppo", {"algorithm": {"value_clip": 0.1}}, "VALUE_CLIP has no effect"),
    ("cispo", {}, "--algorithm cispo trains as grpo does without NUM_MINI_BATCHES"),
    ("gspo", {}, "--algorithm gspo differs from grpo only in its aggregation"),
    ("grpo", {"algorithm": {"kl_horizon": 99}}, "KL_HORIZON has no effect: it needs KL_TARGET"),
    ("grpo", {"training": {"min_lr_ratio": 0.1}}, "MIN_LR_RATIO has no effect: it needs LR_SCHEDULER="),
    ("grpo", {"algorithm": {"reference": "start", "beta": 0.0}}, "REFERENCE has no effect: it needs BETA"),
    ("grpo", {"model": {"shard_offload": True, "shard": "off"}}, "SHARD_OFFLOAD has no effect: it needs SHARD="),
    ("ppo", {"algorithm": {"min_group_std": 0.1}}, "MIN_GROUP_STD has no effect"),
    ("opd", TAUGHT | {"algorithm": {"reward_clip_low": -1.0}}, "REWARD_CLIP_LOW has no effect"),
    ("grpo", {"vllm": {"vllm_urls": "http://a", "vllm_enforce_eager": True}}, "VLLM_ENFORCE_EAGER has no effect"),
]


@pytest.mark.parametrize(("name", "given", "said"), IDLE)
def test_a_setting_without_effect_is_named(name: str, given: dict[str, dict[str, Any]], said: str) -> None:
    sections = {section: dict(fields) for section, fields in given.items()}
    sections.setdefault("training", {})["algorithm"] = name
    settings = Settings.model_validate(sections)
    (line,) = advice(settings)
    assert line.startswith(said)


def test_what_has_an_effect_is_not_named() -> None:
    several: dict[str, Any] = {
        "training": {"algorithm": "ppo", "update_epochs": 2, "min_lr_ratio": 0.1, "lr_scheduler": "linear"},
        "algorithm": {"clip_low": 0.1, "dual_clip": 3.0, "value_clip": 0.1, "kl_target": 0.1, "kl_horizon": 99},
        "output": {"export_dir": "e", "export_format": "merged"},
        "vllm": {"vllm_urls": "http://a", "vllm_timeout": 5},
    }
    small = {"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
    for sections in (
        {},
        several,
        *({"training": {"algorithm": name, "update_epochs": 2}} for name in ALGORITHMS if name != "opd"),
        {"training": {"algorithm": "opd", "teacher": "nano"}},
        *(
            {"algorithm": given, "training": {"update_epochs": 2}}
            for given in ({"beta": 0.0, "kl_estimator": "k1"}, small)
        ),
    ):
        assert advice(Settings.model_validate(sections)) == []


SERVED = {"agent": {"engine": "vllm"}, "vllm": {"vllm_urls": "http://a", "max_staleness": 1}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"vllm": {"vllm_urls": "http://a", "max_staleness": 0}, "algorithm": {"importance_correction": "off"}}, None),
        ({"agent": {"engine": "transformers"}}, "MAX_STALENESS=1 needs samplers of their own"),
        ({"vllm": {"max_staleness": 1}}, "MAX_STALENESS=1 needs samplers of their own"),
        ({"algorithm": {"importance_correction": "off"}}, "MAX_STALENESS=1 trains on rollouts of an older policy"),
    ],
)
def test_stale_rollouts_take_servers_and_a_correction(changes: dict[str, Any], expected: str | None) -> None:
    settings = Settings.model_validate(SERVED | changes)
    if expected is None:
        resolve(settings)
    else:
        with pytest.raises(UsageError, match=expected):
            resolve(settings)


def test_the_table_of_needs_names_settings() -> None:
    names = [name for need in NEEDS for name in need.settings.split()]
    assert [name for name in names if by_name()[name].key != name] == []


GRPO = resolve(Settings.model_validate({}))


@pytest.mark.parametrize(
    ("algorithm", "kl_coef", "updates", "needed"),
    [
        (GRPO, 0.01, 1, False),
        (GRPO, 0.01, 2, True),
        (replace(GRPO, kl_in="reward"), 0.01, 1, True),
        (replace(GRPO, kl_in="reward"), 0.0, 1, False),
        (replace(GRPO, advantage="gae"), 0.0, 1, True),
        (replace(GRPO, advantage="teacher"), 0.0, 1, True),
    ],
)
def test_old_log_probabilities(algorithm: Algorithm, kl_coef: float, updates: int, needed: bool) -> None:
    assert needs_old_logprobs(algorithm, kl_coef=kl_coef, updates=updates) is needed
