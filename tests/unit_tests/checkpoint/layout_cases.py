"""What each rank does in the tests of checkpoints across layouts: every pair of them in one launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash

from mega_rl.config.keys import kind_of
from mega_rl.config.schema import MegatronConfig, MegatronOptimizerConfig, OptimConfig
from tests.helpers.engines import exported, load_state, make_config, own_rows, replaced, running_engine, save_state
from tests.helpers.models import random_experience
from tests.helpers.selection import without
from tests.unit_tests.distributed.engine_cases import losses

MOMENTS = ("exp_avg", "exp_avg_sq")
STEPS = 2
Parts = dict[str, str]  # "weights model.norm.weight" -> checksum of its bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to run a model over four ranks (or fewer)."""

    model: str = "routed"
    megatron: MegatronConfig = dataclasses.field(default_factory=MegatronConfig)
    dtype: str = "fp32"
    head: str = "lm"
    frozen: tuple[str, ...] = ()

    @contextmanager
    def engine(self, root: Path) -> Iterator[Any]:
        """A fresh engine of this case; models stand in a folder beside `root`."""
        folder = root.parent / "models" / self.model
        config = make_config(folder, dtype=self.dtype, optim=OptimConfig(lr=1e-2), megatron=self.megatron)
        config = replaced(config, "model", frozen=list(self.frozen))
        with running_engine(config, head=self.head) as engine:
            yield engine


def _case(
    *,
    model: str = "routed",
    dtype: str = "fp32",
    head: str = "lm",
    frozen: tuple[str, ...] = (),
    ddp: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **parallel: Any,
) -> Case:
    return Case(
        model=model,
        megatron=MegatronConfig(
            **parallel,
            ddp=kind_of("engine.megatron.ddp", ddp or {}),
            optimizer=MegatronOptimizerConfig(**(optimizer or {})),
        ),
        dtype=dtype,
        head=head,
        frozen=frozen,
    )


# Under tensor parallelism a mixture trains with sequence parallelism only.
LAYOUTS = {
    "dp4": _case(),
    "tp2-sp-dp2": _case(tp=2, sequence_parallel=True),
    "pp2-dp2": _case(pp=2),
    "pp2-vpp2-dp2": _case(pp=2, vpp=2),
    "tp2-sp-pp2": _case(tp=2, sequence_parallel=True, pp=2),
    "ep2-dp4": _case(ep=2),
    "tp2-sp-ep2-dp2": _case(tp=2, sequence_parallel=True, ep=2, etp=1),
    "cp2-dp2": _case(cp=2),
}
LAYOUTS = without(LAYOUTS, "tp2-sp-dp2", "pp2-dp2")  # the others have their parts
HALF = ("embedding.*", "decoder.layers.0.*", "decoder.layers.1.*")
MIXED = {"tp": 2, "sequence_parallel": True, "ep": 2, "etp": 1}
_MEGATRON: dict[str, Any] = {"name": "megatron_fsdp"}
# Models, dtypes and implementations, in circles: each is loaded from the one before it.
CIRCLES: dict[str, dict[str, Case]] = {
    "tied": {
        "dp4": _case(model="tied"),
        "pp2": _case(model="tied", pp=2),
        "uneven": _case(model="tied", pp=2, tp=2, pipeline="Et|tttL"),
        "two instances": _case(model="tied", ddp={"optimizer_instances": 2}),
        "not sharded": _case(model="tied", tp=2, optimizer={"distributed": False}),
        "on the host": _case(model="tied", optimizer={"cpu_offload": 0.5}),
        "torch_fsdp2": _case(model="tied", ddp={"name": "torch_fsdp2"}),
        "overlap": _case(
            model="tied", ddp={"overlap_param_gather": True, "overlap_grad_reduce": True, "bucket_size": 5000}
        ),
        "torch_fsdp2 tp2": _case(model="tied", tp=2, ddp={"name": "torch_fsdp2"}),
        "megatron_fsdp": _case(model="tied", ddp=_MEGATRON),
        "megatron_fsdp optim": _case(model="tied", ddp={**_MEGATRON, "fsdp_sharding": "optim"}),
        "megatron_fsdp instances": _case(model="tied", ddp={**_MEGATRON, "optimizer_instances": 2}),
    },
    "bf16": {
        "dp4": _case(model="tied", dtype="bf16"),
        "tp2-pp2": _case(model="tied", dtype="bf16", tp=2, pp=2),
        "not sharded": _case(model="tied", dtype="bf16", optimizer={"distributed": False}),
        "megatron_fsdp": _case(model="tied", dtype="bf16", ddp=_MEGATRON),
    },
    "bf16 fsdp2": {
        "dp4": _case(model="tied", dtype="bf16", ddp={"name": "torch_fsdp2"}),
        "tp2": _case(model="tied", dtype="bf16", tp=2, ddp={"name": "torch_fsdp2"}),
    },
    "value": {  # an FP32 head on a bf16 model
        "dp4": _case(model="tied", dtype="bf16", head="value"),
        "tp2-pp2": _case(model="tied", dtype="bf16", head="value", tp=2, pp=2),
    },
    "frozen": {"dp4": _case(model="tied", frozen=HALF), "pp2": _case(model="tied", frozen=HALF, pp=2)},
    "odd vocabulary": {"dp4": _case(model="odd"), "tp2-pp2": _case(model="odd", tp=2, pp=2)},
    "latent": {"dp4": _case(model="latent"), "mixed": _case(model="latent", **MIXED)},
    "sinks": {"dp4": _case(model="sinks"), "mixed": _case(model="sinks", **MIXED)},
    "shared": {"dp4": _case(model="shared"), "mixed": _case(model="shared", **MIXED)},
}


