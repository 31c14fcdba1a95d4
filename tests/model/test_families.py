"""Every family of ``gpu.families``: engine, trainer and plain transformers agree, on tiny random models in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.families import FAMILIES, make_family
from peft import PeftModel
from torch import Tensor

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.engines import Completion, Request, SamplingParams, build_engine
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.single import SingleEngine
from emailrl.model.logprobs import token_logprobs
from emailrl.model.lora import backbone, causal_lm, lora_targets, read_plain_lora
from emailrl.model.packing import takes_packed
from emailrl.model.policy import Policy, load_policy
from emailrl.model.resolve import NANO_DIR
from emailrl.model.shape import attention_for, auto_class, empty_model, find_shape, load_config
from emailrl.settings import Settings, load_settings

TOLERANCE = 1e-5  # also relative: log-probabilities of -8 have their last bit at 1e-6, and processors round differently
PLAIN = {"Llama 3", "Qwen3", "Qwen3-MoE", "GLM4-MoE"}  # full attention in every layer
ATTENTION, MLP = ["k_proj", "o_proj", "q_proj", "v_proj"], ["down_proj", "gate_proj", "up_proj"]
TARGETS = {
    "Qwen3.5": [*ATTENTION, *MLP, "in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"],
    "Qwen3-Next": [*ATTENTION, "in_proj_ba", "in_proj_qkvz", "out_proj"],
    "LFM2": ["k_proj", "q_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"],
    "Qwen3-MoE": ATTENTION,
    "gpt-oss": ATTENTION,
    "GLM4-MoE": ATTENTION,
    "Nemotron-H": [*ATTENTION, "down_proj", "in_proj", "up_proj"],
}
"""What all-linear means; in the other families attention and MLP. Experts stay frozen."""

Make = Callable[..., tuple[Settings, Policy]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folders: dict[str, Path] = {}

    def load(family: str, **given: Any) -> tuple[Settings, Policy]:
        """A family's model with an adapter that changes every layer it may."""
        if family not in folders:
            folders[family] = make_family(family, NANO_DIR, tmp_path_factory.mktemp("family"))
        values = {"model_name": str(folders[family]), "lora_rank": 4} | given
        settings = load_settings(values, environ={}, cwd=folders[family])
        policy, generator = load_policy(settings, trainable=True), torch.Generator().manual_seed(1)
        for _, parameter in policy.trainable_parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        return settings, policy

    return load


def plain_model(policy: Policy, adapter: Path) -> Any:
    """The same weights by transformers and PEFT alone."""
    config = load_config("", policy.path)
    attention = attention_for(config, "sdpa")
    base = auto_class(config).from_pretrained(policy.path, dtype=torch.float32, attn_implementation=attention)
    for module in base.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    return PeftModel.from_pretrained(base, str(adapter)).eval()


@torch.no_grad()
def plain_logprobs(model: Any, ids: list[int], start: int, temperature: float) -> Tensor:
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1].float()
    return (logits / (temperature or 1.0)).log_softmax(-1)


