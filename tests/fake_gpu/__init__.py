"""The engine on a fake CUDA device: kernels are never run, but every call that would launch one is seen.

The tests start `python -m tests.fake_gpu.program`, since the device must be there before torch is imported.
"""
