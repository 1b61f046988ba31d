"""The module `transformer_engine_torch`, and stand-ins for modules of Transformer Engine that are kernels."""

from __future__ import annotations

import inspect
from enum import EnumType
from types import ModuleType
from typing import Any, NoReturn

from tests.fake_te import attention, enums, gemm, norms, optimizers, permutation, rope

CUDNN = 91300  # 9.13
FUNCTIONS = (
    gemm.generic_gemm,
    gemm.te_general_grouped_gemm,
    norms.rmsnorm_fwd,
    norms.rmsnorm_bwd,
    rope.fused_rope_forward,
    rope.fused_rope_backward,
    optimizers.multi_tensor_scale,
    optimizers.multi_tensor_l2norm,
    optimizers.multi_tensor_adam,
    attention.get_fused_attn_backend,
    attention.fused_attn_fwd,
    attention.fused_attn_bwd,
    attention.convert_thd_to_bshd,
    attention.convert_bshd_to_thd,
)
NUMBERS = {"get_cudnn_version": CUDNN, "get_cublasLt_version": 130000, "get_num_cublas_streams": 1}
# Of what `cpp_extensions` takes over with `import *`, names that a layer looks up without calling them.
LOOKED_UP = ("layernorm_fwd", "layernorm_bwd")


def compiled_half() -> ModuleType:
    """Return `transformer_engine_torch`; what it lacks is a function that says so when it is called."""
    module = ModuleType("transformer_engine_torch", compiled_half.__doc__)
    vars(module).update({name: value for name, value in vars(enums).items() if isinstance(value, EnumType)})
    vars(module).update({function.__name__: function for function in FUNCTIONS})
    vars(module).update({name: _constant(number) for name, number in NUMBERS.items()})
    vars(module).update({name: _absent(f"{module.__name__}.{name}") for name in LOOKED_UP})
    vars(module).update(__getattr__=_lacking(module.__name__), device_supports_multicast=_constant(False))
    return module


def triton_kernels() -> dict[str, ModuleType]:
    """Return Transformer Engine's modules of Triton kernels, by name; without one for ONNX, which needs its package."""
    base = "transformer_engine.pytorch"
    names = ("triton.permutation", "triton.cross_entropy", "triton.pad", "onnx_extensions")
    modules = {name: ModuleType(f"{base}.{name}") for name in names}
    for module in modules.values():
        vars(module).update(__getattr__=_lacking(module.__name__))
    functions = inspect.getmembers(permutation, inspect.isfunction)
    vars(modules["triton.permutation"]).update({name: each for name, each in functions if not name.startswith("_")})
    folder = ModuleType(f"{base}.triton")
    vars(folder).update({name.removeprefix("triton."): modules[name] for name in names if name.startswith("triton.")})
    return {module.__name__: module for module in (folder, *modules.values())}


def _constant(value: Any) -> Any:
    return lambda *_: value


def _absent(name: str) -> Any:
    def absent(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is compiled code that tests/fake_te has no stand-in for")

    return absent


def _lacking(module: str) -> Any:
    def lacking(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{module}.{name}")

    return lacking
