from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mega_rl.config.keys import FIELDS, SECTIONS, TYPES, flat, is_mapping
from mega_rl.config.loader import load
from mega_rl.config.schema import Config
from mega_rl.errors import UserErrors

TOP = ", ".join(section for section in SECTIONS if "." not in section)


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def problems(path: Path | None, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(UserErrors) as caught:
        load(path, overrides)
    return caught.value.problems


def test_defaults_without_a_recipe() -> None:
    assert load(None, []) == Config()


def test_recipe_then_overrides_and_the_last_one_wins(tmp_path: Path) -> None:
    path = recipe(tmp_path, "optim:\n  lr: 1e-6\n  beta1: 0.8\ntrainer:\n  steps: 7\nmodel:\n")
    config = load(path, ["optim.lr=3e-5", "trainer.seed=1", "trainer.seed=2"])
    assert (config.optim.lr, config.optim.beta1) == (3e-5, 0.8)
    assert (config.trainer.steps, config.trainer.seed) == (7, 2)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("1.0e-6", 1e-6), ("2E+0", 2.0), ("1", 1.0), (".5", 0.5), ("+3.", 3.0)]
)
def test_numbers_read_as_floats(tmp_path: Path, text: str, value: float) -> None:
    for config in (load(recipe(tmp_path, f"optim:\n  lr: {text}\n"), []), load(None, [f"optim.lr={text}"])):
        assert config.optim.lr == value
        assert type(config.optim.lr) is float


def test_python_types_of_a_whole_config() -> None:
    config = load(
        None, ["data.train_files=[a.jsonl, 'b c.jsonl']", "rollout.stop_token_ids=[1,2]", "trainer.timeout_s=5"]
    )
    assert config.data.train_files == ["a.jsonl", "b c.jsonl"]
    assert config.rollout.stop_token_ids == [1, 2]
    for key, value in flat(config).items():
        kind = dict if is_mapping(key) else getattr(TYPES[key], "__origin__", TYPES[key])
        assert type(value) is kind, key
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.optim.lr = 1.0  # type: ignore[misc]


def test_texts_that_yaml_takes_for_something_else() -> None:
    for text in ("2026", "true", "1e5", "2026-01-01", "", "a=b", "~"):
        assert load(None, [f"trainer.run_dir={text}"]).trainer.run_dir == text


def test_dates_in_a_recipe_stay_texts(tmp_path: Path) -> None:
    assert load(recipe(tmp_path, "trainer:\n  run_dir: 2026-01-01\n"), []).trainer.run_dir == "2026-01-01"


def test_references_to_other_keys(tmp_path: Path) -> None:
    path = recipe(tmp_path, "trainer:\n  prompts_per_step: 8\n  minibatch_size: ${trainer.prompts_per_step}\n")
    assert load(path, []).trainer.minibatch_size == 8
    config = load(path, ["trainer.prompts_per_step=4", "trainer.run_dir=runs/${rollout.backend}"])
    assert (config.trainer.minibatch_size, config.trainer.run_dir) == (4, "runs/hf")


def test_references_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "shown")
    for value in ("${oc.env:SECRET}", "${${model.dtype}:SECRET}", "${oc.decode:'1'}", "${", "a${b", "${model[path]}"):
        (line,) = problems(None, f"model.path={value}")
        assert line == f"model.path={value!r}: only ${{section.key}} references are allowed; write the value"
    (line,) = problems(None, "data.train_files=['${oc.env:SECRET}']")
    assert "only ${section.key} references" in line


UNKNOWN = {
    "optim.l_r=1": "optim.l_r: unknown key; did you mean optim.lr?",
    "optim.learning_rate=1": "optim.learning_rate: unknown key; TRL's learning_rate is optim.lr here",
    "lr=1": "lr: unknown key; did you mean optim.lr?",
    "trainer.lr=1": "trainer.lr: unknown key; did you mean optim.lr?",
    "rolout.n=1": "rolout.n: unknown key; did you mean rollout.n?",
    "engine.tensor_parallel_size=2": "engine.tensor_parallel_size: unknown key; did you mean engine.megatron.tp?",
    "data.train_file=[a]": "data.train_file: unknown key; did you mean data.train_files?",
    "+optim.lr=1": "+optim.lr: unknown key; did you mean optim.lr?",
    "metrics.xyz=1": "metrics.xyz: unknown key; metrics has tensorboard, trackers, project, run_name, "
    "progress_bar, rollout_samples, rollout_interval, print_samples, records",
    "engin=fsdp": "engin: unknown key; did you mean engine? engine has backend, resident_roles, megatron, fsdp",
    "xyz.abc=1": f"xyz.abc: unknown key; the sections are {TOP}",
}


