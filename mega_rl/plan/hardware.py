"""Speeds of GPUs and of their links: the coefficients of the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from mega_rl.errors import UserError
from mega_rl.metrics.flops import PEAK_TFLOPS


@dataclass(frozen=True)
class Hardware:
    """Coefficients of the cost model: rates in operations or bytes per second and per GPU, shares that work reaches.

    Peaks, memory and links are those of data sheets. Shares and latencies are estimates for code as it is here, until a
    device has measured them.
    """

    name: str
    memory: float  # bytes
    peak: float  # dense bf16 operations
    memory_rate: float  # of the device's own memory
    nvlink: float  # one way, between GPUs of a host
    network: float  # one way, of the adapter that each GPU has to other hosts
    host_copy: float = 200e9  # to or from pinned host memory, all GPUs of a host at once
    pageable_copy: float = 4e9  # to or from host memory that servers share, which is not pinned
    matmul_share: float = 0.55  # of `peak` in a pass
    memory_share: float = 0.7  # of `memory_rate` in a token's step or the optimizer's
    link_share: float = 0.8  # of `nvlink` and `network` in a collective
    served_layer_s: float = 20e-6  # least time of one layer for one token in a server, whose step is a CUDA graph
    embedded_layer_s: float = 500e-6  # the same where each kernel is launched from Python


_ALL = (
    Hardware("a100", memory=80e9, peak=PEAK_TFLOPS["A100"] * 1e12, memory_rate=2.0e12, nvlink=300e9, network=25e9),
    Hardware("h100", memory=80e9, peak=PEAK_TFLOPS["H100"] * 1e12, memory_rate=3.35e12, nvlink=450e9, network=50e9),
    Hardware("h200", memory=141e9, peak=PEAK_TFLOPS["H200"] * 1e12, memory_rate=4.8e12, nvlink=450e9, network=50e9),
    Hardware("b200", memory=180e9, peak=PEAK_TFLOPS["B200"] * 1e12, memory_rate=7.7e12, nvlink=900e9, network=50e9),
)
HARDWARE = {each.name: each for each in _ALL}
RATES = tuple(field.name for field in fields(Hardware) if field.name != "name")


def hardware_of(name: str, rates: Sequence[str] = ()) -> Hardware:
    """Return the coefficients of a kind of GPU; `rates` replace some of them, as "network=25e9". Raises UserError."""
    if name not in HARDWARE:
        raise UserError(f"--gpu={name!r}: legal: {', '.join(HARDWARE)}; --rate sets the coefficients of another")
    hardware = HARDWARE[name]
    for text in rates:
        key, _, value = text.partition("=")
        if key not in RATES:
            raise UserError(f"--rate={text!r}: legal names: {', '.join(RATES)}")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf") or (key.endswith("_share") and number > 1):
            legal = "above 0 and at most 1" if key.endswith("_share") else "above 0"
            raise UserError(f"--rate={text!r}: needs a number {legal}, as {key}={getattr(hardware, key):g}")
        hardware = Hardware(**(asdict(hardware) | {key: number}))
    return hardware
