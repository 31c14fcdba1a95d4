"""Qwen3's published shapes with random weights, and trajectories of random tokens to train them on."""

from __future__ import annotations

import random
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from emailrl.training.batch import TrainingSample

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
QWEN3 |= {"max_position_embeddings": 40960, "rope_theta": 1e6}
TESTED = {"vocab_size": 4096, "max_position_embeddings": 8192}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "0.6B": ((1024, 3072, 28, 16), {}),
    "4B": ((2560, 9728, 36, 32), {}),
    "14B": ((5120, 17408, 40, 40), {"tie_word_embeddings": False}),
    "32B": ((5120, 25600, 64, 64), {"tie_word_embeddings": False}),
    "smoke": ((64, 96, 2, 4), {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048}),
    "three layers": ((256, 768, 3, 4), TESTED | {"num_key_value_heads": 2, "initializer_range": 0.05}),
    "eight layers": ((1024, 3072, 8, 16), TESTED),
}
"""Of Qwen3; one for a rehearsal on a CPU, and two for tests, the second as wide as 0.6B."""
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
           "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}  # fmt: skip
"""SmolLM2-135M's, a Llama's."""


def config_of(shape: str) -> Any:
    if shape == "135M":
        return LlamaConfig(**SMOLLM2, tie_word_embeddings=True, bos_token_id=None)
    sizes, changes = SHAPES[shape]
    return Qwen3Config(**dict(zip(SIZES, sizes, strict=True)) | QWEN3 | changes)


def save_model(shape: str, tokenizer: Path | str, folder: Path | str, dtype: torch.dtype = torch.bfloat16) -> None:
    kept, config = AutoTokenizer.from_pretrained(tokenizer), config_of(shape)
    config.eos_token_id, config.pad_token_id = kept.eos_token_id, kept.pad_token_id
    with torch.random.fork_rng(), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    kept.save_pretrained(folder)


def make_samples(shape: str, *, questions: int = 8, members: int = 6, seed: int = 0) -> list[TrainingSample]:
    """Trajectories of 2 to 6 thousand tokens (a thirtieth in the rehearsal), prompts shared in a group."""
    draw, scale = random.Random(seed), 30 if shape == "smoke" else 1
    vocabulary = 512 if shape == "smoke" else 151936
    samples = []
    for question in range(questions):
        prompt = [draw.randrange(300, vocabulary) for _ in range(draw.randrange(600, 900) // scale)]
        for member in range(members):
            ids, mask = list(prompt), [0] * len(prompt)
            total = int(draw.triangular(2000, 6000, 3200)) // scale
            while len(ids) < total:
                for trained, most in ((1, 200), (0, 560)):
                    length = draw.randrange(most // 2, most) // scale + 1
                    ids += [draw.randrange(300, vocabulary) for _ in range(length)]
                    mask += [trained] * length
            last = total - mask[:total][::-1].index(1)
            ids, mask = ids[:last], mask[:last]
            logprobs = [-1.0 if one else None for one in mask]
            samples.append(TrainingSample(f"{question}/{member}", str(question), ids, mask, logprobs))
    return samples


def advantage(sample: TrainingSample) -> float:
    return random.Random(sample.trajectory_id).uniform(-1, 1)


@torch.no_grad()
def set_lora(model: Any) -> None:
    """Give every adapter weight a value that follows from its name, so that all sides train the same function."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name[name.index("layers.") :].encode()))
            value = torch.randn(parameter.shape, generator=generator) * (0.02 if "lora_A" in name else 0.002)
            parameter.copy_(value.to(parameter.device, parameter.dtype))


if __name__ == "__main__":
    save_model(*sys.argv[1:])
