"""Parts of device.py that need no engine: the machine, the head, gradient sums, host copies, CUDA IPC."""

from __future__ import annotations

import base64
import contextlib
import importlib.metadata
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
PACKAGES = ("torch", "triton", "transformers", "tensordict", "megatron-core", "transformer-engine", "numpy")
Record = dict[str, Any]


def synchronize() -> None:
    """Wait for the device."""
    if GPU:
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], *, rounds: int = 5, warmup: int = 2) -> float:
    """Return the median seconds of a call, the device's work included."""
    for _ in range(warmup):
        work()
    seconds = []
    for _ in range(rounds):
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def peak_bytes(work: Callable[[], Any]) -> int:
    """Return the most bytes of device memory that a call holds beyond those before it; 0 on a CPU."""
    if not GPU:
        work()
        return 0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(nbytes: int) -> float:
    """Return the bytes per second that a copy on the device reads and writes."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * nbytes / timed(lambda: target.copy_(source))


def machine(*, tiny: bool) -> Iterator[Record]:
    """Versions, and what a plain product and a plain copy reach."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    name = torch.cuda.get_device_name() if GPU else "cpu"
    yield {"device": name, "versions": ", ".join(f"{key} {value}" for key, value in versions.items())}
    size = 256 if tiny else 8192
    matrix = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    seconds = timed(lambda: matrix @ matrix)
    yield {"bf16_tflops": 2 * size**3 / seconds / 1e12, "copy_tb_s": copy_bandwidth(1 << (20 if tiny else 32)) / 1e12}


def head(*, tiny: bool) -> Iterator[Record]:
    """Time and memory of log-probs from hidden states, forward and backward, at Qwen3-4B's output layer.

    With kernels where the run has them (Triton on a GPU), with the loops that are their reference, with float32 logits
    (`model.fp32_head`), and as torch writes it.
    """
    vocab, hidden = (1000, 64) if tiny else (151936, 2560)
    weight = (torch.randn(vocab, hidden, device=DEVICE) * 0.02).bfloat16().requires_grad_()
    for tokens in (64,) if tiny else (8192, 16384):
        states = torch.randn(tokens, hidden, device=DEVICE).bfloat16().requires_grad_()
        targets = torch.randint(vocab, (tokens,), device=DEVICE)

        def product(states: Tensor = states) -> None:
            logits = states @ weight.T
            logits.backward(logits)

        gemm = timed(product, rounds=3, warmup=1)
        for name, work in _heads(states, weight, targets).items():
            yield _head_record(name, work, gemm=gemm, logits=tokens * vocab) | {"tokens": tokens}


# What the name of a form ends with -> the suffix of its figures. Expectations hold for forms without one alone.
SUFFIXES = {"without kernels": "_loops", "float32 logits": "_fp32", "in float32": "_plain"}


def _heads(states: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Callable[[], None]]:
    from mega_rl.parallel import vocab
    from mega_rl.parallel.vocab import fp32_linear

    def ours(*, with_entropy: bool, kernels: bool = True, fp32: bool = False) -> None:
        logits = fp32_linear(states, weight) if fp32 else states @ weight.T
        with contextlib.nullcontext() if kernels else patch.object(vocab, "_kernels", lambda logits: None):
            logprobs, entropy = vocab.vocab_parallel_logprobs_entropy(
                logits, targets, group=None, with_entropy=with_entropy
            )
            (logprobs.sum() + (entropy.sum() if with_entropy else 0.0)).backward()

    def plain() -> None:
        torch.log_softmax((states @ weight.T).float(), -1).gather(1, targets[:, None]).sum().backward()

    return {
        "log-probs": lambda: ours(with_entropy=False),
        "log-probs and entropy": lambda: ours(with_entropy=True),
        "log-probs without kernels": lambda: ours(with_entropy=False, kernels=False),
        "log-probs and entropy without kernels": lambda: ours(with_entropy=True, kernels=False),
        "log-probs of float32 logits": lambda: ours(with_entropy=False, fp32=True),
        "log_softmax in float32": plain,
    }


def _head_record(name: str, work: Callable[[], None], *, gemm: float, logits: int) -> Record:
    try:
        seconds = timed(work, rounds=3, warmup=1)
        peak = peak_bytes(work)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"case": f"{name}: out of memory"}
    suffix = next((suffix for end, suffix in SUFFIXES.items() if name.endswith(end)), "")
    ratios = {f"over_gemm{suffix}": seconds / gemm, f"peak_bytes_per_logit{suffix}": peak / logits}
    return {"case": name, "ms": seconds * 1e3, "gemm_ms": gemm * 1e3} | ratios


