"""The policy: a frozen base model, an optional LoRA adapter, a tokenizer, and a critic if its algorithm has one; and
how it is loaded: where it computes and whether it fits, before any weight is fetched; the base, from files or the hub;
an adapter on it; and the model made ready for training batches."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from emailrl.base.disk import share_files
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.install import need
from emailrl.base.plain import counted, first_line
from emailrl.checkpoints import CONFIG, WEIGHTS
from emailrl.model import layout
from emailrl.model.fused import enable_fused
from emailrl.model.layout import available_memory, total_memory
from emailrl.model.logprobs import check_projection
from emailrl.model.lora import lora_facts, with_adapter, with_fresh_adapter, write_tensors, writing_tensors
from emailrl.model.packing import enable_packing
from emailrl.model.resolve import base_name, read_base, read_chat_template, resolve_model, same_base
from emailrl.model.shape import attention_for, auto_class, load_config, parameters_of, remedy_for
from emailrl.model.shard import check_shardable, shard_base
from emailrl.model.template import with_arguments
from emailrl.model.unsloth_backend import check_unsloth, load_unsloth, prepare_unsloth
from emailrl.settings import ModelSettings, PolicySettings, TrainingSettings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_REMEDY = "Use --model nano or smol on this machine, or a machine with a GPU."
VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Module):
    """The critic of PPO: maps hidden states ``(P, hidden)`` to values ``(P,)``, in float32 (float64 for such a model).
    It starts at zero: the first advantages equal plain returns, and no additional random numbers are drawn."""

    def __init__(self, model: Any, adapter: Path | None = None) -> None:
        """For a model's hidden states: as saved beside ``adapter``, or a new one. Raises EmailRLError for a saved one
        that is damaged or does not fit."""
        super().__init__()
        size, embedding = model.config.get_text_config().hidden_size, model.get_output_embeddings().weight
        dtype = torch.float64 if embedding.dtype == torch.float64 else torch.float32
        self.weight = nn.Parameter(torch.zeros(size, device=embedding.device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros((), device=embedding.device, dtype=dtype))
        if adapter is not None and (path := adapter / VALUE_HEAD_FILE).is_file():
            try:
                self.load_state_dict(load_file(path))
            except (OSError, SafetensorError, RuntimeError) as error:
                hint = "Resume from a checkpoint of a run with a critic (--algorithm ppo)."
                raise EmailRLError(f"{path} does not fit this policy's critic: {first_line(error)}", hint) from None

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.weight.dtype) @ self.weight + self.bias


@dataclass(frozen=True, eq=False)
class Policy:
    """A model that samples and, when ``trainable``, learns through its adapter; the base never changes."""

    model: Any  # a transformers model, or the PEFT model around it
    tokenizer: PreTrainedTokenizerBase
    base_model: str  # the user's name for it (`nano`, a folder, a hub name); recorded in adapters and metadata
    path: str | Path  # where the base came from
    device: torch.device
    dtype: torch.dtype
    trainable: bool = False
    lora: dict[str, Any] = field(default_factory=dict)  # as of ``lora_facts``; empty for a bare base model
    value_head: ValueHead | None = None  # the critic, if the algorithm uses one
    start: list[Tensor] | None = None  # the run's initial adapter, as ``trainable_parameters``, if it is the reference
    notes: list[str] = field(default_factory=list)  # why it trains more slowly than configured, whether it is sharded
    sharded: bool = False  # whether the base is spread over several ranks: all take part in every forward pass
    accompanied: Callable[[], AbstractContextManager[None]] = nullcontext  # for a forward pass only this rank needs

    @property
    def vocabulary(self) -> int:
        rows = self.model.get_input_embeddings().num_embeddings
        assert isinstance(rows, int)
        return rows

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """Make the model the reference policy inside the block: adapter switched off, or as it was at the ``start``."""
        with self.bare() if self.start is None else self.adapted(self.start):
            yield self.model

    def bare(self) -> AbstractContextManager[Any]:
        """Switch the adapter off inside the block."""
        return self.model.disable_adapter() if self.lora else nullcontext()

    @contextmanager
    def adapted(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Put other ``weights`` into the adapter inside the block, one per trainable parameter; ranks may differ."""
        parameters = [parameter for _, parameter in self.trainable_parameters()]
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, value in zip(parameters, weights, strict=True):
                parameter.data = value  # without copying; it stays the same object to its optimizer
            yield
        finally:
            for parameter, value in zip(parameters, own, strict=True):
                parameter.data = value

    def save_adapter(self, directory: Path, *, with_tokenizer: bool = True) -> None:
        """Write the adapter, a critic and the tokenizer files into ``directory``, which PEFT, Unsloth and vLLM load as
        it is. Its base is named as the user named it (a local folder by its absolute path), so that `nano` is found
        wherever the package is installed."""
        directory.mkdir(parents=True, exist_ok=True)
        # Not PeftModel.save_pretrained: it asks the hub whether the vocabulary grew, and writes a model card.
        write_tensors(directory / WEIGHTS, get_peft_model_state_dict(self.model, save_embedding_layers=False))
        if self.value_head is not None:
            write_tensors(directory / VALUE_HEAD_FILE, self.value_head.state_dict())
        config = self.model.peft_config["default"].to_dict()
        config |= {"base_model_name_or_path": base_name(self.base_model), "inference_mode": True}
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        (directory / CONFIG).write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n")
        if with_tokenizer:
            self.tokenizer.save_pretrained(directory)
        share_files(directory)

    def save_model(self, directory: Path) -> None:
        """Write the weights themselves and the tokenizer's files into ``directory``, as a folder for ``--model``."""
        directory.mkdir(parents=True, exist_ok=True)
        with writing_tensors(directory):
            self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        share_files(directory)


