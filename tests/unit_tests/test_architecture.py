"""A ratchet: the structure of the package gets better or stays as it is.

A limit with exceptions names each of them with its present value: a new one fails, and so does one that became better
or disappeared until its entry is lowered or removed. `python -m tests.house` prints all measurements.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.house import PACKAGE, House, measure, vague_names

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_NESTING = 3
MAX_PARAMETERS = 8
MAX_METHODS = 12
MAX_FILES_OF_A_FOLDER = 15

LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}
DEEP_FUNCTIONS: dict[str, int] = {}
# In cli/ a parameter is an option of the command line. Signatures with "upstream" are called by another library.
MANY_PARAMETERS: dict[str, int] = {
    "cli/checkpoint.py: export": 9,
    "cli/convert.py: export": 10,
    "cli/convert.py: import_": 13,
    "cli/convert.py: reshard": 10,
    "cli/plan.py: plan": 11,
    "engines/fsdp/attention.py: _attention": 11,  # upstream: AttentionInterface of transformers
    "models/attention.py: __init__": 10,  # upstream: core attention of Megatron-Core
    "parallel/vocab_kernels.py: _differentiate_rows": 15,  # upstream: a kernel of Triton takes pointers and numbers
    "parallel/vocab_kernels.py: _sum_rows": 10,
}
# Engines, stores and servers have the methods of their protocols; helpers below them are private.
MANY_METHODS: dict[str, int] = {
    "checkpoint/store.py: RunCheckpoints": 18,  # CheckpointStore's, and steps of a pending save
    "parallel/comm.py: GroupRanks": 13,  # Ranks' collectives over one group
    "rollout/sglang/generation/engine.py: SglangRolloutEngine": 14,  # BackgroundEngine's
    "rollout/sglang/generation/router.py: ServerRouter": 16,  # Rotation's, generation, its event loop
    "rollout/sglang/generation/scheduler.py: SampleScheduler": 16,  # queue, tries in flight, ends: one state machine
    "rollout/sglang/server/process.py: ServerProcess": 16,  # a process from its port to its end
    "storage/safetensors_reader.py: CheckpointReader": 14,  # tensors, rows, rectangles
}

# Ranks and their launchers read torchrun's variables; the others those of the tool that they speak to.
READ_THE_ENVIRONMENT = [
    "accelerator/cuda.py",
    "accelerator/threads.py",
    "assemble/run.py",
    "checkpoint/saving/writer.py",
    "cli/app.py",
    "cli/evaluation/command.py",
    "cli/launch/ray.py",
    "cli/launch_options.py",
    "cli/text/convert.py",
    "cli/train.py",
    "cli/verify.py",
    "converters/live/copying.py",
    "converters/offline/world.py",
    "cores.py",
    "environment.py",
    "health/flight_recorder.py",
    "hub/node.py",
    "launcher/launch.py",
    "launcher/peers.py",
    "parallel/groups.py",
    "plan/preflight/host.py",
    "rollout/sglang/server/cpu_stand_ins.py",
    "rollout/sglang/server/kept.py",
    "rollout/sglang/server/launcher.py",
    "rollout/sglang/server/pool.py",
    "rollout/sglang/server/private_files.py",
    "schedulers/ray/node.py",
    "schedulers/ray/placement.py",
    "schedulers/slurm/tasks.py",
    "tracking/metrics/trackers.py",
    "tracking/progress/terminal.py",
    "trainer/stop.py",
    "verify/launcher.py",
    "verify/measure.py",
    "verify/rank.py",
]
# accelerator.cpu and what it loads patch Megatron-Core on a CPU; the launcher and its two helpers change SGLang in the
# server's own process; groups clears a cache of Megatron-Core; the others set a documented switch of a library.
CHANGE_FOREIGN_MODULES = [
    "accelerator/cpu.py",
    "parallel/gloo.py",  # groups take their options from nowhere else
    "parallel/groups.py",
    "rollout/sglang/server/cpu_stand_ins.py",
    "rollout/sglang/server/launcher.py",
    "rollout/sglang/server/private_files.py",
    "sandbox/inside/candidate.py",  # both are programs of their own, which import nothing of the package
    "sandbox/inside/suite.py",
    "tracking/progress/terminal.py",
    "workers/user_files.py",
]

# Ceilings of counts. Lower one when the count falls.
CEILINGS = {
    "own_lazy_imports": 50,
    "any_annotations": 541,
    "type_ignores": 43,
    "broad_excepts": 16,
    "package_lines": 81523,
}


@pytest.fixture(scope="module")
def house() -> House:
    return measure()


def test_lines_of_files(house: House) -> None:
    assert above(house.files, MAX_FILE_LINES) == LONG_FILES


def test_files_of_folders(house: House) -> None:
    assert above(house.folders, MAX_FILES_OF_A_FOLDER) == {}


def test_lines_of_functions(house: House) -> None:
    assert above({f.name: f.lines for f in house.functions}, MAX_FUNCTION_LINES) == LONG_FUNCTIONS


def test_nesting(house: House) -> None:
    assert above({f.name: f.nesting for f in house.functions}, MAX_NESTING) == DEEP_FUNCTIONS


def test_parameters(house: House) -> None:
    assert above({f.name: f.parameters for f in house.functions}, MAX_PARAMETERS) == MANY_PARAMETERS


def test_methods(house: House) -> None:
    assert above(house.methods, MAX_METHODS) == MANY_METHODS


def test_a_class_name_stands_for_one_idea(house: House) -> None:
    assert {name: places for name, places in house.class_names.items() if len(places) > 1} == {}


def test_who_reads_the_environment(house: House) -> None:
    assert house.environment_readers == READ_THE_ENVIRONMENT


def test_who_changes_foreign_modules(house: House) -> None:
    assert house.foreign_changes == CHANGE_FOREIGN_MODULES


def test_docstrings_begin_with_a_verb_or_a_noun(house: House) -> None:
    assert house.vague_docstrings == {}


def test_variables_name_the_thing(house: House) -> None:
    assert house.vague_names == {}
    assert vague_names(PACKAGE.parent / "tests") == {}
    assert vague_names(PACKAGE.parent / "benchmarks") == {}


@pytest.mark.parametrize("name", CEILINGS)
def test_counts_only_fall(house: House, name: str) -> None:
    assert getattr(house, name) <= CEILINGS[name]


def test_below_assemble_no_function_takes_a_whole_config(house: House) -> None:
    """It gets the sections that it reads; `hub` replaces names in a Config by folders, `plan` is of a whole run."""
    above_or_beside = (
        "__init__",
        "api",
        "assemble",
        "cli",
        "config",
        "datafiles",
        "hub",
        "plan",
        "quickstart",
        "verify",
    )
    assert [name for name in house.config_takers if not name.startswith(above_or_beside)] == []
    assert any(name.startswith("assemble/") for name in house.config_takers)


def above(values: Mapping[str, int], limit: int) -> dict[str, int]:
    """Return the values above a limit; of functions of one name in one file the largest counts."""
    return {name: value for name, value in sorted(values.items()) if value > limit}
