"""Export: merged logits equal base plus adapter, folders load as they are, nothing is overwritten by chance."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from peft import PeftModel
from tiny import cut_matrices, make_checkpoint, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import Checkpoint, read_checkpoint, sha256_of, verify, write_checkpoint
from emailrl.measure.export import check_free, export_checkpoint, model_card
from emailrl.model.resolve import Adapter, find_adapter

METRICS = {"accuracy": 0.8, "accuracy_low": 0.7112, "accuracy_high": 0.8666, "num_questions": 100, "reward": 0.912}
FORMATS: tuple[Literal["adapter", "merged"], ...] = ("adapter", "merged")
IDS = torch.tensor([[5, 17, 40, 3, 99, 21]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def checkpoint(tmp_path: Path, model: Path) -> Checkpoint:
    return make_checkpoint(tmp_path / "outputs" / "grpo_masked" / "best_model", model, metrics=METRICS)


def assert_complete(out: Path, format: str) -> None:
    """Tokenizer, template and metadata came along, and the marker has the hash of all."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n"
    assert json.loads((out / "metadata.json").read_text())["run_id"] == "grpo_masked"
    marker = json.loads((out / "export.json").read_text())
    assert marker["format"] == format
    assert marker["files"] == {file.name: sha256_of(file) for file in out.iterdir() if file.name != "export.json"}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_merged_weights_compute_what_base_and_adapter_do(tmp_path: Path, model: Path, checkpoint: Checkpoint) -> None:
    out = export_checkpoint(checkpoint, tmp_path / "merged", format="merged").out
    assert_complete(out, "merged")
    base = AutoModelForCausalLM.from_pretrained(model)
    bare = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, str(checkpoint.path)))
    merged = logits(AutoModelForCausalLM.from_pretrained(out))
    assert (merged - adapted).abs().max() <= 1e-4
    assert (merged - bare).abs().max() > 1e-2
    assert not (out / "adapter_model.safetensors").exists()


def test_an_adapter_that_does_not_fit_its_base_is_not_exported(tmp_path: Path, checkpoint: Checkpoint) -> None:
    def cut(folder: Path) -> None:
        shutil.copytree(checkpoint.path, folder, dirs_exist_ok=True)
        (cut_matrices(folder) / "metadata.json").unlink()

    whole = write_checkpoint(tmp_path / "run" / "best_model", checkpoint.metadata, cut)
    for format in FORMATS:
        with pytest.raises(EmailRLError, match="have size 1 × 1, but the layer is"):
            export_checkpoint(whole, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_a_bf16_base_is_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    model = make_model(tmp_path / "bf16", dtype="bfloat16")
    checkpoint = make_checkpoint(tmp_path / "run" / "best_model", model)
    out = export_checkpoint(checkpoint, tmp_path / "merged", format="merged").out
    merged = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    exact = PeftModel.from_pretrained(base, str(checkpoint.path)).merge_and_unload().state_dict()
    assert merged.keys() == exact.keys()
    for name, weight in merged.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, exact[name].to(torch.bfloat16)), name


def test_an_exported_adapter_is_the_same_bytes_and_loads(tmp_path: Path, model: Path, checkpoint: Checkpoint) -> None:
    export = export_checkpoint(checkpoint, tmp_path / "adapter", format="adapter")
    recorded = checkpoint.metadata.files
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json"):
        assert sha256_of(export.out / name) == recorded[name] == export.files[name]
    assert (export.out / "generation_config.json").is_file()
    assert_complete(export.out, "adapter")
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = logits(PeftModel.from_pretrained(base, str(export.out)))
    direct = logits(AutoModelForCausalLM.from_pretrained(export.out))  # transformers finds the base by the config
    assert torch.equal(adapted, direct)


def test_the_card_is_filled_from_metadata(checkpoint: Checkpoint) -> None:
    metadata = replace(checkpoint.metadata, base_model="Qwen/Qwen3-0.6B", lora={"rank": 24, "alpha": 32})
    card = model_card(metadata, "mail-agent", format="adapter")
    assert 'base_model: "Qwen/Qwen3-0.6B"' in card
    assert "Accuracy 80.0% (95% interval 71.1% to 86.7%) on 100 validation questions, mean reward 0.912." in card
    assert "| learning_rate | 1e-05 |" in card and "| LoRA rank | 24 |" in card
    assert "| environment | mail |" in card and "| reward | art_e |" in card
    assert 'PeftModel.from_pretrained(base, "mail-agent")' in card
    limited = replace(metadata, settings={"agent": {"max_turns": 7, "max_tokens": 96, "temperature": 1.0}})
    config = '{"db": "mail.db", "max_turns": 7, "max_tokens": 96}'
    assert f"EmailAgent(model, tokenizer, {config})" in model_card(limited, "x", format="merged")
    assert (
        "vllm serve Qwen/Qwen3-0.6B \\\n  --enable-lora --max-lora-rank 32 --lora-modules mail-agent=mail-agent" in card
    )
    assert ", measured at step 5, mean reward" in model_card(
        replace(metadata, metrics=METRICS | {"evaluated_step": 5}), "x", format="merged"
    )
    merged = model_card(metadata, "mail-agent", format="merged")
    assert "vllm serve mail-agent --enable-auto-tool-choice" in merged and "PeftModel" not in merged
    packaged = model_card(replace(metadata, base_model="nano", metrics={}), "x", format="adapter")
    assert "base_model:" not in packaged and 'resolve_model("nano")' in packaged
    assert "No evaluation was recorded" in packaged