def choose_device(name: str) -> torch.device:
    """Return the named device, or for ``auto`` the first GPU, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"(cpu|cuda)(:\d+)?", name):
        raise UsageError(f"EMAILRL_DEVICE={name} is not supported.", "Use auto, cpu or cuda.")
    device, gpus = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and not (torch.cuda.is_available() and (device.index or 0) < gpus):
        hint = "Use EMAILRL_DEVICE=auto."
        raise EmailRLError(f"EMAILRL_DEVICE={name}: this machine has {counted(gpus, 'usable CUDA GPU')}.", hint)
    return device


def choose_dtype(name: str, device: torch.device, *, sampled_parameters: int = 0) -> torch.dtype:
    """The named dtype, or for ``auto`` bf16 on a GPU and fp32 on a CPU. A model that only samples, of
    ``sampled_parameters``, takes bf16 on a CPU with instructions for it too, if it has ``LARGE_FROM`` or more."""
    if name == "auto" and device.type == "cpu" and sampled_parameters >= layout.LARGE_FROM and computes_bf16():
        return torch.bfloat16
    return DTYPES[layout.dtype_name(name, on_gpu=device.type == "cuda")]


def sampling_dtype(model: ModelSettings) -> torch.dtype:
    """Return the dtype of a model that only samples; raises UsageError or EmailRLError if it is not found."""
    sampled = parameters_of(model.name, resolve_model(model.name, model.smol_base))
    return choose_dtype(model.dtype, choose_device(model.device), sampled_parameters=sampled)


def computes_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices natively; without, they are converted and slower than fp32."""
    return torch.cpu._is_avx512_bf16_supported()