def sums(*, tiny: bool) -> Iterator[Record]:
    """The sum behind the reduce-scatter with FP32 accumulation, against a copy of as many bytes."""
    from mega_rl.ddp.reduce_scatter import sum_rows

    total = 1 << (16 if tiny else 30)
    bandwidth = copy_bandwidth(1 << (20 if tiny else 31))
    for ranks in (2, 4) if tiny else (2, 8, 64):
        rows = torch.randn(ranks, total // ranks, device=DEVICE, dtype=torch.bfloat16)
        out = torch.empty(total // ranks, device=DEVICE, dtype=torch.bfloat16)

        def add(rows: Tensor = rows, out: Tensor = out) -> None:
            sum_rows(rows, out)

        moved = (rows.nbytes + out.nbytes) / timed(add)
        yield {"ranks": ranks, "gb_s": moved / 1e9, "of_copy": moved / bandwidth, "extra_gb": peak_bytes(add) / 1e9}


def offload(*, tiny: bool) -> Iterator[Record]:
    """The engine's copies to the host and back, against pinned memory that is kept."""
    from mega_rl.engines.offload import StorageOffload

    nbytes = 1 << (22 if tiny else 34)
    data = torch.ones(nbytes, dtype=torch.uint8, device=DEVICE)
    turns = StorageOffload(data.device)
    for prefix in ("first_", "kept_"):  # the first makes the places on the host
        turns.changed()
        synchronize()
        begin = time.perf_counter()
        turns.offload([data])
        synchronize()
        middle = time.perf_counter()
        turns.onload()
        synchronize()
        end = time.perf_counter()
        off_rate, on_rate = (nbytes / seconds / 1e9 for seconds in (middle - begin, end - middle))
        yield {"case": f"StorageOffload {prefix}", f"{prefix}off_gb_s": off_rate, f"{prefix}on_gb_s": on_rate}
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=GPU)
    off = timed(lambda: host.copy_(data, non_blocking=True), rounds=3, warmup=1)
    back = timed(lambda: data.copy_(host, non_blocking=True), rounds=3, warmup=1)
    yield {"case": "pinned, kept", "pinned_off_gb_s": nbytes / off / 1e9, "pinned_on_gb_s": nbytes / back / 1e9}


RECEIVER = """
import base64, pickle, sys
import torch
from torch.multiprocessing import reductions

upstream = reductions.rebuild_cuda_tensor

def rebuild(*arguments):  # as SGLang does: a UUID names the device
    arguments = list(arguments)
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    arguments[6] = uuids.index(arguments[6])
    return upstream(*arguments)

reductions.rebuild_cuda_tensor = rebuild
own = None
for line in sys.stdin:
    shared = pickle.loads(base64.b64decode(line))
    own = torch.empty_like(shared) if own is None else own
    own.copy_(shared)
    print(int(own[:4096].sum()), flush=True)
    del shared
"""


def ipc(*, tiny: bool) -> Iterator[Record]:
    """Buckets through CUDA IPC to another process on this GPU; the memory must be free afterwards."""
    if not GPU:
        yield {"case": "left out: CUDA IPC needs a GPU"}
        return
    from mega_rl.rollout.sglang.weights.cuda_ipc import CudaDevice

    nbytes = (1 if tiny else 256) << 20
    device = CudaDevice(torch.device(DEVICE))
    before, seconds, held = torch.cuda.memory_allocated(), [], []
    with subprocess.Popen([sys.executable, "-c", RECEIVER], stdin=-1, stdout=-1, text=True) as receiver:
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        for number in range(16):
            bucket = torch.full((nbytes,), number + 1, dtype=torch.uint8, device=DEVICE)
            synchronize()
            begin = time.perf_counter()
            held = [*held[-1:], bucket]
            receiver.stdin.write(base64.b64encode(pickle.dumps(device.handle(bucket), protocol=4)).decode() + "\n")
            receiver.stdin.flush()
            answer = int(receiver.stdout.readline())
            seconds.append(time.perf_counter() - begin)
            assert answer == 4096 * (number + 1), f"bucket {number} arrived as a sum of {answer}"
        receiver.stdin.close()
        receiver.wait(30)
    del bucket
    held.clear()
    torch.cuda.ipc_collect()
    left = torch.cuda.memory_allocated() - before
    yield {"gb_s": nbytes / statistics.median(seconds[2:]) / 1e9, "left_bytes": left}
