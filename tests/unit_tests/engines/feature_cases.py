"""What each of two ranks sees of either engine's features, for test_features.py: one launch for all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega_rl.config.keys import kind_of
from mega_rl.config.schema import AlgorithmConfig, Config, DataConfig, MetricsConfig, RewardConfig, RolloutConfig
from mega_rl.config.schema.rollout import RewardModelConfig
from mega_rl.config.schema.training import KlInReward
from mega_rl.converters.families import FAMILIES
from mega_rl.errors import UserError
from tests.helpers.engines import exported, load_state, own_rows, running_engine, save_state
from tests.helpers.loops import engines_of, step_metrics
from tests.helpers.models import SMALL, TINY, random_experience, write_digit_tokenizer, write_tiny_checkpoint
from tests.unit_tests.engines.fsdp_cases import config_of, engine_of, same, state, train
from tests.unit_tests.rewards.model_cases import write_reward_model

ENGINES = ("megatron", "fsdp")
SOME = 9_000  # bytes of a bucket, of which the model needs several
# Where a feature is a setting: areas of a config, by engine.
SHARDED_WEIGHTS: dict[str, dict[str, Any]] = {
    "megatron": {"engine.megatron.ddp": {"name": "torch_fsdp2"}}, "fsdp": {},
}  # fmt: skip
COPIES: dict[str, dict[str, Any]] = {
    "megatron": {"engine.megatron.ddp": {"optimizer_instances": 2}},
    "fsdp": {"engine.fsdp": {"shard_ranks": 1}},
}
ON_HOST: dict[str, dict[str, Any]] = {
    "megatron": {"engine.megatron.optimizer": {"cpu_offload": 1.0}},
    "fsdp": {"engine.fsdp": {"cpu_offload": True}},
}
OTHER_LAYOUT: dict[str, dict[str, Any]] = {
    "megatron": {"engine.megatron": {"tp": 2}},
    "fsdp": {"engine.fsdp": {"shard_ranks": 1}},
}
FIRST_LAYER = {"megatron": "decoder.layers.0.", "fsdp": "model.layers.0."}


def write_inputs(folder: Path) -> None:
    """Checkpoints of an actor, a reference and a reward model, configs of all families, and prompts."""
    from transformers import AutoConfig

    for seed, name in enumerate(("model", "reference")):
        write_tiny_checkpoint(folder / name, seed=seed)
        write_digit_tokenizer(folder / name, vocab_size=50)
    for family in FAMILIES:
        AutoConfig.for_model(family, **{**SMALL, **TINY[family]}).save_pretrained(folder / "families" / family)
    write_reward_model(folder / "reward", family="qwen3")
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def see_all(rank: int, folder: str) -> dict[str, dict[str, bool]]:
    """Whether this rank sees a feature, by engine and name."""
    root = Path(folder)
    actual: dict[str, dict[str, bool]] = {}
    for engine in ENGINES:
        actual[engine] = {"families": has_families(engine, root)}
        actual[engine] |= options(engine, root) | one_step(engine, root) | usual(rank, engine, root)
        actual[engine]["recompute"] = actual[engine].pop("recomputed") and actual[engine].pop("not recomputed")
    for engine, other in zip(ENGINES, reversed(ENGINES), strict=True):
        own, others = loads(engine, [root / engine, root / other], root)
        actual[engine] |= {"resume": own, "checkpoint of the other engine": others}
    return actual


def usual(rank: int, engine: str, root: Path) -> dict[str, bool]:
    """Of an engine without settings of its own, after a step."""
    from mega_rl.engines.base import ModelEngine

    with engine_of(root / "model", engine=engine) as built:
        weights, before = exported(built), state(built)
        members = [name for name in dir(ModelEngine) if not name.startswith("_")]
        actual = {
            "protocol": len(members) > 15 and all(hasattr(built, name) for name in members),
            "data parallelism": built.data_parallel.size == 2,
            "shared moments": share_of("exp_avg", built) < 0.6,
            "packed": (1, 64) >= packed_shape(built) > (1, 24),
            "by distributed": reaches_a_server(rank, built),
        }
        freed = built.offload()
        gone = all(built.is_offloaded(part) for part in ("parameters", "gradients", "optimizer"))
        built.onload()
        actual["offload"] = gone and freed > 0 and same(state(built), before)
        save_state(built, root / engine)
        length = momentum(built)
        if rank == 0:
            torch.save((weights, length), root / engine / "expected.pt")
        built.save_hf(root / f"{engine}-hf", source=root / "model")
        actual["not recomputed"] = forwards_in_a_step(built) == 1
    other = ENGINES[1 - ENGINES.index(engine)]
    with running_engine(config_of(root / f"{engine}-hf", engine=other), trainable=False) as reader:
        actual["Hugging Face checkpoint"] = same(exported(reader), weights)
    (actual["resume elsewhere"],) = loads(engine, [root / engine], root, **OTHER_LAYOUT[engine])
    return actual


def options(engine: str, root: Path) -> dict[str, bool]:
    """Of engines with one setting changed."""
    model = partial(engine_of, root / "model", engine=engine)
    actual = {}
    with model(**SHARDED_WEIGHTS[engine]) as built:
        actual["shared weights"] = share_of("weights", built) < 0.6
    with model(**COPIES[engine]) as built:
        actual["copies"] = share_of("exp_avg", built) == 1.0
    with model(**ON_HOST[engine]) as built:
        actual["optimizer on the host"] = steps_on_host(built)
    with model(model={"recompute": "full", "attn_implementation": "eager"}) as built:
        actual["recomputed"] = forwards_in_a_step(built) == 2
        actual["eager"] = built.attention == "eager"
    with model(dtype="bf16") as built:
        actual["bf16"] = main_dtypes(built) == {torch.float32} and {
            weight.dtype for weight in exported(built).values()
        } == {torch.bfloat16}
    frozen = {"frozen": [FIRST_LAYER[engine] + "*"], "attn_implementation": "sdpa"}
    with running_engine(config_of(root / "model", engine=engine, model=frozen)) as built:
        actual["sdpa"] = built.attention == "sdpa"
        before = exported(built)
        train(built)
        still = {name for name, weight in exported(built).items() if torch.equal(weight, before[name])}
        actual["frozen"] = still == {name for name in before if name.startswith("model.layers.0.")}
    return actual


def one_step(engine: str, root: Path) -> dict[str, bool]:
    """Of a run: PPO with a critic, a KL to another model, a reward model, and a kernel for each of them."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.trainer.assemble import build_trainer, session

    config = run_config(engine, root)
    with session(config, accelerator) as groups, ExitStack() as resources:
        trainer: Any = build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources)
        sent = trainer.stage.publish(trainer.sync)
        metrics, engines = step_metrics(trainer, 0), engines_of(trainer)
        kernels = [engines[role].attention for role in ("actor", "critic", "reference", "reward")]
        return {
            "embedded rollouts": sent["sync/verified"] == 1.0 and metrics["rollout/logprob_diff_max"] < 1e-3,
            "critic": metrics["critic/grad_norm"] > 0.0,
            "reference": metrics["kl/ref"] > 0.0,
            "reward model": engines["reward"].sharding.head == "value" and metrics["reward/mean"] != 0.0,
            "kernel of a role": kernels == ["sdpa", "eager", "eager", "sdpa"],
        }


