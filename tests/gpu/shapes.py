"""Qwen3's published shapes with random weights, and trajectories of random tokens to train them on."""

from __future__ import annotations

import random
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

from emailrl.training.batch import TrainingSample

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "smoke": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""Of Qwen3, and one for a rehearsal on a CPU."""
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
           "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}  # fmt: skip
"""SmolLM2-135M's, a Llama's."""


def config_of(shape: str) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    if shape == "135M":
        return LlamaConfig(**SMOLLM2, tie_word_embeddings=True, bos_token_id=None)
    smoke = shape == "smoke"
    return Qwen3Config(
        **SHAPES[shape],
        num_key_value_heads=2 if smoke else 8, head_dim=16 if smoke else 128, vocab_size=2048 if smoke else 151936,
        tie_word_embeddings=shape not in ("14B", "32B"), max_position_embeddings=40960, rope_theta=1e6,
    )  # fmt: skip


def save_model(shape: str, tokenizer: Path | str, folder: Path | str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kept, config = AutoTokenizer.from_pretrained(tokenizer), config_of(shape)
    config.eos_token_id, config.pad_token_id = kept.eos_token_id, kept.pad_token_id
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
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
