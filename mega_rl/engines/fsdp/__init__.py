"""The FSDP engine: Hugging Face's own modules under PyTorch's FSDP2.

`build.build_fsdp_engine` makes an `engine.FSDPEngine`; `model` shards, `weights` loads and exports, `optimizer` steps,
`attention` registers kernels, `collectives` replaces FSDP2's on gloo. Must not import Megatron-Core itself, nor
`mega_rl.engines.megatron`.
"""