def save(engine: Any, folder: Path) -> dict[str, Any]:
    """Write an engine's state as a checkpoint; collective. Returns its numbers and what this rank writes."""
    state = engine.state()
    save_state(engine, folder, role=role_of(engine.sharding.head))
    nbytes = sum(piece.data.nbytes for piece in state.pieces if piece.owned)
    return {**state.numbers, "bytes": nbytes, "pieces": len(state.pieces)}


def role_of(head: str) -> str:
    """The model of a run that has this head."""
    return "critic" if head == "value" else "actor"


def contents(engine: Any) -> Parts:
    """Weights, main parameters and moments under Hugging Face's names, by another way than checkpoints take.

    The optimizer's tensors are put where its main parameters are and travel to the exporter as a step's result would:
    by way of the model's weights. Those of a bf16 model have eight bits, so what has 24 goes in three parts.
    """
    actual = checksums("weights", exported(engine))
    bf16 = engine.config.params_dtype == torch.bfloat16
    for name in (*MOMENTS, *(["main"] if bf16 else [])):
        for part in range(3 if bf16 else 1):
            with _in_place_of_weights(engine, name, part if bf16 else None):
                actual |= checksums(f"{name} {part}", exported(engine))
    return actual


def memory(engine: Any) -> Parts:
    """Weights, buffers and the optimizer's tensors as they lie on this rank, bit for bit."""
    from mega_rl.ddp.access import optimizer_tensors
    from mega_rl.ddp.optimizer import torch_optimizers

    tensors = [t.detach() for model in engine.models for t in (*model.parameters(), *model.buffers())]
    tensors += [t for optimizer in torch_optimizers(engine.optimizer) for t in optimizer_tensors(optimizer)]
    return checksums("memory", {str(i): tensor for i, tensor in enumerate(tensors)})


def checksums(kind: str, tensors: dict[str, torch.Tensor]) -> Parts:
    return {
        f"{kind} {name}": xxhash.xxh3_64_hexdigest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, tensor in tensors.items()
    }


@contextmanager
def _in_place_of_weights(engine: Any, name: str, part: int | None) -> Iterator[None]:
    """The model's weights are, for a while, what the optimizer has under this name; undone bit for bit."""
    from mega_rl.ddp.optimizer import torch_optimizers

    mains = []
    for optimizer in torch_optimizers(engine.optimizer):
        for group in optimizer.param_groups:
            for main in group["params"]:
                before = main.detach().clone()
                mains.append((main, before))
                shown = before if name == "main" else optimizer.state[main].get(name)
                if shown is not None:  # FSDP may leave a rank no element of a parameter
                    with torch.no_grad():
                        main.copy_(_part(shown, part))
    _show(engine)
    yield
    with torch.no_grad():
        for main, before in mains:
            main.copy_(before)
    _show(engine)


def _part(tensor: torch.Tensor, part: int | None) -> torch.Tensor:
    """float32 as it is, or one of the three bf16 numbers that it is the sum of."""
    rest = tensor.detach().clone()
    if part is None:
        return rest
    for _ in range(part):
        rest -= rest.bfloat16().float()
    return rest.bfloat16().float()


def _show(engine: Any) -> None:
    """Let the model's weights be what the main parameters are, on every rank."""
    from megatron.core.distributed import DistributedDataParallel

    from mega_rl.ddp.access import finish_traffic

    finish_traffic(engine.chunks)
    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        if part.optimizer is not None and hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
    for chunk in engine.chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)
    finish_traffic(engine.chunks)  # what Megatron FSDP has gathered is of before


