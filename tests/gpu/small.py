"""A small random policy on disk, samples for it, and an updater that moves weights by their gradient."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emailrl.model.load import load_policy
from emailrl.settings import load_settings
from emailrl.training.batch import TrainingSample
from emailrl.training.team import build_updater
from emailrl.training.update import Updater

VOCABULARY = 4096
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "eos_token_id": 256, "pad_token_id": 257, "initializer_range": 0.05,
}  # fmt: skip
TEMPLATE = """\
{% for m in messages %}{{ m['role'] + '\n' + m['content'] }}<|end|>{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"""


def save_random(folder: Path, dtype: torch.dtype, **changes: Any) -> Path:
    """Write a Qwen3 of random weights with a byte tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPE | changes)).to(dtype).save_pretrained(folder)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words |= {"<|end|>": 256, "<|pad|>": 257} | {f"<|{i}|>": i for i in range(258, VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def make_samples(count: int, shortest: int, longest: int, *, seed: int = 0) -> list[TrainingSample]:
    """Trajectories of random ids, four a group, a quarter of the tokens trained in spans of 20."""
    draw = random.Random(seed)
    samples = []
    for i in range(count):
        length = draw.randrange(shortest, longest)
        mask = [int(t > 40 and (t // 20) % 4 == 3) for t in range(length - 1)] + [1]
        ids = [draw.randrange(300, VOCABULARY) for _ in range(length)]
        logprobs = [-8.0 if on else None for on in mask]
        samples.append(TrainingSample(f"t{i}", f"g{i // 4}", ids, mask, logprobs))
    return samples


def paid(samples: list[TrainingSample]) -> dict[str, float]:
    return {one.trajectory_id: random.Random(one.trajectory_id).uniform(-1, 1) for one in samples}


def make_updater(folder: Path, **changes: Any) -> Updater:
    """An updater whose adapter has moved; it descends plainly, so that a step moves weights by their gradient."""
    given = {
        "model_name": str(folder), "lora_rank": 8, "lora_dropout": 0.0, "temperature": 1.0, "learning_rate": 1e-2,
        "warmup_steps": 0, "max_grad_norm": 0, "beta": 0.0,
    }  # fmt: skip
    settings = load_settings(given | changes, environ={}, cwd=folder)
    updater = build_updater(load_policy(settings, trainable=True), settings)
    generator = torch.Generator().manual_seed(5)
    for parameter in updater.parameters:
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    updater.optimizer = torch.optim.SGD(updater.parameters, lr=1.0)
    return updater


def weights(updater: Updater) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in updater.parameters]


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """‖left − right‖ / ‖right‖ over all of it."""
    gap = sum(float((one - other).double().square().sum()) for one, other in zip(left, right, strict=True))
    return (gap / sum(float(other.double().square().sum()) for other in right)) ** 0.5


def moved(before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
    return [new - old for new, old in zip(after, before, strict=True)]