def check_fits(
    model: ModelSettings, num_parameters: int, device: torch.device, dtype: torch.dtype, *, cards: int = 1
) -> bool:
    """Raise EmailRLError, before any weight is fetched, for a model of ``num_parameters`` that this machine cannot run.
    Returns whether to shard the base over the ``cards`` of this host that train together."""
    card, whole = card_bytes(device), num_parameters * dtype.itemsize
    sharded = cards > 1 and layout.shards_base(model, weight_bytes=whole, card_bytes=card, cards=cards)
    need = num_parameters * (0.6 if model.load_in_4bit else dtype.itemsize)
    refused = f"The model '{model.name}' ({num_parameters / 1e9:.2f} billion parameters, {need / 1e9:.0f} GB)"
    if sharded and model.shard_offload:
        pass  # the host's memory holds it
    elif device.type == "cuda":
        if need / (cards if sharded else 1) > card:
            hint = "Use more GPUs (docs/guides/scaling.md), LOAD_IN_4BIT=true, a smaller model, or a larger GPU."
            raise EmailRLError(f"{refused} does not fit this GPU ({card / 1e9:.0f} GB).", hint)
    elif need > (free := available_memory()):
        have = f"{free / 1e9:.0f} GB of {total_memory() / 1e9:.0f} GB of memory"
        raise EmailRLError(f"{refused} needs a GPU; this machine has {have} free.", _REMEDY)
    elif num_parameters > layout.GPU_SIZED and model.device == "auto":
        hint = f"{_REMEDY} EMAILRL_DEVICE=cpu runs it anyway, slowly."
        raise EmailRLError(f"{refused} needs a GPU, but this machine has none.", hint)
    return sharded


