"""The gradient norm of sharded parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_rl.parallel.accelerator import prepare
from mega_rl.parallel.comm import SingleRank


def test_the_gradient_norm_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy to the host for all parameters: each would wait for all that the device has queued."""
    prepare("auto")
    from mega_rl.engines.fsdp import optimizer

    parameters = [torch.nn.Parameter(torch.zeros(n, 3)) for n in range(1, 6)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(number))
    copies: list[Tensor] = []
    real = torch.Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        copies.append(tensor)
        return real(tensor)

    monkeypatch.setattr(optimizer, "is_first_copy", lambda parameter: True)
    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    norm = optimizer.gradient_norm(parameters, SingleRank())  # type: ignore[arg-type]
    assert norm == pytest.approx(sum(3 * (n + 1) * n**2 for n in range(5)) ** 0.5)
    assert len(copies) == 1
    assert optimizer.gradient_norm([], SingleRank()) == 0.0
