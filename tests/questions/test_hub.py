"""ART-E's questions as ``datasets`` keeps them: a local folder of the same features, and no network."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from questions.questions import row

from emailrl.base.errors import EmailRLError, UsageError
from emailrl.questions import ScenarioSet, Split, load_scenario_set
from emailrl.settings import DataSettings


def read(folder: Path | None, split: Split | None = None) -> ScenarioSet:
    return load_scenario_set(folder, split, limit=None, seed=1, data=DataSettings())


@pytest.mark.parametrize("way", ["save_to_disk", "parquet"])
def test_a_folder_as_datasets_saves_it_or_as_the_hub_has_it(tmp_path: Path, way: str) -> None:
    from datasets import Dataset, DatasetDict

    train = [row(id=n, inbox_address=f"{'ab'[n % 2]}@enron.com") for n in (48, 49, 50, 51)]
    test = [
        row(id=60, inbox_address="c@enron.com"),
        row(id=61, inbox_address="c@enron.com", message_ids=["<1>", "<2>"]),
    ]
    published = DatasetDict({"train": Dataset.from_list(train), "test": Dataset.from_list(test)})
    folder = tmp_path / "set"
    if way == "save_to_disk":
        published.save_to_disk(folder)
    else:
        for name, split in published.items():
            split.to_parquet(folder / "data" / f"{name}-00000-of-00001.parquet")
    assert [s.id for s in read(folder, "test").scenarios] == ["60"]
    assert read(folder, "test").dropped == {"known_bad_id": 1, "too_many_sources": 1}
    val, train_part = read(folder, "val").scenarios, read(folder, "train").scenarios
    assert sorted(s.id for s in train_part + val) == ["48", "50", "51"]
    assert not {s.inbox_address for s in train_part} & {s.inbox_address for s in val}


def test_a_folder_of_something_else_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("hello\n")
    with pytest.raises(UsageError, match=r"it contains \.txt files"):
        read(tmp_path / "folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="not a folder of questions"):
        read(tmp_path / "empty")


class _Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.made,)


@pytest.mark.parametrize("name", ["pandas", "json"])
def test_a_folder_named_like_a_reader_runs_no_pickle_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.pkl").write_bytes(pickle.dumps(_Bomb(tmp_path / "RAN")))
    (tmp_path / name).mkdir()
    (tmp_path / name / "train.jsonl").write_text(json.dumps(row(id=7)) + "\n")
    chosen = read(Path(name))
    assert [scenario.id for scenario in chosen.scenarios] == ["7"]
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize("code", ["train.pkl", "folder.py", "test.PICKLE"])
def test_a_folder_that_holds_code_is_refused(tmp_path: Path, code: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(row(id=7)) + "\n")
    (folder / code).write_bytes(pickle.dumps(_Bomb(tmp_path / "RAN")))
    with pytest.raises(UsageError, match=r"is not a folder of questions: it contains .* files\. ") as raised:
        read(folder)
    assert "no code or pickles" in raised.value.hint and not (tmp_path / "RAN").exists()


def test_the_card_of_a_folder_does_not_choose_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.jsonl").write_text(json.dumps(row(id=8)) + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text(json.dumps(row(id=7)) + "\n")
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {tmp_path / 'elsewhere.jsonl'}\n---\n"
    (tmp_path / "folder" / "README.md").write_text(card)
    chosen = read(tmp_path / "folder")
    assert [scenario.id for scenario in chosen.scenarios] == ["7"]


def test_without_a_network_the_error_names_the_alternatives() -> None:
    with pytest.raises(EmailRLError) as raised:
        read(None, "test")
    assert raised.value.exit_code == 1
    assert "the hub cannot be reached" in raised.value.message and "--questions FILE" in raised.value.hint
