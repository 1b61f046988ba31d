"""Stand-ins: right by themselves, and still what this release of SGLang needs. In a server: test_server.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.rollout.sglang.server.cpu_stand_ins import murmur_hash32
from mega_rl.rollout.sglang.server.installation import SGLANG_VERSION, find_sglang
from tests.helpers.selection import FULL
from tests.helpers.sglang import DEVICE, needs_sglang


def murmur3(data: bytes, start: int = 0) -> int:
    """MurmurHash3 (x86, 32 bits) of whole words, as its author describes it."""
    assert len(data) % 4 == 0

    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

    state = start
    for place in range(0, len(data), 4):
        word = int.from_bytes(data[place : place + 4], "little")
        state ^= rotated(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        state = (rotated(state, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


@pytest.mark.parametrize(
    ("data", "start", "expected"),
    [  # the vectors that implementations of MurmurHash3 share
        (b"", 0, 0),
        (b"", 1, 0x514E28B7),
        (b"", 0xFFFFFFFF, 0x81F16F39),
        (b"\xff\xff\xff\xff", 0, 0x76293B50),
        (b"\x21\x43\x65\x87", 0, 0xF55B516B),
        (b"\x21\x43\x65\x87", 0x5082EDEE, 0x2362F9DE),
        (b"\x00\x00\x00\x00", 0, 0x2362F9DE),
        (b"aaaa", 0x9747B28C, 0x5A97808A),
    ],
)
def test_the_reference_is_murmur3(data: bytes, start: int, expected: int) -> None:
    assert murmur3(data, start) == expected


def test_hash_is_murmur3_of_seed_position_token() -> None:
    generator = torch.Generator().manual_seed(0)
    edges = [0, 1, 42, 2**31, 2**32 - 1, 2**32, 2**62 + 5, 2**63 - 1, -1]
    seeds = torch.tensor([*edges, *torch.randint(2**62, (40,), generator=generator).tolist()])
    positions = torch.randint(2**31, (len(seeds),), generator=generator)
    positions[:3] = torch.tensor([0, 1, 2**31 - 1])
    tokens = torch.tensor([0, 1, 2, 50, 151935, 2**31 - 1])
    expected = [
        [
            murmur3((seed % 2**64).to_bytes(8, "little") + position.to_bytes(4, "little") + token.to_bytes(4, "little"))
            for token in tokens.tolist()
        ]
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    for given in (seeds, seeds.view(torch.uint64)):
        hashed = murmur_hash32(given, positions, tokens)
        assert hashed.dtype == torch.uint32
        assert hashed.to(torch.int64).tolist() == expected


def in_sglang(code: str) -> Any:
    """What `code` leaves in `found`, run where SGLang is on the path and nothing stands in for anything yet."""
    installation = find_sglang()
    assert installation is not None
    paths = [str(Path(__file__).parents[4]), *([str(installation.folder)] if installation.folder else [])]
    ran = subprocess.run(
        [sys.executable, "-c", f"import json\n{code}\nprint('FOUND', json.dumps(found))"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.rpartition("FOUND ")[2])


# Each line asks whether what a stand-in stands for is as it was when that was written.
ASSUMED = """
import ast, importlib.metadata, importlib.util, inspect, torch
from pathlib import Path
root = Path(importlib.util.find_spec("sglang").origin).parent
def source(path, name):
    tree = ast.parse((root / path).read_text("utf-8"))
    return next(ast.unparse(node) for node in ast.walk(tree) if getattr(node, "name", None) == name)
def wheel(name):
    return importlib.util.find_spec(name) is not None
seeded = source("srt/sampling/sampling_batch_info.py", "from_schedule_batch")
pinned = (root / "srt/mem_cache/pool_host/common.py").read_text("utf-8").partition("ALLOC_MEMORY_FUNCS = ")[2]
found = {
    "version": importlib.metadata.version("sglang"),
    "sgl_kernel is missing": not wheel("sgl_kernel"),
    "torchvision is a CUDA build": "+cpu" not in importlib.metadata.version("torchvision"),
    "triton is missing": not wheel("triton"),
    "the stand-in for macOS is there": (root / "_platform_stubs.py").read_text("utf-8").count("def install_platform_stubs") == 1,
    "a seed counts under --enable-deterministic-inference alone": "if enable_deterministic else None" in seeded,
    "its default is 42": "sampling_seed if r.sampling_params.sampling_seed is not None else 42" in seeded,
    "load snapshots are in /dev/shm": '/dev/shm/sglang_loads_' in source("srt/managers/load_snapshot.py", "shm_path_for"),
    "the ranks' meeting place can be told": "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE" in source("srt/distributed/bootstrap.py", "_resolve_dist_init_method"),
    "Megatron-Core is for the dumper": [p.name for p in root.rglob("*.py") if "from megatron" in p.read_text("utf-8")] == ["dumper.py"],
    "GC is frozen by an own request": "/freeze_gc" in source("srt/entrypoints/http_server.py", "_freeze_gc_after_server_warmup"),
    "memory is pinned by CUDA on CPUs, too": "lambda: alloc_with_host_register" in pinned and '"cpu":' not in pinned,
    "the hash is the kernel's": "torch.ops.sgl_kernel.murmur_hash32_cpu" in "".join(path.read_text("utf-8") for path in root.rglob("*murmur*.py")) + (root / "srt/layers/sampler.py").read_text("utf-8"),
}
"""  # noqa: E501


@needs_sglang
@pytest.mark.skipif(not FULL, reason="in `make test-full`: a question to a new release of SGLang")
@pytest.mark.skipif(DEVICE != "cpu", reason="CPUs alone need stand-ins")
def test_this_release_needs_every_stand_in() -> None:
    actual = in_sglang(ASSUMED)
    assert actual.pop("version") == SGLANG_VERSION
    assert [name for name, holds in actual.items() if not holds] == []
