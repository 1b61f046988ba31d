"""What each of two ranks does in the tests of an engine's state: one launch for all."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch

from mega_rl.config.schema import MegatronConfig, MegatronOptimizerConfig, OptimConfig
from mega_rl.config.schema.engine import TorchFsdpConfig
from tests.helpers.engines import exported, make_config, own_rows, replaced, running_engine
from tests.helpers.models import random_experience
from tests.unit_tests.distributed.engine_cases import losses

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "pp2": {"megatron": MegatronConfig(pp=2)},
    "pp2-vpp2": {"megatron": MegatronConfig(pp=2, vpp=2)},
    "tp2": {"megatron": MegatronConfig(tp=2)},
    "torch_fsdp2": {"ddp": TorchFsdpConfig()},
}
MISTAKES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "unknown": {"optimizer_steps": 1, "epochs": 2},
    "negative": {"optimizer_steps": -1},
    "fraction": {"optimizer_steps": 1.5},
    "flag": {"optimizer_steps": True},
}


def run_all(rank: int, root: str) -> dict[str, Any]:
    """Everything, on both ranks."""
    path = Path(root)
    return {
        "layouts": {name: listing(path, **changes) for name, changes in LAYOUTS.items()},
        "early": early_state(path),
        "refusals": refusals(path),
        "on the host": on_the_host(path),
        "frozen engine": frozen_engine(path),
        "multi-token prediction": multi_token_prediction(path),
        "fused": fused_adam(),
    }


def engine_of(path: Path, **changes: Any) -> Any:
    """An engine of two ranks; `changes` are arguments of `make_config`."""
    return running_engine(make_config(path / "tied", **{"optim": OptimConfig(), **changes}))


def listing(path: Path, **changes: Any) -> dict[str, Any]:
    """The pieces: (name, whole shape, offset, shape, owned), and whether they are the engine's own memory."""
    from mega_rl.ddp.access import optimizer_tensors, parameter_tensors
    from mega_rl.ddp.optimizer import torch_optimizers

    with engine_of(path, **changes) as engine:
        state = engine.state()
        tensors = list(parameter_tensors(engine.chunks))
        tensors += [t for o in torch_optimizers(engine.optimizer) for t in optimizer_tensors(o)]
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return {
            "pieces": [
                (p.name, p.global_shape, tuple(p.box.offset), tuple(p.box.shape), p.owned) for p in state.pieces
            ],
            "shapes": all(tuple(p.data.shape) == p.box.shape for p in state.pieces),
            "own memory": all(p.data.untyped_storage().data_ptr() in memory for p in state.pieces),
            "memory of two pieces": len(state.pieces) - len({p.data.data_ptr() for p in state.pieces}),
            "weights": sum(prod(p.box.shape) for p in state.pieces if p.name.startswith("weights/")),
            "parameters": sum(p.numel() for model in engine.models for p in model.parameters()),
            "numbers": state.numbers,
        }


def early_state(path: Path) -> dict[str, Any]:
    """A state that is looked at before the first step: zeros, and the training is the same."""
    actual = {}
    for name, optimizer in {"device": {}, "host": {"cpu_offload": 0.5}}.items():
        weights = []
        for looks in (False, True):
            with engine_of(path, optimizer=MegatronOptimizerConfig(**optimizer)) as engine:
                if looks:
                    state = engine.state()
                    moments = [p.data for p in state.pieces if p.name.startswith("exp_avg")]
                    actual[f"{name} zeros"] = bool(moments) and not any(bool(m.any()) for m in moments)
                    actual[f"{name} steps"] = state.numbers["optimizer_steps"]
                for _ in range(2):
                    engine.train_minibatch(own_rows(random_experience(), engine), losses("lm"), lr=1e-2)
                weights.append(exported(engine))
        actual[f"{name} same"] = all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    return actual