def card_bytes(device: torch.device) -> float:
    """Memory of the GPU ``device``; infinite for a CPU, whose memory all ranks share."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


@contextmanager
def enough_memory(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error that smaller micro-batches cannot avoid into EmailRLError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        hint = "Lower MAX_TOKENS_PER_MICRO_BATCH or LORA_RANK, or set LOAD_IN_4BIT=true."
        raise EmailRLError(f"Out of memory while {doing}.", hint) from error


def load_policy(
    settings: PolicySettings,
    *,
    adapter: Path | None = None,
    trainable: bool = False,
    full: bool = False,
    critic: bool = False,
    mesh: DeviceMesh | None = None,
    accompanied: Callable[[], AbstractContextManager[None]] = nullcontext,
    check: Callable[[Any], None] | None = None,
) -> Policy:
    """Load the base that ``settings.model`` names, with the adapter in ``adapter``, or a fresh one to train. A fresh
    adapter depends only on ``settings.training.seed``, and changes nothing until it is trained (B = 0). ``full`` trains
    the base's own weights instead; ``critic`` adds the one saved beside ``adapter``, or a new one. With
    REFERENCE=start, the policy keeps the adapter as loaded. ``mesh`` holds this host's ranks, over which the base is
    spread if SHARD is on; ``accompanied`` then makes them take part in a forward pass that only this rank needs.
    ``check`` gets the tokenizer before weights are loaded. Raises UsageError for an unknown model or an adapter of
    another base, EmailRLError if it is unavailable or too large."""
    wanted, training, notes = settings.model, settings.training, list[str]()
    if full and (wanted.backend == "unsloth" or wanted.load_in_4bit):
        hint = "Change those, or train an adapter."
        raise UsageError("Full fine-tuning needs BACKEND=transformers without LOAD_IN_4BIT.", hint)
    if adapter is not None and not same_base(trained_on := read_base(adapter), wanted.name):
        said = f"The adapter in {adapter} was trained on '{trained_on}', but the base model here is '{wanted.name}'."
        raise UsageError(said, f"Use --model {trained_on}, or another adapter.")
    if wanted.backend == "unsloth":
        check_unsloth(wanted)
    path, device = resolve_model(wanted.name, wanted.smol_base), choose_device(wanted.device)
    size = parameters_of(wanted.name, path)
    dtype = choose_dtype(wanted.dtype, device, sampled_parameters=0 if trainable else size)
    sharded = check_fits(wanted, size, device, dtype, cards=1 if mesh is None else mesh.size())
    if sharded:
        check_shardable(wanted, settings.agent, settings.vllm)
    # A base to be sharded stays on the CPU, memory-mapped from files that all ranks share.
    base, tokenizer = _load_base(wanted, path, device, dtype, move=not sharded, check=check)
    if adapter is not None:
        model = with_adapter(base, settings.lora, adapter, trainable=trainable)
    elif trainable and not full:
        model = with_fresh_adapter(base, settings.lora, seed=training.seed)
    else:
        model = base
    if mesh is not None and sharded:
        shard_base(model, mesh, offload=wanted.shard_offload)
        notes.append(f"{wanted.name} is sharded over the {mesh.size()} ranks of a host")
    elif wanted.shard_offload and wanted.shard == "auto":
        notes.append("SHARD_OFFLOAD has no effect: SHARD=auto does not shard this base model, which fits unsharded")
    model.eval()  # only the updater enables dropout
    if trainable:
        check_projection(model)
        if wanted.backend == "unsloth":
            model = prepare_unsloth(model, wanted.name, training.gradient_checkpointing)
        else:
            notes = prepare_training(model, training, wanted.name, device, full=full) + notes
    keeps_start = trainable and not full and settings.algorithm.reference == "start"
    return Policy(
        model, tokenizer, wanted.name, path, device, dtype,
        trainable=trainable,
        lora=lora_facts(model),
        value_head=ValueHead(model, adapter) if critic else None,
        start=[one.detach().clone() for one in model.parameters() if one.requires_grad] if keeps_start else None,
        notes=notes,
        sharded=sharded,
        accompanied=accompanied if sharded else nullcontext,
    )  # fmt: skip


def _load_base(
    wanted: ModelSettings,
    path: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    move: bool,
    check: Callable[[Any], None] | None,
) -> tuple[Any, Any]:
    """The frozen base, moved to ``device`` or left on the CPU, and its tokenizer."""
    disable_progress_bar()  # a progress bar for local tensors is noise
    try:
        # Loaded separately from the weights: its own `_attn_implementation` would override ours.
        config = load_config(wanted.name, path)
        tokenizer = _load_tokenizer(wanted, path)  # before the weights: a template that cannot be used costs none
        if check is not None:
            check(tokenizer)
        if wanted.backend == "unsloth":
            model = load_unsloth(wanted, path, config, dtype)
        else:
            attention = attention_for(config, wanted.attn_implementation)
            options = {"config": config, "dtype": dtype, "attn_implementation": attention}
            if wanted.load_in_4bit:
                if device.type != "cuda":
                    raise EmailRLError("LOAD_IN_4BIT needs a CUDA GPU.", "Unset it.")
                need("bitsandbytes", "LOAD_IN_4BIT", ", or unset it.")
                nf4: dict[str, Any] = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
                four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **nf4)
                options |= {"quantization_config": four_bit, "device_map": {"": device}}
            auto = auto_class(config)
            model = auto.from_pretrained(path, trust_remote_code=False, use_safetensors=True, **options)
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        hint = remedy_for(wanted.name, path, "the model's files")
        if (attention := wanted.attn_implementation).startswith("flash") and isinstance(error, ImportError):
            hint = f"Set ATTN_IMPLEMENTATION=sdpa, or install the package for {attention}."
        said = f"The model '{wanted.name}' failed to load: {first_line(error).removesuffix('.')}."
        raise EmailRLError(said, hint) from error
    model.requires_grad_(False)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            # transformers may bound Mamba's time steps from below in prompts; it never does in single steps, nor vLLM.
            module.time_step_limit = (0.0, math.inf)
    return (model.to(device) if move and not wanted.load_in_4bit else model), tokenizer


def _load_tokenizer(wanted: ModelSettings, path: str | Path) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if wanted.chat_template is not None:
        tokenizer.chat_template = read_chat_template(wanted.chat_template)
    return with_arguments(tokenizer, wanted)


def prepare_training(
    model: Any, training: TrainingSettings, name: str, device: torch.device, *, full: bool = False
) -> list[str]:
    """Choose how batches run through the model: padded or packed, its own layers or fused ones, what is recomputed.
    ``full`` makes every weight trainable. Returns why PACKING or FUSED_LAYERS could not be enabled."""
    notes, packs, on_gpu = list[str](), training.packing, device.type == "cuda"
    if full:
        model.requires_grad_(True)
    if packs and (unpacked := enable_packing(model)):
        packs = False
        notes.append(f"{name} trains with padding (slower): {unpacked}")
    if layout.wants_fused(training, packs=packs, on_gpu=on_gpu):
        unfused = enable_fused(model, training.gradient_checkpointing)
        if unfused is None:
            return notes
        notes.append(f"{name} trains with transformers' own layers (slower): {unfused}")
    if layout.recomputes(training.gradient_checkpointing, on_gpu=on_gpu):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return notes
