"""A model's config, and its shape: the resulting parameters, LoRA parameters and cache bytes. A shape needs no torch,
and no network for those in ``KNOWN``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.hub import check_hub, go_offline_if_unreachable
from emailrl.base.plain import first_line
from emailrl.model.layout import attends_fully, named_targets
from emailrl.model.resolve import SMOL, SMOL_BASE, resolve_model

FOUR_BIT: Final = 4 / 8 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4 with double quantization: a byte of scale for 64, a float32 for 256 of those (QLoRA)."""
FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""The model types that `plan`, Unsloth's LoRA kernels and ``unpatched`` know."""
_SUPPORTED: Final = "Supported: Llama, Mistral, Qwen2, Qwen2.5 and Qwen3 models."


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama-style dense decoder, named as in its config."""

    family: str  # transformers' model type
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool  # whether the output embedding is the input embedding
    context: int  # the model's maximum context in tokens
    biases: bool = False  # of queries, keys and values (in Llama of the output projection too)
    plain_attention: bool = True  # no sliding window in any layer
    activation: str = "silu"

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads, which is that of the values."""
        return self.kv_heads * self.head_dim

    @property
    def widths(self) -> dict[str, int]:
        """The widths that ``numbers_for`` takes."""
        return {"hidden": self.hidden, "queries": self.queries, "keys": self.keys, "ffn": self.ffn}

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normed, as in Qwen3."""
        return self.family == "qwen3"

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The projections of a layer by name: (inputs, outputs)."""
        outputs = {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys, "gate_proj": self.ffn}
        linears = {name: (self.hidden, size) for name, size in (outputs | {"up_proj": self.ffn}).items()}
        return linears | {"o_proj": (self.queries, self.hidden), "down_proj": (self.ffn, self.hidden)}

    @property
    def layer_matrix(self) -> int:
        """Weights of one layer's projections: its multiplications per token."""
        return sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def embeddings(self) -> int:
        """Parameters of the embeddings, input and output."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        biases = self.biases * (self.queries + 2 * self.keys + self.hidden * (self.family == "llama"))
        norms = 2 * self.hidden + 2 * self.head_dim * self.head_norms
        return self.layers * (self.layer_matrix + biases + norms) + self.embeddings + self.hidden

    def weight_bytes(self, itemsize: int, *, four_bit: bool = False) -> int:
        """Return the bytes of the base; 4 bits apply only to projections, not to embeddings and norms."""
        if not four_bit:
            return self.parameters * itemsize
        matrices = self.layers * self.layer_matrix
        return int(matrices * FOUR_BIT) + (self.parameters - matrices) * itemsize

    def lora_parameters(self, rank: int, targets: str) -> int:
        """Parameters of an adapter: ``rank * (inputs + outputs)`` a projection."""
        return self.layers * sum(rank * sum(self.linears[name]) for name in self.lora_targets(targets))

    def lora_targets(self, targets: str) -> list[str]:
        """The projections that the setting ``target_modules`` names; UsageError for one that is not there."""
        if targets == "all-linear":
            return list(self.linears)
        return [name.rsplit(".", 1)[-1] for name in named_targets(targets, self.linears)]

    def cache_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values that one token holds in a cache."""
        return 2 * self.layers * self.keys * itemsize


def _qwen(family: str, *sizes: int, tied: bool = False, head_dim: int = 128, vocab: int = 151936) -> Shape:
    hidden, ffn, layers, heads, kv_heads = sizes
    context, biases = (32768, True) if family == "qwen2" else (40960, False)
    return Shape(family, hidden, ffn, layers, heads, kv_heads, head_dim, vocab, tied, context, biases)