class Dialogue:
    """Conversations of three turns, with tool results between them; the last turn may have forgotten the first."""

    def __init__(self, temperatures: list[float], *, forgets: bool = False) -> None:
        self.draw, self.forgets = random.Random(0), forgets
        self.first = [
            Request(str(n), SamplingParams(8, one), self.tokens(20 + 9 * n), seed=n)
            for n, one in enumerate(temperatures)
        ]
        self.last = {request.trajectory_id: [request] for request in self.first}
        self.turns: list[tuple[Request, Completion]] = []

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(20, 300) for _ in range(count)]

    def advance(self, completion: Completion) -> Request | None:
        asked = self.last[completion.trajectory_id]
        self.turns.append((asked[-1], completion))
        if len(asked) == 3:
            return None
        history = [*asked[-1].prompt_ids, *completion.token_ids]
        ids = [*history[5 if self.forgets else 0 :], *self.tokens(4)]
        asked.append(Request(completion.trajectory_id, asked[-1].sampling, ids, seed=len(asked)))
        return asked[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_samples_what_transformers_computes(family: str, make: Make, tmp_path: Path) -> None:
    """Turn after turn in a kept cache: greedy tokens are the most likely ones, and log-probabilities those of a whole
    forward pass of the adapter as PEFT loads it, and of the trainer."""
    settings, policy = make(family, max_tokens_per_rollout_pass=16)
    policy.save_adapter(tmp_path)
    engine = build_engine(settings, policy)
    assert type(engine) is (TransformersEngine if family in PLAIN else SingleEngine)
    engine.load_adapter(tmp_path, "v1")
    read: list[int] = []
    backbone(engine.weights.model).register_forward_pre_hook(
        lambda module, args, given: read.append(given["input_ids"].numel()), with_kwargs=True
    )
    dialogue = Dialogue([0.0, 1.0, 1.5])
    engine.generate(dialogue.first, dialogue.advance)
    assert len(dialogue.turns) == 9
    if family not in PLAIN:  # each token once, the last sampled one of a trajectory never
        assert sum(read) == sum(len(turns[-1].prompt_ids) + 8 - 1 for turns in dialogue.last.values())
    plain = plain_model(policy, tmp_path)
    for request, completion in dialogue.turns:
        start, ids = len(request.prompt_ids), [*request.prompt_ids, *completion.token_ids]
        found = plain_logprobs(plain, ids, start, request.sampling.temperature)
        if request.sampling.temperature == 0:
            assert completion.token_ids == found.argmax(-1).tolist()
        expected = found.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        sampled = torch.tensor(completion.logprobs)
        torch.testing.assert_close(sampled, expected, atol=TOLERANCE, rtol=TOLERANCE)
        mask = torch.arange(len(ids))[None] >= start
        own = token_logprobs(policy.model, torch.tensor([ids]), mask, temperature=request.sampling.temperature)
        torch.testing.assert_close(sampled, own.logprobs[0, start:].detach(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_trains_as_its_rows_alone(family: str, make: Make) -> None:
    """Padded, or packed where that is allowed; without and with recomputation. Every adapter matrix learns."""
    _, policy = make(family)
    assert takes_packed(policy.model) is (family in PLAIN)
    assert bool(policy.notes) is (family not in PLAIN)
    draw = torch.Generator().manual_seed(2)
    lengths, width = (13, 40, 70, 27), 70
    ids = torch.randint(20, 300, (4, width), generator=draw)
    mask = torch.rand((4, width), generator=draw) < 0.4
    for row, length in enumerate(lengths):
        ids[row, length:], mask[row, length:], mask[row, 0] = 0, False, False
    weights = torch.randn((4, width), generator=draw)
    parameters = [parameter for _, parameter in policy.trainable_parameters()]

    def run(rows: list[slice], cut: bool) -> tuple[Tensor, list[Tensor]]:
        policy.model.zero_grad()
        found = torch.zeros(4, width)
        for part in rows:
            end = lengths[part.start] if cut else width
            logprobs = token_logprobs(policy.model, ids[part, :end], mask[part, :end]).logprobs
            (logprobs * weights[part, :end]).sum().backward()
            found[part, :end] = logprobs.detach()
        return found, [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]

    alone, grads = run([slice(row, row + 1) for row in range(4)], True)
    assert len(grads) == len(parameters) and all(grad.abs().max() > 0 for grad in grads)
    scale = max(grad.abs().max() for grad in grads)
    for recomputes in (False, True):
        if recomputes:
            policy.model.train()
            causal_lm(policy.model).gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        together, batched = run([slice(0, 4)], False)
        torch.testing.assert_close(together, alone, atol=TOLERANCE, rtol=TOLERANCE)
        for one, other in zip(batched, grads, strict=True):
            torch.testing.assert_close(one / scale, other / scale, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_recurrent_model_reads_a_changed_history_again(make: Make) -> None:
    settings, policy = make("Qwen3.5")
    dialogue = Dialogue([1.0], forgets=True)
    build_engine(settings, policy).generate(dialogue.first, dialogue.advance)
    assert len(dialogue.turns) == 3
    for request, completion in dialogue.turns:
        (alone,) = build_engine(settings, policy).generate([request])
        assert alone.token_ids == completion.token_ids
        assert alone.logprobs == pytest.approx(completion.logprobs, abs=TOLERANCE)


def test_the_cache_of_a_single_trajectory_is_bounded(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """LFM2's one attention layer holds 2 x 2 heads x 16 numbers of 4 bytes a token; its convolutions, 3 layers of 32
    channels x 3 numbers, do not grow."""
    _, policy = make("LFM2")
    fixed, token = 3 * 32 * 3 * 4, 2 * 2 * 16 * 4
    request = Request("0", SamplingParams(50), [20] * 30)
    engine = SingleEngine(policy.model, [], cache_bytes=fixed + 40 * token)
    (cut,) = engine.generate([request])
    # The 41st token that is read fills it: 30 of the prompt and 11 of 12 sampled ones.
    assert (len(cut.token_ids), cut.finish_reason) == (12, "length")
    assert "KV_CACHE_GIB" in capsys.readouterr().err
    assert engine._cache is None
    with pytest.raises(EmailRLError, match="prompt of 30 tokens does not fit"):
        SingleEngine(policy.model, [], max_pass_tokens=10, cache_bytes=fixed + 15 * token).generate([request])


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_reaches_the_language_model_alone(family: str, make: Make, tmp_path: Path) -> None:
    _, policy = make(family)
    policy.save_adapter(tmp_path)
    changed = read_plain_lora(tmp_path, policy.model).pairs
    ends = {name.rsplit(".", 1)[-1] for name in changed}
    assert ends == set(TARGETS.get(family, [*ATTENTION, *MLP]))
    assert not [name for name in changed if "vision" in name or "visual" in name]
    if family in ("GLM4-MoE", "Qwen3-Next"):
        with pytest.raises(UsageError, match="experts"):
            lora_targets(empty_model(load_config("", policy.path)), "q_proj,gate_proj,up_proj")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("Llama 3", "Qwen3", "Mistral")])
def test_plan_says_that_it_does_not_know_the_shape(family: str, make: Make) -> None:
    _, policy = make(family)
    with pytest.raises(EmailRLError, match="which plan does not know"):
        find_shape(str(policy.path))
