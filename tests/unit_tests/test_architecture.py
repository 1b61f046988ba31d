"""A ratchet: the structure of the package gets better or stays as it is.

A limit with exceptions names each exception with its present value. A new exception fails, and so does one that became
better or disappeared, until its entry is lowered or removed. `python -m tests.house` prints all measures;
`python -m tests.house --lower` lowers the ceilings to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping

import pytest

from tests.house import CEILINGS, PACKAGE, House, ceilings, measure, nodes_of, vague_names

# In cli/ a parameter is an option of the command line. Signatures with "upstream" are called by another library.
MANY_PARAMETERS: dict[str, int] = {
    "cli/checkpoint.py: export": 9,
    "cli/convert.py: export": 10,
    "cli/convert.py: import_": 9,
    "cli/look.py: plan": 11,
    "engines/fsdp_model.py: _attention": 10,  # upstream: AttentionInterface of transformers
    "engines/models/attention.py: __init__": 10,  # upstream: core attention of Megatron-Core
    "parallel/vocab_kernels.py: _differentiate_rows": 13,  # upstream: a kernel of Triton takes pointers and numbers
    "parallel/vocab_kernels.py: _sum_rows": 10,
}
# Engines, stores and servers have the methods of their protocols; helpers below them are private.
MANY_METHODS: dict[str, int] = {
    "checkpoint/store.py: RunCheckpoints": 14,  # a store's, and steps of a pending save
    "engines/base.py: ModelEngine": 19,  # an engine's, and the steps of an update that backends fill in
    "parallel/comm.py: GroupRanks": 13,  # Ranks' collectives over one group
    "converters/safetensors/reader.py: CheckpointReader": 13,  # tensors, rows, rectangles
}

# Ranks and their launchers read torchrun's variables; the others those of the tool that they speak to.
READ_THE_ENVIRONMENT = [
    "cli/app.py",
    "cli/launch.py",
    "cli/train.py",
    "cli/verify.py",
    "converters/live/copying.py",
    "environment.py",
    "operations/launcher/launch.py",
    "operations/schedulers/__init__.py",
    "operations/schedulers/ray.py",
    "operations/schedulers/slurm.py",
    "parallel/accelerator/__init__.py",
    "parallel/accelerator/base.py",
    "parallel/groups.py",
    "plan/preflight/host.py",
    "rollout/sglang/server/addresses.py",
    "rollout/sglang/server/cpu_stand_ins.py",
    "rollout/sglang/server/launcher.py",
    "tracking/health/flight_recorder.py",
    "tracking/health/records.py",
    "tracking/metrics/trackers.py",
    "tracking/progress/terminal.py",
    "trainer/assemble/run.py",
    "trainer/loop.py",
    "verify/launcher.py",
    "verify/measure.py",
]
# accelerator.cpu and what it loads patch Megatron-Core on a CPU; the launcher and its two helpers change SGLang in the
# server's own process; groups clears a cache of Megatron-Core; the others set a documented switch of a library.
CHANGE_FOREIGN_MODULES = [
    "config/user_files.py",
    "parallel/accelerator/cpu.py",
    "parallel/groups.py",
    "rewards/sandbox/harness.py",  # a program that imports nothing of the package
    "rollout/sglang/server/cpu_stand_ins.py",
    "rollout/sglang/server/launcher.py",
    "tracking/progress/terminal.py",
]

# Measure -> (its values, the limit, those above it)
LIMITS: dict[str, tuple[Callable[[House], Mapping[str, int]], int, Mapping[str, int]]] = {
    "lines of a file": (lambda house: house.files, 600, {}),
    "files of a folder": (lambda house: house.folders, 15, {}),
    "lines of a function": (lambda house: {f.name: f.lines for f in house.functions}, 60, {}),
    "nesting of a function": (lambda house: {f.name: f.nesting for f in house.functions}, 3, {}),
    "parameters": (lambda house: {f.name: f.parameters for f in house.functions}, 8, MANY_PARAMETERS),
    "methods": (lambda house: house.methods, 12, MANY_METHODS),
    # A dataclass with methods that do work: its constructor is a signature.
    "fields": (lambda house: house.busy_dataclasses, 12, {}),
    "modules of the package that one imports": (lambda house: counted(house.imports), 25, {}),
    # Classes that hold an object of a protocol and have the protocol's methods themselves.
    "wrappers": (lambda house: counted(house.wrappers), 3, {}),
}
# The face of the package for Python programs, and the loop that it builds.
SHARED_CLASS_NAMES = {"Trainer": ["api.py", "trainer/loop.py"]}
# Modules below 60 lines that one module imports.
SLIVERS: dict[str, str] = {}
MAX_SLIVERS = 14  # falls to the number of SLIVERS


@pytest.fixture(scope="module")
def house() -> House:
    return measure()


def counted(values: Mapping[str, Collection[str]]) -> dict[str, int]:
    return {name: len(own) for name, own in values.items()}


@pytest.mark.parametrize("what", LIMITS)
def test_only_the_named_are_above_a_limit(house: House, what: str) -> None:
    values, limit, above = LIMITS[what]
    assert {name: value for name, value in sorted(values(house).items()) if value > limit} == above


def test_a_class_name_stands_for_one_idea(house: House) -> None:
    assert {name: places for name, places in house.class_names.items() if len(places) > 1} == SHARED_CLASS_NAMES


def test_who_reads_the_environment(house: House) -> None:
    assert house.environment_readers == READ_THE_ENVIRONMENT


def test_who_changes_foreign_modules(house: House) -> None:
    assert house.foreign_changes == CHANGE_FOREIGN_MODULES


def test_docstrings_begin_with_a_verb_or_a_noun(house: House) -> None:
    assert house.vague_docstrings == {}


def test_variables_name_the_thing(house: House) -> None:
    assert house.vague_names == {}
    for folder in ("tests", "benchmarks"):
        assert vague_names(nodes_of(PACKAGE.parent / folder)) == {}


def test_small_modules_with_one_importer(house: House) -> None:
    assert len(set(house.slivers) - SLIVERS.keys()) <= MAX_SLIVERS


def test_measures_only_fall(house: House) -> None:
    limits, now = json.loads(CEILINGS.read_text("utf-8")), ceilings(house)
    assert now.keys() <= limits.keys(), "a new top-level folder needs a ceiling in tests/house_ceilings.json"
    assert {name: value for name, value in now.items() if value > limits[name]} == {}


# Functions of the assembly that begin a run, take a Config apart, or record the whole of it.
DOORS = (
    *(
        "build_trainer",
        "build_trainers",
        "build_sampled",
        "read_inputs",
        "plan_run",
        "choose_method",
        "build_actor",
        "engine_settings",
    ),
    *("train", "running", "session", "evaluate", "_run", "_results", "identify", "show_run", "role_facts"),
)


def test_below_the_assembly_no_function_takes_a_whole_config(house: House) -> None:
    """It gets its sections; `data/downloads` replaces names in a Config by folders, `plan` is of a whole run."""
    above_or_beside = ("__init__", "api", "trainer/assemble", "cli", "config", "data/downloads", "plan", "verify")
    assert [name for name in house.config_takers if not name.startswith(above_or_beside)] == []
    of_assembly = [name.rpartition(": ")[2] for name in house.config_takers if name.startswith("trainer/assemble/")]
    assert sorted(of_assembly) == sorted(DOORS)