KNOWN: Final[dict[str, Shape]] = {
    "qwen3-0.6b": _qwen("qwen3", 1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen("qwen3", 2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen("qwen3", 2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen("qwen3", 4096, 12288, 36, 32, 8),
    "qwen3-14b": _qwen("qwen3", 5120, 17408, 40, 40, 8),
    "qwen3-32b": _qwen("qwen3", 5120, 25600, 64, 64, 8),
    "qwen2.5-0.5b": _qwen("qwen2", 896, 4864, 24, 14, 2, tied=True, head_dim=64),
    "qwen2.5-1.5b": _qwen("qwen2", 1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-3b": _qwen("qwen2", 2048, 11008, 36, 16, 2, tied=True),
    "qwen2.5-7b": _qwen("qwen2", 3584, 18944, 28, 28, 4, vocab=152064),
    "qwen2.5-14b": _qwen("qwen2", 5120, 13824, 48, 40, 8, vocab=152064),
    "qwen2.5-32b": _qwen("qwen2", 5120, 27648, 64, 40, 8, vocab=152064),
    "qwen2.5-72b": _qwen("qwen2", 8192, 29568, 80, 64, 8, vocab=152064),
}
"""Published configurations, for models whose config is not available locally."""
SMOLLM2_135M: Final = Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, True, 8192, biases=False)
"""Shape of `smol` and `smol-base`, so that planning needs no conversion of their weights."""
_BILLIONS: Final = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[Bb](?![A-Za-z0-9])")
_NAME: Final = re.compile(r"(?:[\w.-]+/)?(qwen(?:3|2\.5)-[\d.]+b)(?:-(?:instruct|base|thinking))?(?:-\d{4})?")


def find_shape(name: str) -> Shape:
    """The shape of the model named: packaged, a folder, a hub name in the local cache, in ``KNOWN``, or on the hub.
    UsageError for a name that cannot be a model, EmailRLError for a config of another kind or that is unavailable."""
    if name in (SMOL, SMOL_BASE):
        return SMOLLM2_135M
    path = resolve_model(name)
    if isinstance(path, Path):
        return read_shape(path / "config.json")
    if cached := _cached_config(name):
        return read_shape(cached)
    if known := known_shape(name):
        return known
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    check_hub(name)
    try:
        fetched = hf_hub_download(name, "config.json", etag_timeout=10)
    except (OSError, httpx.HTTPError, HfHubHTTPError, ValueError) as error:
        hint = f"Name a folder with its config.json, or one of {', '.join(KNOWN)}."
        raise EmailRLError(f"The config of '{name}' could not be downloaded.", hint) from error
    return read_shape(Path(fetched))


def known_shape(name: str) -> Shape | None:
    known = _NAME.fullmatch(name.lower())
    return KNOWN.get(known[1]) if known else None


def read_shape(config: Path) -> Shape:
    """Read a ``config.json``; EmailRLError for one that cannot be read, or is of another kind of model."""
    try:
        fields = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EmailRLError(f"{config} cannot be read: {error}.", "Fix it, or use another --model.") from error
    family = fields.get("model_type") if isinstance(fields, dict) else None
    if family not in FAMILIES:
        raise EmailRLError(f"{config} describes a {family} model, which plan does not know.", _SUPPORTED)
    try:
        heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
        sizes = {
            "hidden": hidden,
            "ffn": int(fields["intermediate_size"]),
            "layers": int(fields["num_hidden_layers"]),
            "heads": heads,
            "kv_heads": int(fields.get("num_key_value_heads") or heads),
            "head_dim": int(fields.get("head_dim") or hidden // heads),
            "vocab": int(fields["vocab_size"]),
            "context": int(fields.get("max_position_embeddings") or 32768),
        }
        if small := [name for name, size in sizes.items() if size < 1]:
            raise ValueError(f"{small[0]} is {sizes[small[0]]}")
        if heads % sizes["kv_heads"]:
            raise ValueError(f"{heads} heads over {sizes['kv_heads']} of keys")
        return Shape(
            family,
            **sizes,
            tied=bool(fields.get("tie_word_embeddings", False)),
            biases=family == "qwen2" or bool(fields.get("attention_bias")),
            plain_attention=attends_fully(fields),
            activation=str(fields.get("hidden_act", "silu")),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise EmailRLError(f"{config} has a missing or invalid size: {error}.", _SUPPORTED) from error


def _cached_config(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None


def parameters_of(name: str, path: str | Path) -> int:
    """Parameter count of a model, from its name if possible, else from its config. So a 14B model on a CPU is refused
    without waiting for a network."""
    if isinstance(path, str):
        if shape := known_shape(name):
            return shape.parameters
        if billions := _BILLIONS.search(name):
            return int(float(billions[1]) * 1e9)
    return sum(parameter.numel() for parameter in empty_model(load_config(name, path)).parameters())


def empty_model(config: Any) -> Any:
    """Return the model that a config describes on the meta device: layers and shapes without memory for weights."""
    import torch

    with torch.device("meta"):
        # Without a choice of ours the config's own counts, and may name kernels on the hub to fetch and run.
        return auto_class(config).from_config(config, trust_remote_code=False, attn_implementation="eager")


def auto_class(config: Any) -> Any:
    """Return transformers' auto class for a config's published checkpoint: of a model that sees images too, the whole
    one, whose vision tower stays unused. So layers, and those of an adapter, have the names that vLLM knows."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = config.get_text_config() is not config and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def attention_for(config: Any, wanted: str) -> str:
    """The ATTN_IMPLEMENTATION in force: eager where SDPA would leave out the model's attention sinks or soft caps."""
    mapping, text = auto_class(config)._model_mapping, config.get_text_config()
    lacking = type(config) in mapping and not mapping[type(config)]._supports_sdpa
    return "eager" if wanted == "sdpa" and (lacking or getattr(text, "attn_logit_softcapping", None)) else wanted


def load_config(name: str, path: str | Path) -> Any:
    """Read a model's config from its folder, the local cache or the hub, without long retries. Raises UsageError for a
    name the hub does not know or knows as an adapter, EmailRLError if the hub cannot be reached."""
    from transformers import AutoConfig
    from transformers.utils.peft_utils import find_adapter_config_file

    if isinstance(path, str):
        go_offline_if_unreachable()
        if not _cached_config(name):
            check_hub(name)
    # transformers would put an adapter beside the config on the model by itself, unchecked.
    if find_adapter_config_file(str(path)):
        hint = "Name its base model with --model, and the adapter with --checkpoint or --adapter."
        raise UsageError(f"The model '{name}' is an adapter.", hint)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        hint = remedy_for(name, path, "its config.json")
        raise EmailRLError(f"The model '{name}' failed to load: {first_line(error)}", hint) from error


def remedy_for(name: str, path: str | Path, files: str) -> str:
    if name in (SMOL, SMOL_BASE):
        return f"Delete {path}: the next run converts the model again."
    return f"Check {files}, or choose another model."
