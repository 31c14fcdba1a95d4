"""What an adapter's folder may say: plain LoRA that fits its base, whole and finite; anything else in one line."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from full_disk import on_a_full_disk
from safetensors.torch import load_file, save_file
from torch import nn

from emailrl.base.errors import EmailRLError
from emailrl.model.lora import read_plain_lora

UP = "base_model.model.layers.0.up_proj.lora_"
DOWN = "base_model.model.layers.0.down_proj.lora_"
Tensors = dict[str, torch.Tensor]


LAYER = nn.ModuleDict({"up_proj": nn.Linear(2, 3), "down_proj": nn.Linear(3, 2)})
BASE = nn.ModuleDict({"layers": nn.ModuleList([LAYER]), "lm_head": nn.Linear(2, 5)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {
        UP + "A.weight": torch.tensor([[1.0, 2.0]]),
        UP + "B.weight": torch.tensor([[3.0], [-1.0], [0.5]]),
        DOWN + "A.weight": torch.ones(1, 3),
        DOWN + "B.weight": torch.zeros(2, 1),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 4, "target_modules": ["up_proj", "down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path)


def test_an_adapter_adds_scale_times_b_times_a(folder: Path) -> None:
    lora = read_plain_lora(folder, BASE)
    assert list(lora.pairs) == ["layers.0.down_proj", "layers.0.up_proj"]
    lora_a, lora_b = lora.pairs["layers.0.up_proj"]
    assert (lora.scale * lora_b @ lora_a).tolist() == [[12.0, 24.0], [-4.0, -8.0], [2.0, 4.0]]
    # Rank-stabilised LoRA divides by the root of the rank.
    change_tensors(folder, lambda t: {k: v.repeat((4, 1) if "A." in k else (1, 4)) for k, v in t.items()})
    change_config(folder, r=4, use_rslora=True)
    assert read_plain_lora(folder, BASE).scale == 2.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "its peft_type is 'IA3', not 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "its task_type is 'SEQ_CLS'"),
        ({"r": 10**9}, "lora_A.weight is 1 × [23], but the rank is 1000000000"),
        ({"r": 0}, "its rank r is 0"),
        ({"lora_alpha": float("nan")}, "its lora_alpha is nan"),
        ({"lora_alpha": 10**400}, "its lora_alpha is 10000"),
        ({"lora_alpha": "4"}, "its lora_alpha is '4'"),
        ({"target_modules": "(a+)+"}, "its target_modules is not a list of names"),
        ({"target_modules": ["up_proj"]}, "it changes layers.0.down_proj, which is not a targeted linear layer"),
        ({"target_modules": ["up_proj", "down_proj", "lm_head"]}, "of lm_head are missing .1 of 3 layers."),
        ({"init_lora_weights": "pissa"}, "it uses init_lora_weights='pissa'"),
        ({"use_dora": True}, "it uses use_dora"),
        ({"modules_to_save": ["lm_head"]}, "it uses modules_to_save"),
        ({"a_later_invention": 3}, "it uses a_later_invention"),
    ],
)
def test_a_config_that_asks_for_more_or_other_than_plain_lora_is_refused(
    folder: Path, changes: dict[str, object], reason: str
) -> None:
    change_config(folder, **changes)
    with pytest.raises(EmailRLError, match=reason) as caught:
        read_plain_lora(folder, BASE)
    assert str(folder) in caught.value.message and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: {k: v[:1, :1].contiguous() for k, v in t.items()}, "have size 1 × 1, but the layer is 2 × 3"),
        (lambda t: t | {UP + "A.weight": torch.ones(2, 2)}, "lora_A.weight is 2 × 2, but the rank is 1"),
        (lambda t: t | {UP + "A.weight": torch.ones(1)}, "lora_A.weight is 1, but the rank is 1"),
        (lambda t: t | {UP + "A.weight": torch.tensor([[1.0, float("nan")]])}, "non-finite values"),
        (lambda t: t | {UP + "A.weight": torch.ones(1, 0)}, "have size 3 × 0, but the layer is 3 × 2"),
        (lambda t: t | {UP + "A.weight": torch.ones(1, 2, dtype=torch.int64)}, "is of type torch.int64"),
        (lambda t: t | {UP + "magnitude_vector": torch.ones(3)}, "lora_magnitude_vector, which is not a LoRA matrix"),
        (lambda t: t | {"base_model.model.lm_head.weight": torch.ones(5, 2)}, "lm_head.weight, which is not a LoRA"),
        (lambda t: {k: v for k, v in t.items() if k != UP + "B.weight"}, "one of the two matrices of layers.0.up"),
        (lambda t: {k: v for k, v in t.items() if "up_proj" not in k}, "the matrices of layers.0.up_proj are missing"),
        (lambda t: {k.replace("s.0", "s.7"): v for k, v in t.items()}, "changes layers.7.down_proj, which is no"),
        (lambda t: {}, "it contains no matrices"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(folder: Path, change: Callable[[Tensors], Tensors], reason: str) -> None:
    change_tensors(folder, change)
    with pytest.raises(EmailRLError, match=reason):
        read_plain_lora(folder, BASE)


@pytest.mark.parametrize("content", ["[" * 10**6, '{"a":' * 10**5, "[]", "\x00", '{"a": "' + "x" * (1 << 20) + '"}'])
def test_a_config_that_is_no_small_json_object_is_one_line(folder: Path, content: str) -> None:
    (folder / "adapter_config.json").write_text(content)
    with pytest.raises(EmailRLError, match=r"adapter_config\.json is not readable as JSON"):
        read_plain_lora(folder, BASE)


def test_without_a_base_the_files_alone_are_checked_and_pickled_weights_never_read(folder: Path) -> None:
    change_tensors(folder, lambda t: {k.replace("s.0", "s.7"): v for k, v in t.items()})
    assert read_plain_lora(folder, None).rank == 1
    change_config(folder, r=2)
    with pytest.raises(EmailRLError, match="the rank is 2"):
        read_plain_lora(folder, None)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(EmailRLError, match=r"adapter_model\.safetensors cannot be read"):
        read_plain_lora(folder, None)


HEAD = "from pathlib import Path\nimport torch\nfrom emailrl.model.lora import write_tensors, writing_tensors\n"
SAFETENSORS = """
write_tensors(Path(sys.argv[1]), {"a": torch.zeros(8)})
write_tensors(Path(sys.argv[1]), {"a": torch.zeros(4096)})
"""
TORCH = """
with writing_tensors(Path(sys.argv[1])):
    torch.save({"a": torch.zeros(4096)}, sys.argv[1])
"""


@pytest.mark.parametrize(("script", "numbers"), [(SAFETENSORS, {errno.EFBIG}), (TORCH, {errno.EIO, errno.EFBIG})])
def test_the_librarys_error_becomes_the_systems(tmp_path: Path, script: str, numbers: set[int]) -> None:
    path = tmp_path / "adapter.safetensors"
    assert on_a_full_disk(1024, HEAD + script, path) in {f"{number} {path}" for number in numbers}
