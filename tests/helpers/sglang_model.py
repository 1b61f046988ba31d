"""SGLang's own class of a model on a CPU, without a server: `python -m tests.helpers.sglang_model FOLDER SENT`.

It loads a checkpoint's folder through SGLang's loader, spoils all weights that are not a tower's, loads the tensors of
the safetensors file SENT, as an update of weights does, and prints the parameters that then have other bits than at
first, a JSON list. Kernels that SGLang has for CPUs with AMX only get a name, which its modules ask for when imported.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from safetensors.torch import load_file

from mega_rl.rollout.sglang.server import cpu_stand_ins

KERNELS = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)  # fmt: skip
ALONE = ["--disable-overlap-schedule"]  # overlap needs a GPU's kernels for the cached states of delta nets


def main(folder: str, sent: str) -> None:
    """Load twice and compare."""
    cpu_stand_ins.install()
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in KERNELS:
        library.define(f"{name}(Tensor x) -> Tensor")
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(["--model-path", folder, "--device", "cpu", "--dtype", "float32", *ALONE])
    publish(arguments, role="scheduler")
    initialize_moe_config()
    config = ModelConfig.from_server_args(arguments)
    parallel_state.init_distributed_environment(1, 0, f"file://{sent}.{os.getpid()}", 0, "gloo")
    parallel_state.initialize_model_parallel()
    initialize_dp_attention(arguments, config)
    load = LoadConfig()
    config = adjust_config_with_unaligned_cpu_tp(config, load, 1)
    model = get_model(model_config=config, load_config=load, device_config=DeviceConfig("cpu"))
    weights = dict(model.named_parameters())
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for name, weight in weights.items():
        if not name.startswith("visual."):
            weight.data.fill_(float("nan"))
    model.load_weights(iter(load_file(sent).items()))
    print(json.dumps([name for name, weight in weights.items() if not torch.equal(weight, before[name])]))


if __name__ == "__main__":
    main(*sys.argv[1:])
