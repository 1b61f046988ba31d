"""The CPU stand-in: what it patches, that upstream is what it was written for, and that nobody else feels it."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.errors import UserError
from mega_rl.parallel.accelerator import cpu, megatron_core, patches, prepare
from mega_rl.parallel.accelerator.cpu import rewrite_code

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for machines without CUDA")


def upstream() -> Path:
    """The folder "megatron" that the tests import."""
    folder = megatron_core.megatron_folder()
    assert folder is not None
    return folder


def source_of(symbol: str) -> str:
    """Source text of the class or function "module:qualified.name", read without an import."""
    module, _, qualified = symbol.partition(":")
    path = upstream().parent.joinpath(*module.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    for name in qualified.split("."):
        node = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name][-1]
    return ast.get_source_segment(text, node) or ""


def test_upstream_is_what_patches_were_written_for() -> None:
    sources = json.loads(Path(__file__).with_name("patched_sources.json").read_text(encoding="utf-8"))
    assert {patch.symbol: list(patch.series) for patch in patches.patches()} == {
        symbol: list(by_series) for symbol, by_series in sources.items()
    }
    series = megatron_core.installed_series()
    for symbol, by_series in sources.items():
        if series in by_series:
            digest = hashlib.sha256(source_of(symbol).encode()).hexdigest()
            assert digest == by_series[series], f"{symbol} has changed: is its patch still needed and right?"


def test_every_standin_name_and_literal_is_used_upstream() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in upstream().rglob("*.py"))
    for name in cpu.STANDIN_NAMES:
        pattern = rf"torch\.cuda\.{name}\b|from torch\.cuda import [^\n]*\b{name}\b"
        assert re.search(pattern, text), f"upstream no longer uses torch.cuda.{name}: drop it"
    for literal in cpu.LITERALS:
        # A literal that ends with a colon is the first piece of an f-string.
        pattern = rf"""f['"]{literal}\{{""" if literal.endswith(":") else rf"""['"]{re.escape(literal)}['"]"""
        assert re.search(pattern, text), f"upstream has no literal {literal!r}: drop it"
    assert not re.search(r"[(,]\s*cuda\s*=[^=]", text), "a keyword named cuda would be rewritten with the literals"


def test_rewriting_reaches_nested_code_and_leaves_docstrings() -> None:
    source = 'def f(d="cuda"):\n    "cuda kernels"\n    g = lambda x: x.cuda("cuda:x")\n    return d, ("cuda", 1), g\n'
    namespace: dict[str, object] = {}
    exec(rewrite_code(compile(source, "<text>", "exec"), {"cuda": "here"}, {"cuda": "cpu"}), namespace)

    class Thing:
        def here(self, text: str) -> str:
            return text

    function = namespace["f"]
    assert callable(function)
    device, constants, inner = function()
    assert (device, constants, function.__doc__) == ("cpu", ("cpu", 1), "cuda kernels")
    assert inner(Thing()) == "cuda:x"


def test_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match=r"trainer\.device='tpu': must be one of auto, cuda, cpu"):
        prepare("tpu")


@needs_no_cuda
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(UserError, match="no CUDA device is visible"):
        prepare("cuda")


def test_cpu_is_refused_next_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES="):
        prepare("cpu")


@needs_no_cuda
def test_megatron_imported_first_is_refused() -> None:
    code = "import megatron\nfrom mega_rl.parallel.accelerator import prepare\nprepare('cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "UserError: megatron was imported before mega_rl" in done.stderr