def has_families(engine: str, root: Path) -> bool:
    """Whether every tensor of a checkpoint has its place, once, in a model of each family that trains."""
    from mega_rl.converters.hf.config import read_hf_config
    from mega_rl.converters.plan.parameters import disk_tensors, hf_tensors
    from mega_rl.converters.plan.proof import prove_complete
    from mega_rl.converters.plan.sharding import Sharding
    from mega_rl.engines.fsdp_model import skeleton
    from mega_rl.engines.fsdp_weights import disk_buffers
    from mega_rl.parallel.layout import ParallelLayout

    for family in FAMILIES:
        hf = read_hf_config(root / "families" / family)
        if engine == "megatron":
            prove_complete(Sharding(hf, ParallelLayout(world_size=1), spec="local", head="lm"))
            continue
        model, _ = skeleton(root / "families" / family, head="lm", attention="sdpa")
        held = {**dict(model.named_parameters()), **disk_buffers(model)}
        names = [t.name for name, x in held.items() for t in disk_tensors(hf.family, name, tuple(x.shape))]
        if sorted(names) != sorted(hf_tensors(hf, head="lm")):
            return False
    return True


def run_config(engine: str, root: Path) -> Config:
    """Eight prompts and one step."""
    config = config_of(root / "model", engine=engine)
    model = replace(
        config.model,
        ref_path=str(root / "reference"),
        critic_attn_implementation="eager",
        ref_attn_implementation="eager",
    )
    trainer = replace(config.trainer, run_dir=str(root / f"run-{engine}"), prompts_per_step=8, minibatch_size=8)
    return replace(
        config,
        model=model,
        trainer=trainer,
        algorithm=AlgorithmConfig(advantage=kind_of("algorithm.advantage", "gae"), kl=KlInReward()),
        data=DataConfig(train_files=[str(root / "train.jsonl")], max_prompt_tokens=8),
        rollout=RolloutConfig(n=1, max_new_tokens=8, verify_interval=1),
        reward=RewardConfig(source=RewardModelConfig(path=str(root / "reward"))),
        metrics=MetricsConfig(tensorboard=False, progress_bar=False, rollout_interval=0),
    )