def test_the_card_leads_with_the_accuracy_on_questions_that_selected_nothing(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    confirmed = {"step": 7, "accuracy": 0.3, "accuracy_low": 0.108, "accuracy_high": 0.603, "num_questions": 10}
    (checkpoint.path.parent / "confirmed.json").write_text(json.dumps(confirmed | {"reward": 0.1}))
    card = (export_checkpoint(checkpoint, tmp_path / "out", format="adapter").out / "README.md").read_text()
    results = card.partition("## Results\n\n")[2]
    assert results.startswith(
        "Accuracy 30.0% (95% interval 10.8% to 60.3%) on 10 validation questions that were not used to select"
    )
    assert "For selection: accuracy 80.0% (95% interval 71.1% to 86.7%) on 100 validation questions, mean" in results
    (checkpoint.path.parent / "confirmed.json").write_text(json.dumps(confirmed | {"step": 6}))  # other weights
    card = (export_checkpoint(checkpoint, tmp_path / "other", format="adapter").out / "README.md").read_text()
    assert "## Results\n\nAccuracy 80.0%" in card and "30.0%" not in card
    (checkpoint.path.parent / "confirmed.json").write_text("{")
    with pytest.raises(EmailRLError, match=r"confirmed\.json is damaged"):
        export_checkpoint(checkpoint, tmp_path / "damaged", format="adapter")


def test_an_exported_adapter_is_a_checkpoint_in_all_but_its_trainer_state(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    metadata = replace(checkpoint.metadata, files={})

    def fill(folder: Path) -> None:
        shutil.copytree(checkpoint.path, folder, dirs_exist_ok=True)
        (folder / "metadata.json").unlink()
        (folder / "trainer_state.pt").write_bytes(b"moments")

    whole = write_checkpoint(tmp_path / "run" / "final", metadata, fill)
    out = export_checkpoint(whole, tmp_path / "adapter", format="adapter").out
    assert not (out / "trainer_state.pt").exists()
    assert find_adapter(out, tmp_path) == Adapter(out, metadata.base_model, "grpo_masked")
    again = export_checkpoint(verify(read_checkpoint(out)), tmp_path / "again", format="adapter")
    assert again.files["adapter_model.safetensors"] == checkpoint.metadata.files["adapter_model.safetensors"]
    for name in ("metadata.json", "export.json"):
        (out / name).unlink()
    assert find_adapter(out, tmp_path) == Adapter(out, metadata.base_model)  # as any adapter that PEFT wrote
    weights = again.out / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(EmailRLError, match="damaged"):
        find_adapter(again.out, tmp_path)
    merged = export_checkpoint(whole, tmp_path / "merged", format="merged").out
    with pytest.raises(UsageError, match=f"is a model, not an adapter. Use --model {merged}"):
        find_adapter(merged, tmp_path)


def test_nothing_but_an_earlier_export_is_replaced(tmp_path: Path, checkpoint: Checkpoint) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(checkpoint, out, format="adapter")  # an empty folder is free
    (out / "stale").write_text("x")
    with pytest.raises(UsageError, match="exists"):
        export_checkpoint(checkpoint, out, format="adapter")
    assert (out / "stale").is_file()
    export_checkpoint(checkpoint, out, format="adapter", overwrite=True)
    assert not (out / "stale").exists()
    with pytest.raises(UsageError, match="is not an export"):
        export_checkpoint(checkpoint, checkpoint.path, format="adapter", overwrite=True)
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "merged"):
        with pytest.raises(UsageError, match="file is a file"):
            check_free(path, overwrite=True)
    for name in (".ex.incoming", ".ex.outgoing"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(UsageError, match="a device or pipe"):
            export_checkpoint(checkpoint, tmp_path / "ex", format="adapter")
        (tmp_path / name).unlink()


def test_a_failed_export_is_one_line_and_leaves_nothing_behind(tmp_path: Path, checkpoint: Checkpoint) -> None:
    adapter = checkpoint.path / "adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-1] + b"\x7f")
    gone = make_checkpoint(tmp_path / "run" / "best_model", make_model(tmp_path / "gone"))
    shutil.rmtree(tmp_path / "gone")
    for each, format in ((checkpoint, FORMATS[0]), (gone, FORMATS[1])):
        with pytest.raises(EmailRLError) as caught:
            export_checkpoint(each, tmp_path / "merged", format=format)
        assert "\n" not in str(caught.value) and not [entry for entry in tmp_path.iterdir() if "merged" in entry.name]
    assert export_checkpoint(gone, tmp_path / "adapter", format="adapter").out.is_dir()


def test_nothing_is_copied_through_a_link_or_unrecorded(tmp_path: Path, checkpoint: Checkpoint) -> None:
    (tmp_path / "secret").write_text("mine")
    (checkpoint.path / "vocab.json").symlink_to(tmp_path / "secret")
    (checkpoint.path / "merges.txt").write_text("later")
    out = export_checkpoint(read_checkpoint(checkpoint.path), tmp_path / "out", format="adapter").out
    assert not {"vocab.json", "merges.txt"} & set(os.listdir(out)) and (out / "adapter_config.json").is_file()
    config = checkpoint.path / "adapter_config.json"
    config.rename(tmp_path / "config.json")
    config.symlink_to(tmp_path / "config.json")
    with pytest.raises(UsageError, match="is a link to"):
        export_checkpoint(read_checkpoint(checkpoint.path), tmp_path / "other", format="adapter")
    assert not (tmp_path / "other").exists()
