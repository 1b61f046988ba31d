"""What mixtures of experts do beside computing: idle experts, balance, moving biases, recomputation."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

from mega_rl.protocols import LossOutput
from tests.helpers.engines import (
    exported,
    exported_gradients,
    load_state,
    own_rows,
    replaced,
    running_engine,
    save_state,
)
from tests.helpers.models import random_experience
from tests.unit_tests.distributed.engine_cases import losses, whole
from tests.unit_tests.distributed.expert_cases import config_of, write_family

BIAS = "e_score_correction_bias"
USED = (0, 1)  # the experts that every token of `write_lopsided` goes to


def write_lopsided(root: Path) -> Path:
    """A model of 8 experts whose corrections send every token to the first two."""
    directory = write_family(root, "glm4_moe")
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + size]).items():
        if name.endswith(BIAS):
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            content[start:stop] = struct.pack("<8f", *[10.0 if expert in USED else 0.0 for expert in range(8)])
    path.write_bytes(content)
    return directory


def nothing(outputs: Any, fields: Any, sequences: Any) -> LossOutput:
    """A loss of zero, so that the only gradients are those of the balance loss."""
    return LossOutput(loss=0.0 * outputs.logprobs.sum())


nothing.needs_entropy = False  # type: ignore[attr-defined]


def idle(checkpoint: str, layout: str, *, dispatcher: str = "alltoall") -> dict[str, Any]:
    """Two updates with overlapped reduction on three rows of one micro-batch each: some ranks have none."""
    config = config_of(Path(checkpoint), layout, dispatcher=dispatcher)
    config = replaced(config, "trainer.microbatch", max_tokens=24)
    config = replaced(config, "engine.megatron.ddp", overlap_grad_reduce=True, bucket_size=4000)
    with running_engine(config) as engine:
        rows = own_rows(random_experience()[:3], engine)
        result: dict[str, Any] = {"logprobs": whole(engine.forward(rows).logprobs, engine)}
        for _ in range(2):  # communication starts in the backward from the second on
            result["metrics"] = engine.train_minibatch(rows, losses("lm"), lr=0.0)
        result["gradients"] = exported_gradients(engine)
        result["loads"] = engine.routing.loads.clone()
    return result


def balance(
    checkpoint: str, layout: str, *, padded: bool = False, recompute: str = "none", average: bool = False
) -> dict[str, Any]:
    """Gradients of the balance loss alone, unclipped, and its value."""
    config = config_of(Path(checkpoint), layout, aux_loss_coef=2.0)
    config = replaced(config, "optim", clip_grad=0.0)
    config = replaced(config, "trainer.microbatch", packing=not padded, size=3)
    config = replaced(config, "model", recompute=recompute)
    config = replaced(config, "engine.megatron.ddp", average_in_collective=average)
    with running_engine(config) as engine:
        metrics = engine.train_minibatch(own_rows(random_experience(), engine), nothing, lr=0.0)
        return {"gradients": exported_gradients(engine), "loss": metrics["moe_balance_loss"]}


def balance_by_hand(checkpoint: str) -> dict[str, Any]:
    """The same from its definition: one padded forward, loops over rows and experts, autograd."""
    from mega_rl.engines.models.moe import Router

    batch = random_experience()
    with running_engine(config_of(Path(checkpoint), "1")) as engine:
        model, seen = engine.models[0], []
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.register_forward_pre_hook(lambda module, inputs: seen.append([module, inputs[0]]))
            router.register_forward_hook(lambda module, inputs, outputs: seen[-1].append(outputs[1]))
        positions = torch.arange(24).expand(8, 24).contiguous()
        engine.chunks[0].zero_grad_buffer()
        model(batch.tokens, positions, None)
        total = torch.zeros(())
        for router, hidden, chosen in seen:
            logits = torch.nn.functional.linear(hidden, router.weight)  # [S, B, E]
            chosen = chosen.view(24, 8, -1)
            for row, length in enumerate(batch.lengths.tolist()):
                scores = logits[:length, row].softmax(-1)
                if router.score_function == "sigmoid":
                    scores = logits[:length, row].sigmoid()
                    scores = scores / scores.sum(-1, keepdim=True)
                for expert in range(scores.size(1)):
                    fraction = chosen[:length, row, expert].sum() / (router.topk * length)
                    total = total + 2.0 / 8 * scores.size(1) * fraction * scores[:, expert].mean()
        total.backward()
        return {"gradients": exported_gradients(engine), "loss": float(total)}


def moving_bias(checkpoint: str, layout: str, *, recompute: str = "none", folder: str = "") -> dict[str, Any]:
    """The corrections after each of two updates with a forward before each, and the loads of the updates."""
    config = config_of(Path(checkpoint), layout, expert_bias_update_rate=0.01)
    config = replaced(config, "model", recompute=recompute)
    config = replaced(config, "trainer.microbatch", max_tokens=48)

    def biases(engine: Any) -> torch.Tensor:
        return torch.stack([value for name, value in exported(engine).items() if name.endswith(BIAS)])

    with running_engine(config) as engine:
        rows = own_rows(random_experience(), engine)
        result: dict[str, Any] = {"biases": [biases(engine)], "loads": []}
        for _ in range(2):
            engine.forward(rows)
            engine.train_minibatch(rows, losses("lm"), lr=1e-4)
            result["loads"].append(engine.routing.loads.clone())
            result["biases"].append(biases(engine))
        if folder:
            save_state(engine, Path(folder))
    if folder:
        with running_engine(config) as engine:
            load_state(engine, Path(folder))
            result["loaded"] = biases(engine)
    return result


def fusions(checkpoint: str) -> list[dict[str, bool]]:
    """Megatron-Core's switches by default, under Transformer Engine, deterministic there, and with all settings."""
    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.engines.models import build
    from mega_rl.parallel.accelerator import prepare
    from mega_rl.parallel.layout import ParallelLayout

    hf, overrides = read_hf_config(checkpoint), prepare("auto").transformer_config_overrides()
    config = config_of(Path(checkpoint), "1")
    every = replaced(config, "engine.megatron.moe", shared_expert_overlap=True)
    names = ("moe_permute_fusion", "moe_shared_expert_overlap")
    asked = []
    for settings, te, deterministic in (
        (config, False, False),
        (config, True, False),
        (config, True, True),
        (every, True, False),
    ):
        mixture = build._mixture(hf, settings.engine.megatron.moe, te=te, deterministic=deterministic)
        asked.append({name: mixture[name] for name in names})
    built = build.transformer_config(
        hf,
        layout=ParallelLayout(),
        model=config.model,
        megatron=config.engine.megatron,
        deterministic=False,
        attention="sdpa",
        device_overrides=overrides,
    )
    return [*asked, {name: getattr(built, name) for name in names}]


def recomputed(checkpoint: str, layout: str, *, recompute: str = "none", modules: tuple[str, ...] = ()) -> Any:
    """Gradients and loads of an update that keeps less of the forward."""
    config = config_of(Path(checkpoint), layout)
    config = replaced(config, "model", recompute=recompute, recompute_modules=list(modules) or ["core_attn"])
    config = replaced(config, "trainer.microbatch", max_tokens=48)
    with running_engine(config) as engine:
        engine.train_minibatch(own_rows(random_experience(), engine), losses("lm"), lr=0.0)
        return {"gradients": exported_gradients(engine), "loads": engine.routing.loads.clone()}


KINDS = {
    "idle": idle,
    "balance": balance,
    "by hand": balance_by_hand,
    "bias": moving_bias,
    "recompute": recomputed,
    "fusions": fusions,
}


def run_cases(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Every case, as rank 0 found it."""
    actual = {}
    for name, case in cases.items():
        settings = {key: value for key, value in case.items() if key != "kind"}
        try:
            actual[name] = KINDS[case["kind"]](**settings)
        except Exception as error:
            raise RuntimeError(f"case {name}") from error
    return actual if rank == 0 else None
