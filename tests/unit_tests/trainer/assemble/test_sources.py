"""Choice of a user's own sources: what is checked before anything runs, and what reading their rows shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import mega_rl
from mega_rl.config.choices import DATA, ROLLOUT
from mega_rl.config.loader import load
from mega_rl.data import rows
from mega_rl.data.build import PromptReader
from mega_rl.data.columns import RewardColumns
from mega_rl.errors import UserError
from mega_rl.trainer.assemble.data import OwnRows, Tokens, load_data
from tests.helpers.models import write_digit_tokenizer, write_tiny_checkpoint

OWN = """
from dataclasses import dataclass


class Without:
    def __init__(self, context): ...


@dataclass
class Rows:
    context: object
    count: int = 2
    has_validation = True

    def __iter__(self):
        number = self.count if self.context.split == "train" else 1
        return ({"prompt": f"{i}+{self.context.seed}=", "answer": i} for i in range(number))


class Heir(Rows):
    pass


def bad(context):
    yield {"prompt": "1+1=", "answer": "2"}
    yield {"prompt": 3, "answer": "2"}
    yield ["1+1="]


def failing(context):
    yield {"prompt": "1+1=", "answer": "2"}
    raise KeyError("rows")


def empty(context):
    return iter(())


def endless(context):
    while True:
        yield {"prompt": "1+1=", "answer": "2"}


def number(context):
    return 3


def refusing(context):
    raise OSError("no connection")


three = 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and own.py."""
    folder = tmp_path_factory.mktemp("own")
    write_tiny_checkpoint(folder / "model", num_hidden_layers=1)
    write_digit_tokenizer(folder / "model", vocab_size=50)
    (folder / "own.py").write_text(OWN)
    return folder


def read(folder: Path, name: str, *settings: str) -> tuple[list[Any], Any]:
    """Training and held-out prompts of a source."""
    config = load(None, [f"data.source={folder}/own.py:{name}", *settings])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokens = Tokens(tokenizer, (1,), skip_special_tokens=True)
    make, validates = DATA.maker(config), config.trainer.val_interval > 0 and DATA.needs(config, "has_validation")
    assert make is not None
    source = OwnRows(make, config.data.source.name, config.trainer.seed, validates)
    reader = PromptReader(config.data, tokenizer, 50, RewardColumns(answer=True))
    return load_data(reader, {}, tokens, seed=config.trainer.seed, source=source)


def test_rows_of_a_source_are_prompts_of_each_split(folder: Path) -> None:
    train, held_out = read(folder, "Rows", "data.source.count=3", "trainer.val_interval=1", "trainer.seed=4")
    assert [(prompt.text, prompt.answer, prompt.index) for prompt in train] == [
        (f"{i}+4=", str(i), i) for i in range(3)
    ]
    assert [prompt.text for prompt in held_out[0].prompts] == ["0+4="]
    assert len(read(folder, "Heir", "trainer.val_interval=1")[1]) == 1  # has_validation is inherited
    assert len(read(folder, "Rows")[1]) == 0  # without validation the split is not read


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bad", "", "data.source='{}:bad' (train): row 2: 'prompt' is a number, not a string or a list of messages"),
        ("bad", "", "data.source='{}:bad' (train): row 3: is a list, not an object with 'prompt' and 'answer'"),
        ("failing", "", "data.source='{}:failing' fails while it yields rows: KeyError: 'rows'"),
        ("empty", "", "data.source='{}:empty' (train): yields no rows"),
        ("endless", "", "data.source='{}:endless' (train): yields more than 50 rows; let it end"),
        ("number", "", "data.source='{}:number': made int, which yields no rows; give it __iter__"),
        ("refusing", "", "data.source='{}:refusing' cannot be made: OSError: no connection"),
        (
            "three",
            "",
            "data.source='{}:three': it is made or called with one DataContext and the settings {{}}, but 3 is not",
        ),
        (
            "Without",
            "data.source.count=3",
            "data.source='{}:Without': it is made or called with one DataContext",
        ),
    ],
)
def test_mistakes_in_rows_are_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: str, message: str
) -> None:
    monkeypatch.setattr(rows, "MAX_ROWS", 50)
    with pytest.raises(UserError) as error:
        read(folder, name, *settings.split())
    assert any(line.startswith(message.format(folder / "own.py")) for line in str(error.value).splitlines())


def test_a_program_registers_sources_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, register in ((DATA, mega_rl.register_data_source), (ROLLOUT, mega_rl.register_rollout_source)):
        monkeypatch.setitem(choice.registered, "mine", object)  # taken back at the end

        @register("mine")
        class Mine:
            has_validation = True

            def __init__(self, context: object) -> None: ...

        config = load(None, [f"{choice.key}=mine"])
        assert list(choice.own_problems(config)) == []
        with pytest.raises(UserError, match="is a built-in one"):
            register(next(iter(choice.builtin)))(Mine)