@pytest.mark.parametrize(("override", "line"), UNKNOWN.items())
def test_unknown_keys_name_the_nearest(override: str, line: str) -> None:
    assert problems(None, override) == (line,)


BAD_VALUES = {
    "optim.lr=fast": "optim.lr='fast': needs a finite number, above 0",
    "optim.lr=0": "optim.lr=0: must be above 0",
    "optim.lr=.nan": "optim.lr=nan: needs a finite number, above 0",
    "optim.lr=.inf": "optim.lr=inf: needs a finite number, above 0",
    "optim.lr=true": "optim.lr=True: needs a finite number, above 0",
    "optim.lr=": "optim.lr=None: needs a finite number, above 0",
    "optim.beta1=1": "optim.beta1=1: must be at least 0 and at most 0.9999",
    "engine.megatron.tp=0": "engine.megatron.tp=0: must be at least 1 (ranks)",
    "engine.megatron.tp=1.5": "engine.megatron.tp=1.5: needs a whole number, at least 1",
    "engine.megatron.tp=true": "engine.megatron.tp=True: needs a whole number, at least 1",
    "trainer.microbatch.packing=1": "trainer.microbatch.packing=1: needs true or false",
    "model.dtype=fp16": "model.dtype='fp16': must be one of bf16, fp32",
    "data.train_files=a.jsonl,b.jsonl": "data.train_files='a.jsonl,b.jsonl': needs a list of texts; write it as [a, b]",
    "data.train_files=''": "data.train_files='': needs a list of texts; write it as [a, b]",
    "data.train_files=[1]": "data.train_files=[1]: needs a list of texts; write it as [a, b]",
    "rollout.stop_token_ids=[[1]]": "rollout.stop_token_ids=[[1]]: needs a list of whole numbers; write it as [a, b]",
    f"optim.lr={'9' * 400}": f"optim.lr={'9' * 18}...{'9' * 19}: needs a finite number; this one is too large",
    "trainer.steps={a: 1}": "trainer.steps={'a': 1}: needs a whole number, at least 1",
    "model.path=${model.path}": "model.path='${model.path}': refers to a key that does not exist or to itself",
    "model.path=${model.nope}": "model.path='${model.nope}': refers to a key that does not exist or to itself",
    "trainer.steps=${model.dtype}": "trainer.steps='${model.dtype}': needs a whole number, at least 1",
    "model.path": "override 'model.path': needs the form section.key=value",
    "=1": "override '=1': needs the form section.key=value",
    "optim=3": "override 'optim=3': optim is a section; set one of its keys, as optim.key=value",
}


@pytest.mark.parametrize(("override", "line"), BAD_VALUES.items())
def test_bad_values(override: str, line: str) -> None:
    assert problems(None, override) == (line,)


BAD_RECIPES = {
    "optim:\n  lr: [1\n": "line 3: not valid YAML: ",
    "optim:\n\tlr: 1\n": "line 2: not valid YAML: ",
    "optim:\n  lr: 1\n  lr: 2\n": "line 3: lr is given twice; keep one",
    "optim:\n  lr: 1\nmodel: {}\noptim: {}\n": "line 4: optim is given twice; keep one",
    "- a\n": "is a list; it must hold sections such as 'model:' with 'key: value' lines",
    "": "is empty; it must hold sections such as 'model:' with 'key: value' lines",
    "optim: !!python/object/apply:os.system [touch hacked]\n": "line 1: not valid YAML: could not determine a",
    "? [a]\n: 1\n": "line 1: not valid YAML: found unhashable key",
    "a: &a [*a]\nb: *c\n": "line 1: anchors (&) and aliases (*) are not read; write it out",
    "a: *c\n": "line 1: anchors (&) and aliases (*) are not read",
    "data: &r {chat: {template_kwargs: {a: *r}}}\n": "line 1: anchors (&) and aliases (*) are not read",
    "optim:\n  <<: &b {lr: 1}\n": "line 2: anchors (&)",
    "data: {chat: {template_kwargs: {a: !!str &s x}}}\n": "line 1: anchors (&)",
    "[" * 3000: "line 1: not valid YAML: ",
}


