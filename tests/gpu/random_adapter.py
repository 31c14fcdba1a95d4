"""An adapter with random weights, for benchmarks of vLLM."""

from __future__ import annotations

from pathlib import Path

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(base: Path | str, folder: Path) -> None:
    """Write an adapter of rank 16 with small random weights in every linear layer of ``base``, of which only the
    config is read."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
        lora = LoraConfig(r=16, lora_alpha=32, target_modules=LINEAR, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, lora)
    adapted.peft_config["default"].save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name.replace(".default", ""): (
            (0.02 if "lora_A" in name else 0.002) * torch.randn(each.shape, generator=generator)
        ).bfloat16()
        for name, each in adapted.named_parameters()
        if "lora_" in name
    }
    save_file(tensors, folder / "adapter_model.safetensors")
