"""Fixtures every test may use."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# A test must never reach the network or a tracking server, whoever's machine it runs on.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="disabled", TOKENIZERS_PARALLELISM="false")
os.environ["OMP_NUM_THREADS"] = "1"  # commands started side by side would wait for each other's threads by spinning
# Some images forbid bytecode: every command that a test starts would then compile all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

hypothesis.settings.register_profile("no clock", deadline=None)  # a busy machine needs longer for no fault of the code
hypothesis.settings.load_profile("no clock")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from every test that does not ask for one: results must not depend on the machine.

    Nor on the shell: a job in the background begins with SIGINT ignored, and so would every process that a test starts.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """How sums are split over threads decides their last digits: a test must see the same alone."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> None:
    """Forked, worker processes need not load their libraries anew; tests/base/test_workers.py has spawned ones."""
    from emailrl.base.workers import worker_processes

    worker_processes.__wrapped__.__kwdefaults__["method"] = "fork"  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real mail and tokenizers beside the repository; skips the test where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no shared data at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def enron_built(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The database of the real mail, and what was counted as it was built."""
    from emailrl.mail.build import build_database
    from emailrl.mail.sources import open_source

    source = shared_data / "enron" / "enron_mail_subset.tar.gz"
    return build_database(open_source(source), tmp_path_factory.mktemp("real") / "enron.db")


@pytest.fixture(scope="session")
def enron_db(enron_built: Any) -> Path:
    return enron_built.db


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that are waited between two tries of a request, without the waiting."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("emailrl.base.http.sleep", sleep)
    return waited


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A command called inside the test process leaves signal handlers behind, which every later child would inherit."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


CONFIG_HOMES = itertools.count()


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A test trusts no folder that the developer trusts, nor leaves one trusted; and settings in the developer's
    environment do not steer it: it sets the ones it needs itself."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / f"config-{next(CONFIG_HOMES)}"))
    from emailrl.settings.names import by_env_name

    for name in by_env_name().keys() & os.environ.keys() - {"WANDB_MODE"}:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen3 of some 60 thousand weights (tied embeddings) and a byte tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary | {"<|end|>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape |= {"head_dim": 8, "intermediate_size": 96, "max_position_embeddings": 512, "vocab_size": 257}
        # At this width the usual range of 0.02 would make every distribution uniform.
        config = Qwen3Config(**shape, tie_word_embeddings=True, initializer_range=0.2)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
