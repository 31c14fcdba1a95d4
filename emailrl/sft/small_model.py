"""A policy small enough for a laptop: Qwen3 architecture, its own tokenizer and the chat template of ``nano``. The
tokenizer is a byte-level BPE with single digits. Two choices keep trajectories short and copying easy: the fixed
phrases of prompt, tool calls and tool results are one token each, and a capitalised word never swallows the space
before it, so that a name has the same ids wherever it stands."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from emailrl.agent.task import SYSTEM_PROMPT
from emailrl.agent.tools import TOOLS, tool_schemas
from emailrl.model.resolve import NANO_DIR

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

VOCAB_SIZE = 2048
CONTEXT_LENGTH = 4096

CONTROLS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip

_WORDS = r"</?b>|\\n|\d| ?\p{Ll}+|\p{Lu}\p{Ll}*|\p{L}+|[^\s\p{L}\d\\<]+|[\\<]|\s"
"""Snippet marks and JSON's line break whole, digits single, the space before a lower-case word kept with it."""


def phrases() -> list[str]:
    """The fixed texts of prompt, tool list, tool calls and tool results that are one token each."""
    system = [part for part in re.split(r"\{\w+\}", SYSTEM_PROMPT) if len(part) > 3]
    functions = [schema["function"] for schema in tool_schemas()]
    tools = [f"{one['name']}({', '.join(one['parameters']['properties'])})\n" for one in functions]
    openings = [f'\n{{"name": "{name}", "arguments": {{"' for name in TOOLS]
    calls = ['keywords": ["', '"], "max_results": ', 'message_id": "', 'answer": "', '", "sources": ["']
    calls += ['", "sources": []}}\n', '", "', "}}\n", '"}}\n', '"]}}\n']
    results = ['\n[{"message_id":"', '","snippet":"', '"},{"message_id":"', '"}]\n', '\n{"message_id":"', '","date":"']
    results += ['","subject":"', '","from_address":"', '","to_addresses":["', '"],"cc_addresses":["']
    results += ['"],"bcc_addresses":[', '],"body":"', '"],"cc_addresses":[],"bcc_addresses":[],"body":"']
    results += ['","file_name":"', '"}\n', '","']
    roles = ["system\n", "user\n", "assistant\n", "\n# Tools\n"]
    return system + tools + openings + calls + results + roles


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer on texts of demo mail, questions, tool calls and results."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    into_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS), "isolated"), into_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    fixed, alphabet = phrases(), pre_tokenizers.ByteLevel.alphabet()
    size = VOCAB_SIZE - len(CONTROLS) - len(fixed)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads that share this regex crash (tokenizers 0.23)
    around = re.compile("|".join(re.escape(text) for text in sorted((*CONTROLS, *fixed), key=len, reverse=True)))
    tokenizer.train_from_iterator((piece for text in texts for piece in around.split(text) if piece), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in fixed])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=(NANO_DIR / "chat_template.jinja").read_text("utf-8"),
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialized model of about 5 million parameters, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4,
        head_dim=64, intermediate_size=768, max_position_embeddings=CONTEXT_LENGTH, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, use_cache=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)
