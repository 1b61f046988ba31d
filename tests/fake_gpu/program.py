"""Cases on the fake device, one after the other: `python -m tests.fake_gpu.program CASE...` prints a JSON line each."""

from __future__ import annotations

from tests.fake_gpu import guard

guard.load(guard.build())  # before torch

import gc  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from tests.fake_gpu import device  # noqa: E402
from tests.fake_gpu.cases import Case, engine_on_device, report  # noqa: E402
from tests.fake_gpu.watch import DeviceTensors, Watch  # noqa: E402


def run(case: Case, watch: Watch) -> dict[str, Any]:
    """Build the engine and take it through a step's life; returns what was seen in each phase."""
    phases: dict[str, Any] = {}
    gc.collect()
    watch.forget()

    def take(name: str, pass_over: Callable[[], Any]) -> None:
        with watch.measure() as phase:
            result = pass_over()
        phases[name] = report(phase) | {"live": watch.bytes, "result": result}

    with (
        tempfile.TemporaryDirectory() as folder,
        watch.measure() as building,
        engine_on_device(case, Path(folder), watch) as on,
    ):
        phases["build"] = report(building) | {"live": watch.bytes}
        batch, loss, engine = on.batch(), on.loss(), on.engine
        passes: dict[str, Callable[[], Any]] = {
            "train": lambda: engine.train_minibatch(batch, loss, lr=1e-6),
            "forward": lambda: len(engine.forward(batch).__dict__),
            "export": lambda: sum(tensor.numel() for _, tensor in engine.export_weights()),
            "turn": lambda: (engine.offload(), engine.onload())[0],
        }
        for name in case.passes:
            take(name, passes[name])
    return phases


def probe(watch: Watch) -> dict[str, Any]:
    """Return what the instrument says of single lines: the waits that each is counted as, or its error."""
    host, there = torch.arange(4), torch.device("cuda")
    lines: dict[str, Callable[[Tensor], Any]] = {
        "nothing": lambda x: x + 1,
        "item": lambda x: int(x[1]),
        "tolist": lambda x: x.tolist(),
        "to the host": lambda x: x.cpu(),
        "nonzero": lambda x: x.nonzero(),
        "by a mask": lambda x: x[x > 1],
        "fill by a mask": lambda x: x.masked_fill_(x > 1, 0),
        "synchronize": lambda x: torch.cuda.synchronize(),
        "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
        "pageable": lambda x: host.to(there, non_blocking=True),
        "pinned, blocking": lambda x: host.pin_memory().to(there),
        "pinned, queued": lambda x: host.pin_memory().to(there, non_blocking=True),
        "number from the host": lambda x: torch.tensor([1], device=there),
        "two devices": lambda x: x + host,
        "collective of the device": lambda x: dist.all_reduce(x),
        "collective of the host": lambda x: dist.all_reduce(host.clone()),
        "unknown": lambda x: (x.float().sigmoid() > 0.5).nonzero(),
    }
    said: dict[str, Any] = {}
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    for name, line in lines.items():
        with DeviceTensors(allow_non_fake_inputs=True), watch:
            x = host.to(there)
            with watch.measure() as phase:
                try:
                    line(x)
                    said[name] = dict(phase.waits)
                except Exception as error:  # of which the type is what is asked for
                    said[name] = type(error).__name__
    with DeviceTensors(allow_non_fake_inputs=True), watch, watch.measure() as phase:
        before = watch.bytes
        big = torch.empty(1000, device=there) + 1
        del big
        dist.destroy_process_group()
        said["memory"] = [phase.peak - before, watch.bytes - before, phase.peak_at]
    return said


def main() -> None:
    """Run the cases that stand, as JSON, in the arguments; "probe" tries the instrument."""
    watch = Watch()
    device.install(watch.host_wait)
    FakeTensor.tolist = lambda tensor: watch.read(tensor)  # type: ignore[method-assign, assignment]
    for text in sys.argv[1:]:
        began = time.process_time()
        try:
            result = probe(watch) if text == "probe" else run(Case(**json.loads(text)), watch)
        except Exception:  # the next case is worth knowing, too
            result = {"error": traceback.format_exc()}
        print(json.dumps(result | {"seconds": time.process_time() - began}), flush=True)


if __name__ == "__main__":
    main()
