"""A checkpoint of DeepSeek-V3's size, its weights holes in sparse files: opened, checked, planned and proved."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from mega_rl.converters.hf.config import parse_hf_config
from mega_rl.converters.plan.parameters import hf_tensors
from mega_rl.converters.safetensors.header import INDEX_FILE
from mega_rl.converters.safetensors.reader import FP8_BLOCK, SCALE_SUFFIX
from tests.helpers.selection import FULL
from tests.unit_tests.converters.hub_configs import DEEPSEEK_V3

pytestmark = pytest.mark.skipif(not FULL, reason="make test-full: an index of all tensors of DeepSeek-V3")
NUM_SHARDS = 163
# Measured in a process of its own, so that nothing else counts. CPU time, in units of a loop of plain Python beside it:
# the bound is about the program, and the machine that runs the tests may be busy or slow.
MEASURED = """
import json, resource, sys, time
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.converters.live.load import check_tensors
from mega_rl.converters.plan.parameters import as_on_disk
from mega_rl.converters.plan.ranks import build_plan
from mega_rl.converters.plan.sharding import Sharding
from mega_rl.converters.plan.proof import prove_complete
from mega_rl.converters.safetensors.reader import CheckpointReader
from mega_rl.parallel.layout import ParallelLayout

def loop():
    start = time.process_time()
    sum(number * number for number in range(3_000_000))
    return time.process_time() - start

sizes, units = json.loads(sys.argv[2]), [loop()]
layout = ParallelLayout(**sizes | {"pipeline": tuple(sizes["pipeline"]) if "pipeline" in sizes else None})
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
hf = read_hf_config(sys.argv[1])
reader = CheckpointReader(sys.argv[1])
opened = time.process_time()
hf = as_on_disk(hf, {name: info.shape for name, info in reader.tensors.items()})
sharding = Sharding(hf, layout)
prove_complete(sharding)
ignored, absent = check_tensors(reader, hf, "lm")
plan = build_plan(sharding, layout.coordinates(layout.world_size - 1))
planned = time.process_time()
units.append(loop())
result = {
    "open": (opened - start) / max(units),
    "all": (planned - start) / max(units),
    "peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024,
    "tensors": len(reader.tensors),
    "params": len(plan),
    "read": reader.bytes_read,
    "absent": len(absent),
}
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """91,990 tensors in 163 files of 688 GB, none of which is on disk."""
    root = tmp_path_factory.mktemp("deepseek_v3")
    (root / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    entries: list[tuple[str, str, tuple[int, ...], int]] = []
    for name, tensor in hf_tensors(replace(parse_hf_config(DEEPSEEK_V3), mtp="load"), head="lm").items():
        if name.endswith(("proj.weight", "a_proj_with_mqa.weight")) and "eh_proj" not in name:
            rows, cols = tensor.shape
            entries.append((name, "F8_E4M3", tensor.shape, 1))
            entries.append((name + SCALE_SUFFIX, "F32", (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)), 4))
        else:
            entries.append((name, *(("F32", tensor.shape, 4) if tensor.float32 else ("BF16", tensor.shape, 2))))
    each = -(-len(entries) // NUM_SHARDS)
    weight_map = {}
    for number in range(NUM_SHARDS):
        file = root / f"model-{number + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        header, at = {}, 0
        for name, dtype, shape, itemsize in entries[number * each : (number + 1) * each]:
            end = at + prod(shape) * itemsize
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            weight_map[name], at = file.name, end
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(file, 8 + len(text) + at)
    (root / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return root


LAYOUTS: dict[str, dict[str, object]] = {
    "one rank": {},
    "tp8-pp2-ep64": {"world_size": 128, "tp": 8, "pp": 2, "ep": 64, "pipeline": [31, 30]},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_opening_planning_and_proving(checkpoint: Path, layout: dict[str, object]) -> None:
    """In seconds, and memory for one description of each tensor: 4 KiB is above what a plan takes, below any weight.

    A loop takes some 0.2 s; opening takes 5 loops and all 16. Comparing all pairs of tensors would take thousands.
    """
    command = [sys.executable, "-c", MEASURED, str(checkpoint), json.dumps(layout)]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert measured["tensors"] > 46_000
    assert measured["read"] == measured["absent"] == 0
    assert measured["params"] > 500
    assert measured["open"] < 15
    assert measured["all"] < 40
    assert measured["peak"] < 4096 * measured["tensors"]
