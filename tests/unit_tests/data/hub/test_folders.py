"""Local folders in the shape of a dataset repository: which files a split is, and mistakes in their names."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from mega_rl.config.loader import load
from mega_rl.data.downloads import fetch, hub_names
from mega_rl.data.hub import FolderName, dataset_name, folder_name
from mega_rl.errors import UserError
from tests.helpers.hub_server import dataset_card, parquet_bytes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """openai/gsm8k as it would lie on a disk, train in two files; the library's work is done in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    root = Path("openai/gsm8k")
    for name in ("main/train-0", "main/train-1", "main/test-0", "socratic/train-0"):
        file = root / f"{name}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(parquet_bytes(question=[name], answer=["#### 1"]))
    (root / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train-*}\n"
        "  - {split: test, path: main/test-*}\n- config_name: socratic\n  data_files:\n"
        "  - {split: train, path: socratic/train-*}\n---\n"
    )
    return root


def files_of(text: str, key: str = "data.train_files") -> list[str]:
    config = load(None, ["model.path=m", f"{key}=['{text}']"])
    fetched = fetch(config, hub_names(config), admit=lambda described: None)
    files = fetched.data.train_files if key == "data.train_files" else fetched.data.val_files
    assert fetched.origins[key] == [text], "config.yaml keeps the folder"
    return [str(Path(file).relative_to(Path.cwd())) for file in files]


def test_a_folder_that_exists_is_no_name_on_the_hub(folder: Path) -> None:
    for text in ("openai/gsm8k", "openai/gsm8k:main", "openai/gsm8k:main:train"):
        assert dataset_name(text) is None
        name = folder_name(text)
        assert name is not None
        assert str(name) == text
    assert folder_name("openai/other:main:train") is None
    assert dataset_name("openai/other:main:train") is not None
    Path("a:b").mkdir()
    assert folder_name("a:b") == FolderName("a:b")
    assert folder_name("a:b:main") == FolderName("a:b", "main")


def test_a_split_is_its_files_where_they_lie(folder: Path) -> None:
    train = ["openai/gsm8k/main/train-0.parquet", "openai/gsm8k/main/train-1.parquet"]
    assert files_of("openai/gsm8k:main:train") == files_of("openai/gsm8k:main") == train
    assert files_of("openai/gsm8k:main", "data.val_files") == ["openai/gsm8k/main/test-0.parquet"]
    assert files_of("openai/gsm8k:socratic") == ["openai/gsm8k/socratic/train-0.parquet"]


def test_files_stand_beside_a_folder(folder: Path) -> None:
    Path("own.jsonl").write_text("{}\n")
    config = load(None, ["model.path=m", "data.train_files=[own.jsonl, 'openai/gsm8k:socratic', openai/none]"])
    names = hub_names(config).data["data.train_files"]
    assert list(map(str, names.values())) == ["openai/gsm8k:socratic", "openai/none"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("openai/gsm8k:other", "has no configuration 'other'; legal: main, socratic"),
        ("openai/gsm8k", "name one of its configurations, as openai/gsm8k:main; legal: main, socratic"),
        ("openai/gsm8k:main:dev", "has no split 'dev'; legal: train, test"),
        ("openai/gsm8k:main:train[10%]", "takes a part of the split, train[10%]; name the whole of it"),
        ("empty:main", "the datasets library cannot read it: EmptyDatasetError: "),
    ],
)
def test_mistakes_in_a_name(folder: Path, text: str, message: str) -> None:
    Path("empty").mkdir()
    with pytest.raises(UserError) as error:
        files_of(text)
    assert str(error.value).startswith(f"data.train_files={text}: {message}")


def test_a_card_leads_to_no_file_outside_and_to_rows_alone(folder: Path) -> None:
    Path("secret.parquet").write_bytes(parquet_bytes(question=["a"]))
    card = folder / "README.md"
    card.write_text(card.read_text().replace("main/train-*", "../../secret.parquet"))
    with pytest.raises(UserError, match=r"secret.parquet, which is outside of the folder|cannot read it"):
        files_of("openai/gsm8k:main:train")
    (folder / "main" / "a.csv").write_text("question\na\n")
    card.write_text(dataset_card(main=["train"]).decode().replace("main/train.parquet", "main/a.csv"))
    with pytest.raises(UserError, match=r"a.csv; files of rows are .parquet or .jsonl"):
        files_of("openai/gsm8k:main:train")
