"""A random model of two layers, and real tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engines.chat_server import Reply, StubServer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

STOP = 1


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Qwen3ForCausalLM]:
    """A model whose weights are large enough that its next token depends on all of its prompt."""

    def make(**changes: object) -> Qwen3ForCausalLM:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
            heads = {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
            others = {"initializer_range": 0.3, "eos_token_id": STOP, "bos_token_id": None, "pad_token_id": 0}
            config = Qwen3Config(**sizes | heads | others | changes)
            return Qwen3ForCausalLM(config).eval()

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Qwen3ForCausalLM]) -> Qwen3ForCausalLM:
    return make_model()


@pytest.fixture(scope="session")
def qwen(shared_data: Path) -> PreTrainedTokenizerBase:
    """Qwen2.5's tokenizer and chat template."""
    return AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")


@pytest.fixture(scope="session")
def qwen_thinking(shared_data: Path) -> PreTrainedTokenizerBase:
    """As Qwen3: ``<think>`` tokens, and a template that strips what was thought from every turn but the last."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "qwen_tokenizer")
    tokenizer.add_tokens(["<tool_response>", "</tool_response>", "<think>", "</think>"])
    plain = "'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n'"
    stripped = plain.replace("message.content", "message.content.split('</think>')[-1].lstrip('\\n')")
    assert plain in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- " + plain, "{{- (" + stripped + ") if message.role == 'assistant' else " + plain
    )
    return tokenizer


@pytest.fixture
def serve() -> Iterator[Callable[..., StubServer]]:
    """Starts a chat server that answers as told; it is closed after the test."""
    servers: list[StubServer] = []

    def start(reply: Reply, **changes: float) -> StubServer:
        servers.append(StubServer(reply, **changes))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
