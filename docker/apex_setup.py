"""Build apex's kernel that adds weight gradients in FP32, alone: mega_rl and Megatron-Core use nothing else of apex.

Runs in a checkout of NVIDIA/apex, whose own setup.py would compile every kernel of it, for half an hour.
"""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

KERNELS = Path("csrc/megatron")
SOURCES = (
    "fused_weight_gradient_dense.cpp", "fused_weight_gradient_dense_cuda.cu",
    "fused_weight_gradient_dense_16bit_prec_cuda.cu",
)  # fmt: skip
# torch's headers forbid the operators and conversions of half-precision types that these kernels use.
NVCC = ("-O3", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__", "--expt-relaxed-constexpr")
NVCC += ("--expt-extended-lambda", "--use_fast_math")

setup(
    name="fused-weight-gradient-mlp-cuda",
    version="0.1",
    description="The weight-gradient kernel of NVIDIA/apex",
    license_files=["LICENSE"],
    packages=[],
    py_modules=[],
    ext_modules=[
        CUDAExtension(
            "fused_weight_gradient_mlp_cuda",
            sources=[str(KERNELS / name) for name in SOURCES],
            include_dirs=[str(Path("csrc").absolute())],
            extra_compile_args={"cxx": ["-O3"], "nvcc": list(NVCC)},
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