@pytest.mark.parametrize(("text", "end"), BAD_RECIPES.items(), ids=range(len(BAD_RECIPES)))
def test_recipes_that_are_not_recipes(tmp_path: Path, text: str, end: str) -> None:
    path = recipe(tmp_path, text)
    (line,) = problems(path)
    assert line.startswith(f"recipe {path}: {end}")
    assert "\n" not in line
    assert not Path("hacked").exists()


def test_recipe_files_that_cannot_be_read(tmp_path: Path) -> None:
    (line,) = problems(tmp_path / "nope.yaml")
    assert line.startswith(f"recipe '{tmp_path / 'nope.yaml'}' does not exist, as a file or as a packaged recipe; ")
    (line,) = problems(tmp_path)
    assert line == f"recipe {tmp_path} cannot be read: Is a directory"
    (tmp_path / "latin.yaml").write_bytes(b"model:\n  path: \xff\n")
    (line,) = problems(tmp_path / "latin.yaml")
    assert line.startswith(f"recipe {tmp_path / 'latin.yaml'}: 'utf-8' codec can't decode byte 0xff")


def test_unknown_sections_of_a_recipe(tmp_path: Path) -> None:
    path = recipe(tmp_path, "optimizer:\n  lr: 1\nsteps: 3\n5: 1\nmodel: x\n")
    assert problems(path) == (
        "optimizer: unknown key; did you mean optim?",
        "steps: unknown key; did you mean trainer.steps?",
        f"5: unknown key; the sections are {TOP}",
        "model='x': is a section; give it lines of 'key: value'",
    )


def test_a_dictconfig_is_loaded_with_its_references() -> None:
    given = OmegaConf.create(
        {"optim": {"lr": 1e-5}, "trainer": {"prompts_per_step": 8, "minibatch_size": "${trainer.prompts_per_step}"}}
    )
    config = load(None, given)
    assert (config.optim.lr, config.trainer.minibatch_size) == (1e-5, 8)
    with pytest.raises(UserErrors, match=r"optim\.l_r: unknown key"):
        load(None, OmegaConf.create({"optim": {"l_r": 1}}))


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    path = recipe(tmp_path, "optim:\n  lr: -1\n  foo_bar_baz: 1\nmodel:\n  dtype: fp64\n")
    lines = problems(path, "engine.megatron.tp=0", "nonsense")
    assert len(lines) == 5
    assert [line.split("=")[0].split(":")[0] for line in lines] == [
        "optim.foo_bar_baz",
        "override 'nonsense'",
        "engine.megatron.tp",
        "model.dtype",
        "optim.lr",
    ]


@pytest.mark.parametrize("last", ["model: {path: *z}", "data: {chat: {template_kwargs: {a: *z}}}"])
def test_an_alias_bomb_is_refused_in_one_short_line(tmp_path: Path, last: str) -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    lines = ["a: &a [x, x, x, x, x, x, x, x]"]
    lines += [f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]" for before, name in pairwise(names)]
    (actual,) = problems(recipe(tmp_path, "\n".join(lines) + f"\n{last}\n"))
    assert "anchors (&) and aliases (*) are not read" in actual


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FIELDS)), st.text(max_size=12), st.sampled_from(["", "x", "_"]))
def test_any_override_gives_a_config_or_one_line_errors(key: str, text: str, typo: str) -> None:
    lines: tuple[str, ...] = ()
    try:
        load(None, [f"{key}{typo}={text}"])
    except UserErrors as error:
        lines = error.problems
    assert all(line and line.isprintable() for line in lines)
    assert lines or not typo