def spoil(engine: Any) -> None:
    """Sevens everywhere, so that whatever is not loaded shows; a number, for rows of padding keep it."""
    from mega_rl.ddp.access import optimizer_tensors, parameter_tensors
    from mega_rl.ddp.optimizer import create_state, torch_optimizers

    create_state(engine.optimizer)
    tensors = list(parameter_tensors(engine.chunks))
    tensors += [t for optimizer in torch_optimizers(engine.optimizer) for t in optimizer_tensors(optimizer)]
    tensors += [b for m in engine.models for n, b in m.named_buffers() if n.endswith("expert_bias")]
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(7.0)


def counters(engine: Any) -> list[list[float]]:
    """[steps of every counter, distinct counters] of this rank."""
    from mega_rl.ddp.optimizer import torch_optimizers

    states = [s for o in torch_optimizers(engine.optimizer) for s in o.state.values() if "step" in s]
    return [sorted({float(s["step"]) for s in states}), [len(states), len({s["step"].data_ptr() for s in states})]]


def train(engine: Any, steps: int = 1) -> dict[str, float]:
    """Optimizer steps on this rank's rows; the metrics of the last."""
    rows = own_rows(random_experience(), engine)
    metrics: dict[str, float] = {}
    for _ in range(steps):
        metrics = engine.train_minibatch(rows, losses("value" if engine.sharding.head == "value" else "lm"), lr=1e-2)
    return metrics


def save_all(root: Path, cases: dict[str, Case], *, thorough: bool) -> dict[str, Any]:
    """Every case trains and is saved; what it held, the norm of its next step and, thorough, what that makes of it."""
    saved = {}
    for name, case in cases.items():
        with case.engine(root) as engine:
            train(engine, STEPS)
            saved[name] = {"held": contents(engine)}
            before = memory(engine) if thorough else {}
            saved[name]["written"] = save(engine, root / name)
            if thorough:
                assert memory(engine) == before, "saving has changed something"
            saved[name]["norm"] = train(engine)["grad_norm"]
            if thorough:
                saved[name]["after"] = memory(engine)
    return saved


def load_into(engine: Any, folder: Path, source: dict[str, Any]) -> dict[str, Any]:
    """What differs once a checkpoint is loaded over other numbers."""
    spoil(engine)
    load_state(engine, folder, role=role_of(engine.sharding.head))
    actual = contents(engine)
    assert actual.keys() == source["held"].keys()
    return {
        "wrong": [name for name, checksum in actual.items() if checksum != source["held"][name]],
        "counters": counters(engine),
    }


def run_pairs(rank: int, root: str, pairs: list[tuple[str, str]]) -> dict[str, Any]:
    """Each layout loaded into a fresh engine of its own, which makes a step more; then pairs (source, target)."""
    folder = Path(root) / "layouts"
    saved = save_all(folder, LAYOUTS, thorough=True)
    actual: dict[str, Any] = {"saved": saved}
    for target, case in LAYOUTS.items():
        with case.engine(folder) as engine:
            same = load_into(engine, folder / target, saved[target])
            same["norm"] = train(engine)["grad_norm"]
            same["same after"] = memory(engine) == saved[target]["after"]
            actual[f"{target} -> {target}"] = same
            for source in (source for source, into in pairs if into == target):
                actual[f"{source} -> {target}"] = load_into(engine, folder / source, saved[source])
    return actual


def run_circles(rank: int, root: str, circles: dict[str, dict[str, Case]]) -> dict[str, Any]:
    """Each case of a circle loads what the one before it has saved and makes a step more.

    In bf16 another layout's gradients differ by several percent, as between whole runs (docs/verify.md): there the step
    is made with what the case itself has saved.
    """
    actual: dict[str, Any] = {}
    for name, circle in circles.items():
        folder = Path(root) / name
        saved = save_all(folder, circle, thorough=False)
        actual[name] = {"saved": saved}
        sources = list(circle)[-1:] + list(circle)[:-1]
        for source, (target, case) in zip(sources, circle.items(), strict=True):
            with case.engine(folder) as engine:
                loaded = load_into(engine, folder / source, saved[source])
                if case.dtype == "bf16":
                    load_state(engine, folder / target, role=role_of(engine.sharding.head))
                loaded["norm"] = train(engine)["grad_norm"]
            actual[name][f"{source} -> {target}"] = loaded
    return actual