def refusals(path: Path) -> dict[str, str]:
    """What is said of numbers that are not an engine's, and of memory that is given back."""
    from mega_rl.errors import UserError

    actual = {}
    with engine_of(path) as engine:
        engine.state()
        for name, numbers in MISTAKES.items():
            try:
                engine.resume_from(numbers)
            except UserError as error:
                actual[name] = str(error)
        for part in ("parameters", "gradients", "optimizer"):
            engine.offload((part,))
            try:
                engine.state()
            except RuntimeError as error:
                actual[f"{part} offloaded"] = str(error)
            engine.onload((part,))
    return actual


def on_the_host(path: Path) -> bool:
    """Whether all of the optimizer's state that has been created is in the host's memory."""
    from mega_rl.ddp.optimizer import torch_optimizers

    with engine_of(path, optimizer=MegatronOptimizerConfig(cpu_offload=1.0)) as engine:
        engine.state()
        states = [state for each in torch_optimizers(engine.optimizer) for state in each.state.values()]
        return all(tensor.device.type == "cpu" for state in states for tensor in state.values())


def frozen_engine(path: Path) -> dict[str, Any]:
    """Kinds of tensors and numbers of an engine that does not learn."""
    with running_engine(make_config(path / "tied"), trainable=False) as engine:
        state = engine.state()
        engine.resume_from({})
        return {"kinds": sorted({p.name.partition("/")[0] for p in state.pieces}), "numbers": state.numbers}


class FusedAdam(torch.optim.Optimizer):
    """As Transformer Engine's: it makes its state itself and counts steps in the group, which lacks them at first."""

    store_param_remainders = True

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def initialize_state(self, parameter: torch.Tensor, store_param_remainders: bool) -> None:
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["master_param"] = torch.zeros_like(
            parameter, dtype=torch.int16 if store_param_remainders else torch.float32
        )


def fused_adam() -> dict[str, Any]:
    """Counters, dtypes and main parameters of such an optimizer, which has one bf16 parameter and one of float32."""
    from types import SimpleNamespace

    from mega_rl.ddp.optimizer import count_steps, create_state, set_steps, trained_parameters

    parameters = [torch.ones(3, dtype=torch.bfloat16), torch.ones(2)]
    inner = FusedAdam(parameters)
    optimizer: Any = SimpleNamespace(optimizer=inner)
    create_state(optimizer)
    actual: dict[str, Any] = {"before": count_steps(optimizer)}
    set_steps(optimizer, 5)
    actual |= {"after": count_steps(optimizer), "group": inner.param_groups[0]["step"]}
    trained = list(trained_parameters(optimizer))
    actual["main"] = [each.main is not None and each.main.dtype == torch.int16 for each in trained]
    actual["moments"] = [str(each.state["exp_avg"].dtype) for each in trained]
    return actual


def multi_token_prediction(path: Path) -> list[tuple[str, int, int, bool]]:
    """(key, elements of the whole, elements here, first copy) of a model on two stages that predicts more tokens."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    import dataclasses

    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.converters.plan.sharding import Sharding
    from mega_rl.ddp.regions import find_regions
    from mega_rl.engines.models.build import build_chunks, transformer_config
    from mega_rl.trainer.assemble import session

    config = replaced(make_config(path / "mtp"), "engine.megatron", pp=2)
    hf = dataclasses.replace(read_hf_config(path / "mtp"), mtp="load")
    with session(config, accelerator) as groups:
        model_config = transformer_config(
            hf,
            layout=groups.layout,
            model=config.model,
            megatron=config.engine.megatron,
            deterministic=False,
            attention="sdpa",
            device_overrides=accelerator.transformer_config_overrides(),
        )
        chunks = build_chunks(
            hf,
            config=model_config,
            groups=groups,
            head="lm",
            impl="local",
            padded_vocab=Sharding(hf, groups.layout, spec="local", head="lm").vocab,
            device=accelerator.device,
        )
        return [
            (region.key, prod(region.global_shape), prod(region.local.shape), not any(region.replica))
            for chunk in chunks
            for regions in find_regions(chunk, {}, dp_cp_group=groups.dp_cp).values()
            for region in regions
        ]
