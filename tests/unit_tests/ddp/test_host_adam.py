"""AdamW with state on the host: the same bits as torch's, in batches whose copies go beside the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.ddp import host_adam
from mega_rl.ddp.host_adam import Copies, HostAdamW, Staged

SHAPES = [(4, 3), (5,), (7, 2), (2, 2), (6,), (3, 3)]
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-3}
BATCH_BYTES = 80  # float32: two of the small tensors, or one of the large


class Recorded(Copies):
    """Copies that say what starts and what is waited for."""

    log: list[str]

    def down(self, tensors: Any) -> Staged:
        self.log.append(f"down {len(tensors) // 2}")
        staged, log = super().down(tensors), self.log

        class Waited(Staged):
            def wait(self) -> None:
                log.append("wait")
                super().wait()

        return Waited(staged.tensors, staged.event)

    def up(self, staged: Any, tensors: Any) -> None:
        self.log.append("up")
        super().up(staged, tensors)

    def finish(self) -> None:
        self.log.append("finish")
        super().finish()


def parameters() -> list[Tensor]:
    """Parameters with gradients, all but the fourth."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    for number, parameter in enumerate(made):
        if number != 3:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def groups(made: list[Tensor]) -> list[dict[str, Any]]:
    settings = {**SETTINGS, "fused": True, "foreach": False}
    return [
        {"params": [p for p in made if p.dim() > 1], "weight_decay": 0.3, **settings},
        {"params": [p for p in made if p.dim() == 1], "weight_decay": 0.0, **settings},
    ]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the optimizer does, in order."""
    entries: list[str] = []
    adamw, step = host_adam.adamw, torch.optim.AdamW.step

    def host_step(values: list[Tensor], *args: Any, **kwargs: Any) -> None:
        entries.append(f"host {len(values)}")
        adamw(values, *args, **kwargs)

    def device_step(self: Any) -> None:
        entries.append("device")
        step(self)

    monkeypatch.setattr(Recorded, "log", entries, raising=False)
    monkeypatch.setattr(host_adam, "Copies", Recorded)
    monkeypatch.setattr(host_adam, "BATCH_BYTES", BATCH_BYTES)
    monkeypatch.setattr(host_adam, "adamw", host_step)
    monkeypatch.setattr(torch.optim.AdamW, "step", device_step)
    return entries


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_batches_change_no_bit(share: float, log: list[str]) -> None:
    """Three steps against torch's AdamW; what has no gradient stays, and gradients are where they were."""
    ours, theirs = parameters(), parameters()
    optimizer, reference = HostAdamW(groups(ours), share=share), torch.optim.AdamW(groups(theirs))
    for _ in range(3):
        optimizer.step()
        reference.step()
    for own, expected in zip(ours, theirs, strict=True):
        assert torch.equal(own, expected)
        assert (own.grad is None) == (expected.grad is None)
        for name in ("step", "exp_avg", "exp_avg_sq"):
            if expected.grad is not None:
                assert torch.equal(optimizer.state[own][name], reference.state[expected][name])


def test_copies_go_beside_the_steps(log: list[str]) -> None:
    """The first batch arrives while the device steps, each next one while the host steps the one before."""
    HostAdamW(groups(parameters()), share=1.0).step()
    assert log == [
        *("down 1", "device"),
        *("down 1", "wait", "host 1", "up"),
        *("down 1", "wait", "host 1", "up"),
        *("down 2", "wait", "host 1", "up"),
        *("wait", "host 2", "up"),
        "finish",
    ]


def test_nothing_travels_where_the_host_has_nothing_to_step(log: list[str]) -> None:
    made = parameters()
    for parameter in made:
        parameter.grad = None
    HostAdamW(groups(made), share=1.0).step()
    assert log == ["device", "finish"]