def share_of(kind: str, engine: Any) -> float:
    """The part of the model's elements whose "weights" or "exp_avg" this rank keeps."""
    held = sum(piece.data.numel() for piece in engine.state().pieces if piece.name.startswith(f"{kind}/"))
    return held / sum(weight.numel() for weight in exported(engine).values())


def main_dtypes(engine: Any) -> set[torch.dtype]:
    """Of what the optimizer keeps: moments, and the weights that it steps."""
    kept: dict[str, set[torch.dtype]] = {}
    for piece in engine.state().pieces:
        kept.setdefault(piece.name.partition("/")[0], set()).add(piece.data.dtype)
    return kept["exp_avg"] | kept["exp_avg_sq"] | kept.get("main", kept["weights"])


def loads(engine: str, checkpoints: list[Path], root: Path, **areas: Any) -> list[bool]:
    """Whether an engine that has gone elsewhere takes the weights and moments of each checkpoint."""
    with engine_of(root / "model", engine=engine, **areas) as built:
        return [takes(built, saved) for saved in checkpoints]


def takes(built: Any, saved: Path) -> bool:
    """Whether an engine, after a step that leads it elsewhere, has what a checkpoint holds."""
    train(built, seed=1)
    before = exported(built), momentum(built)
    try:
        load_state(built, saved)
    except UserError:
        return False
    weights, length = torch.load(saved / "expected.pt", weights_only=True)
    assert not same(before[0], weights)
    assert abs(before[1] / length - 1) > 1e-3
    return same(exported(built), weights) and abs(momentum(built) / length - 1) < 1e-6


def momentum(engine: Any) -> float:
    """L2 norm of the first moments of all ranks."""
    from mega_rl.parallel.comm import GroupRanks

    own = [piece.data for piece in engine.state().pieces if piece.owned and piece.name.startswith("exp_avg/")]
    squares = torch.tensor([float(moment.double().norm()) ** 2 for moment in own]).sum()
    return float(GroupRanks(engine.groups.world).sum(squares)) ** 0.5


def packed_shape(engine: Any) -> tuple[int, ...]:
    """Of the largest input that the embedding gets in a forward."""
    (embedding,) = modules_named(engine, ("embed_tokens", "word_embeddings"))
    shapes: list[tuple[int, ...]] = []
    with embedding.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape))):
        engine.forward(own_rows(random_experience(), engine))
    return max(shapes)


def forwards_in_a_step(engine: Any) -> float:
    """How often attention runs in a step for each micro-batch and layer."""
    layers = list(modules_named(engine, ("self_attn", "self_attention")))
    calls: list[int] = []
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda module, inputs: calls.append(1)))
        metrics = train(engine)
    return len(calls) / (len(layers) * metrics["num_microbatches"])


def modules_named(engine: Any, names: tuple[str, ...]) -> Iterator[torch.nn.Module]:
    for chunk in [engine.model] if hasattr(engine, "model") else engine.chunks:
        yield from (module for name, module in chunk.named_modules() if name.rpartition(".")[2] in names)


def steps_on_host(engine: Any) -> bool:
    """Whether every moment is meant to stay in host memory, which on a CPU the device's is, too."""
    moments = [piece.data for piece in engine.state().pieces if piece.name.startswith("exp_avg")]
    if any(moment.device.type != "cpu" for moment in moments):
        return False
    if hasattr(engine, "model"):
        from torch.distributed.fsdp import CPUOffloadPolicy

        group = engine.model._get_fsdp_state()._fsdp_param_group
        return isinstance(group.offload_policy, CPUOffloadPolicy)
    from mega_rl.ddp.host_adam import HostAdamW
    from mega_rl.ddp.optimizer import torch_optimizers

    return all(isinstance(optimizer, HostAdamW) for optimizer in torch_optimizers(engine.optimizer))


def reaches_a_server(rank: int, engine: Any) -> bool:
    """Whether a server has every bit of the engine's weights."""
    from mega_rl.rollout.sglang.weights.process_group import DistributedTransport
    from mega_rl.rollout.sglang.weights.transport import Server, TrainerWeights
    from tests.helpers.weight_receiver import FakeReceiver

    weights, expected = TrainerWeights(engine, torch.float32), exported(engine)
    receiver: Any = FakeReceiver() if rank == 0 else None
    transport = DistributedTransport(weights, [Server(0, 1, (0,), receiver)], bucket_bytes=SOME, timeout_s=60.0)
    failed = transport.send(version=1)
    transport.close()
    return not failed and (receiver is None or same(receiver.weights, expected))
