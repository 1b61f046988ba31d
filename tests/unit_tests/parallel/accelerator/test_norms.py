"""Norms of long tensors, and the rule that nothing else in the package makes one."""

from __future__ import annotations

import ast
from types import ModuleType

import pytest
import torch

from mega_rl.parallel.accelerator import prepare
from mega_rl.parallel.accelerator.patches import patches
from mega_rl.parallel.comm import SingleRank
from tests.house import PACKAGE

REAL_SIZE = 150_000_000  # elements of the embedding of Qwen3-0.6B
# Functions that add the squares of a whole tensor in its own dtype.
MAKES_A_NORM = {"norm", "vector_norm", "matrix_norm", "_foreach_norm", "dot", "vdot", "clip_grad_norm_"}
MAKES_A_NORM |= {"get_total_norm"}


def test_norm_of_a_tensor_of_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines' norms of one tensor of 0.6 GB are the float64 one to 1e-6; torch's own is off by percents."""
    prepare("auto")
    from mega_rl.engines import fsdp as optimizer

    monkeypatch.setattr(optimizer, "is_first_copy", lambda parameter: True)
    block = torch.randn(REAL_SIZE // 50, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(block.repeat(50))
    parameter.grad = parameter.detach()
    exact = (50 * float(block.double().square().sum())) ** 0.5
    upstream = ModuleType("upstream")
    next(patch for patch in patches() if patch.name == "norms_of_long_tensors").apply(upstream)
    of_megatron, _ = upstream.local_multi_tensor_l2_norm(65536, None, [[parameter.grad]], False)
    of_fsdp = optimizer.gradient_norm([parameter], SingleRank())  # type: ignore[list-item]
    assert float(of_megatron) == pytest.approx(exact, rel=1e-6)
    assert of_fsdp == pytest.approx(exact, rel=1e-6)
    assert abs(float(torch._foreach_norm([parameter.grad])[0]) / exact - 1) > 1e-3


def test_one_helper_makes_norms() -> None:
    """A new `.norm()` loses digits where tensors are long, and no test with a small model sees it."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    calls = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.func.attr}"
        for path, text in texts.items()
        if path.parts[-2:] != ("accelerator", "base.py") and any(f"{name}(" in text for name in MAKES_A_NORM)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKES_A_NORM
    ]
    assert calls == [], "use mega_rl.parallel.accelerator.base"
