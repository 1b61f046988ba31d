"""Ranks that share every sequence compute what one rank computes: attention alone, and whole engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.config.schema import OptimConfig
from mega_rl.types import Experience
from tests.helpers.distributed import initialized, run_ranks
from tests.helpers.engines import (
    exported,
    exported_gradients,
    make_config,
    own_rows,
    replaced,
    running_engine,
    worst_difference,
)
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.helpers.selection import FULL
from tests.unit_tests.distributed.engine_cases import losses
from tests.unit_tests.engines.models.attention_cases import (
    DIM,
    HEADS,
    MIXES,
    PLAIN,
    VARIANTS,
    Variant,
    core_attention,
    inputs,
    reference,
)

MIXES_HERE = {**MIXES, "several of some lengths": (9, 3, 10, 33, 4, 12, 35, 3)}
PADDING = 1e3  # what stands in queries, keys and values after a sequence's end, and must not matter


def differences(
    collection: Any, lengths: Sequence[int], variant: Variant, *, dtype: torch.dtype = torch.float64
) -> dict[str, float]:
    """Largest difference of this rank's context and gradients to the reference, relative to the largest number."""
    module = core_attention(variant, dtype=dtype, collection=collection)
    *given, grad = inputs(lengths, variant, dtype=dtype)
    sinks = [] if module.softmax_offset is None else [module.softmax_offset]
    context = reference(lengths, *given, variant, *sinks)
    gradients = torch.autograd.grad(context, [*given, *sinks], grad.double())
    expected = [context, *gradients]
    worst = {}
    for form, run in (("packed", _packed), ("padded", _padded)):
        actual = run(module, collection.cp, lengths, [x.detach() for x in given], grad, expected[:4])
        if sinks:
            share = actual.pop().double()  # of this rank's queries
            torch.distributed.all_reduce(share, group=collection.cp)
            actual.append((share, expected[4]))
        for name, whole, (one, other) in zip("oqkvs", expected, actual, strict=False):
            # Of short sequences a rank may hold padding alone.
            off = (one - other).detach().abs().flatten().tolist()
            worst[f"{form} {name}"] = max(off, default=0.0) / float(whole.detach().abs().max().clamp(min=1.0))
    return worst


def _packed(
    module: Any, group: Any, lengths: Sequence[int], given: list[Tensor], grad: Tensor, expected: Sequence[Tensor]
) -> list[Any]:
    """(found, expected) of this rank's context and gradients, and the sinks' gradient, sequences rounded up."""
    from mega_rl.data.packing import held_positions
    from mega_rl.engines.models.attention import packed_sequences

    rank, size = group.rank(), group.size()
    rounded = [-(-length // (2 * size)) * 2 * size for length in lengths]
    held = held_positions(rounded, cp_rank=rank, cp_size=size)
    bounds = torch.tensor([0, *rounded]).cumsum(0).to(torch.int32)
    local = [_spread(x, lengths, rounded, PADDING)[held].requires_grad_() for x in given]
    sequences = packed_sequences(bounds, max(rounded), cp_rank=rank, cp_size=size)
    context = module(*local, None, packed_seq_params=sequences).squeeze(1)
    inside = _spread(torch.ones(sum(lengths)), lengths, rounded, 0.0)[held].bool()
    return _compared(
        module,
        context,
        local,
        _spread(grad, lengths, rounded, 0.0)[held],
        [_spread(x, lengths, rounded, 0.0)[held] for x in expected],
        inside,
    )


def _padded(
    module: Any, group: Any, lengths: Sequence[int], given: list[Tensor], grad: Tensor, expected: Sequence[Tensor]
) -> list[Any]:
    """As `_packed`, for rows [S, B, ...]."""
    from mega_rl.data.packing import held_positions

    rank, size = group.rank(), group.size()
    longest = -(-max(lengths) // (2 * size)) * 2 * size
    held = held_positions([longest], cp_rank=rank, cp_size=size)

    def rows(x: Tensor, padding: float) -> Tensor:
        whole = _spread(x, lengths, [longest] * len(lengths), padding)
        return whole.unflatten(0, (len(lengths), longest)).transpose(0, 1)[held]

    local = [rows(x, PADDING).contiguous().requires_grad_() for x in given]
    context = module(*local, None)
    inside = rows(torch.ones(sum(lengths)), 0.0).bool()
    return _compared(module, context, local, rows(grad, 0.0), [rows(x, 0.0) for x in expected], inside)


def _compared(
    module: Any, context: Tensor, local: list[Tensor], grad: Tensor, expected: list[Tensor], inside: Tensor
) -> list[Any]:
    """Pairs of what is found and expected; contexts at tokens only, gradients at padding too, where they are 0."""
    sinks = [] if module.softmax_offset is None else [module.softmax_offset]
    gradients = torch.autograd.grad(context, [*local, *sinks], grad)
    return [
        (context[inside], expected[0][inside]),
        *zip(gradients[:3], expected[1:], strict=True),
        *gradients[3:],
    ]


def _spread(x: Tensor, lengths: Sequence[int], rounded: Sequence[int], padding: float) -> Tensor:
    """Packed sequences with padding behind each."""
    parts = []
    for part, size in zip(x.split(list(lengths)), rounded, strict=True):
        parts += [part, x.new_full((size - part.size(0), *x.shape[1:]), padding)]
    return torch.cat(parts)


def added_in_float32(group: Any) -> float:
    """Gradient of a bfloat16 key that gets 256 from rank 0 and 1 from each other rank.

    In bfloat16 256 + 1 is 256 again, so additions one after another would give 256; of the sum 259 of four ranks 260
    is the nearest bfloat16.
    """
    from mega_rl.engines.models.context_parallel import _GatherTokens

    order = torch.arange(2 * group.size())
    token = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    whole = _GatherTokens.apply(token, order, order, group)
    share = 256.0 if group.rank() == 0 else 1.0
    (gradient,) = torch.autograd.grad(whole.sum() * share, token)
    return float(gradient[0, 0])


def chunk_differences(rank: int) -> dict[str, float]:
    """Of each cp rank's two chunks of bfloat16 rows, on one device, to whole rows in float32: context and gradients."""
    from mega_rl.parallel.accelerator import prepare

    device = prepare("auto").device
    from mega_rl.data.packing import held_positions
    from mega_rl.engines.models.context_parallel import attend_chunks

    rows, length, worst = 3, 256, {}
    for groups in (1, HEADS // 2, HEADS):
        module = core_attention(Variant(groups=groups))
        generator = torch.Generator().manual_seed(groups)
        given = [torch.randn(rows, n, length, DIM, generator=generator) for n in (HEADS, groups, groups, HEADS)]
        q, k, v, grad = (x.to(device, torch.bfloat16).requires_grad_(i < 3) for i, x in enumerate(given))
        for size in (1, 2, 4):
            for number in range(size):
                held = held_positions([length], cp_rank=number, cp_size=size).to(device)
                context = attend_chunks(module._attend, q[:, :, held], k, v, rank=number, size=size, window=None)
                actual = [context, *torch.autograd.grad(context, [q, k, v], grad[:, :, held])]
                exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
                rows_of_all = module._attend(*exact)[:, :, held]
                expected = [rows_of_all, *torch.autograd.grad(rows_of_all, exact, grad[:, :, held].float())]
                worst[f"groups {groups} rank {number} of {size}"] = max(
                    float((one.float() - other).norm() / other.norm())
                    for one, other in zip(actual, expected, strict=True)
                )
    return worst


def shared_attention(collection: Any) -> dict[str, Any]:
    """Everything test_context_parallel.py looks at."""
    short = ["one long among short", "several of some lengths", "length 1"]
    return {
        "mixes": {mix: differences(collection, lengths, PLAIN) for mix, lengths in MIXES_HERE.items()},
        "variants": {
            f"{name}, {mix}": differences(collection, MIXES_HERE[mix], variant)
            for name, variant in VARIANTS.items()
            for mix in short
        },
        "dtypes": {
            str(dtype): differences(collection, MIXES_HERE["several of some lengths"], PLAIN, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        },
        "bf16 sum": added_in_float32(collection.cp),
    }


# Adam of a large eps: a small gradient makes a small step, so rounding of gradients stays rounding of weights.
OPTIM = OptimConfig(lr=1e-2, eps=1e-3, clip_grad=1.0)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "original_max_position_embeddings": 128,
}
# name -> (family, settings of its tiny checkpoint)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-tied": ("qwen3", {}),
    "llama3": ("llama", {"tied": False, "rope_parameters": LLAMA3}),
    "qwen2-window": (
        "qwen2",
        {"tied": False, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "gemma3": ("gemma3_text", {}),
    "gpt_oss": ("gpt_oss", {"tied": False}),
    "deepseek_v3": ("deepseek_v3", {"tied": False}),
    "deepseek_v3-yarn": ("deepseek_v3", {"tied": False, "rope_parameters": {**YARN, "mscale": 1.0}}),
    "mixtral": ("mixtral", {"tied": False}),
}
# name -> (world size, parallel settings, models)
PAIRS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "1": (1, {}, tuple(MODELS)),
    "cp2": (2, {"cp": 2}, tuple(MODELS)),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}, ("mixtral", "deepseek_v3")),
    "cp4": (4, {"cp": 4}, ("qwen3-tied", "qwen2-window", "gpt_oss", "deepseek_v3-yarn")),
    "tp2-sp-cp2": (4, {"tp": 2, "sequence_parallel": True, "cp": 2}, ("qwen3-tied", "llama3", "deepseek_v3")),
    "pp2-cp2": (4, {"pp": 2, "cp": 2}, ("gemma3", "mixtral")),
    "pp2-vpp2-cp2": (4, {"pp": 2, "vpp": 2, "cp": 2}, ("gemma3",)),
    "cp2-dp2": (4, {"cp": 2}, ("llama3",)),
}

if not FULL:  # each model once or twice, each layout of four ranks with one
    PAIRS |= {
        "cp2": (2, {"cp": 2}, ("qwen3-tied", "qwen2-window", "deepseek_v3-yarn")),
        "cp4": (4, {"cp": 4}, ("gpt_oss",)),
        "tp2-sp-cp2": (4, {"tp": 2, "sequence_parallel": True, "cp": 2}, ("deepseek_v3",)),
        "cp2-dp2": (4, {"cp": 2}, ()),  # test_layouts.py and "cp2"
        "pp2-cp2": (4, {"pp": 2, "cp": 2}, ()),  # "pp2-vpp2-cp2" has its stages
    }


def write_models(root: Path) -> None:
    """Every checkpoint."""
    for name, (family, settings) in MODELS.items():
        write_tiny_checkpoint(root / name, family=family, **settings)


def run_model(path: Path, parallel: dict[str, Any], **model: Any) -> dict[str, Any]:
    """Log-probs, loss, gradient norm and gradients, packed and padded; weights before and after two steps; inspection.

    The first step has length zero, so that the second one has the same gradients.
    Data-parallel rank 0 has all rows but one, so that the other one runs empty micro-batches.
    """
    config = replaced(make_config(path), "engine.megatron", **parallel)
    config = replaced(config, "optim", **vars(OPTIM))
    config = replaced(config, "engine.megatron.optimizer", distributed=False)
    config = replaced(config, "trainer.microbatch", max_tokens=72)
    config = replaced(config, "model", **model)
    loss = losses("lm")
    result: dict[str, Any] = {}
    with running_engine(config) as engine:
        batch = uneven_rows(random_experience(), engine)
        result["start"] = exported(engine)
        for form, lr in (("packed", 0.0), ("padded", OPTIM.lr)):
            engine.batching = dataclasses.replace(engine.batching, packing=form == "packed", micro_batch_size=5)
            outputs = engine.forward(batch, with_entropy=True)
            seen: list[torch.Tensor] = []

            def inspect(minibatch: Experience, said: Any, seen: list[torch.Tensor] = seen) -> dict[str, float]:
                seen.append(said.logprobs)
                return {"inspected": 1.0}

            metrics = engine.train_minibatch(batch, loss, lr=lr, inspect=inspect)
            result[form] = {
                "logprobs": _whole(outputs.logprobs, engine),
                "entropy": _whole(outputs.entropy, engine),
                "inspected": _whole(seen[0], engine),
                "metrics": metrics,
                "gradients": exported_gradients(engine),
            }
        result["weights"] = exported(engine)
    return result


def uneven_rows(batch: Experience, engine: Any) -> Experience:
    """This data-parallel rank's rows: all but one for rank 0 of two."""
    if engine.data_parallel.size == 1:
        return own_rows(batch, engine)
    return batch[:7] if engine.data_parallel.rank == 0 else batch[7:]


def _whole(rows: torch.Tensor, engine: Any) -> torch.Tensor:
    """All data-parallel ranks' rows."""
    if engine.data_parallel.size == 1:
        return rows
    full = torch.zeros(8, rows.size(1))
    full[slice(0, 7) if engine.data_parallel.rank == 0 else slice(7, 8)] = rows
    return engine.data_parallel.sum(full)


def run_rank(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """What this rank finds of attention ("attention") and, if first or last, of engines ("model layout")."""
    actual: dict[str, Any] = {}
    if world_size > 1:
        groups, _ = initialized(cp=world_size)
        from mega_rl.parallel import groups as process_groups

        actual["attention"] = shared_attention(groups.collection)
        process_groups.destroy()
    for layout_name, (size, parallel, models) in PAIRS.items():
        if size != world_size:
            continue
        for name in models:
            actual[f"{name} {layout_name}"] = run_model(Path(root) / name, parallel)
    if world_size == 2:
        recompute = {"recompute": "selective", "recompute_modules": ("core_attn",)}
        actual["gemma3 cp2 recomputed"] = run_model(Path(root) / "gemma3", {"cp": 2}, **recompute)
    return actual if rank in (0, world_size - 1) else {"attention": actual["attention"]}


pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

SIZES = (2, 4)
# Both sides compute in fp64: sums of up to 130 terms in another order.
FP64_TOLERANCE = 1e-12
# Attention alone in training dtypes, as on one rank: some units of fp32's last place, some of bf16's 8 bits.
DTYPES = {torch.float32: 5e-6, torch.bfloat16: 5e-2}
# Engines compute in fp32: sums of a few hundred terms in another order, through four layers.
LOGPROB_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 2e-5
MOVE_TOLERANCE = 1e-4  # gradients as above, and weights near 1 that move by some 1e-3 and are rounded at 1e-7
CASES = [(name, layout) for layout, (size, _, models) in PAIRS.items() if size > 1 for name in models]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What the ranks found, by world size."""
    root = tmp_path_factory.mktemp("models")
    write_models(root)
    # On the CPU also where there are GPUs: fp64 attention is what most of this is about.
    return {size: run_ranks(size, run_rank, size, str(root), timeout_s=300, device="cpu") for size in (1, *SIZES)}


@pytest.mark.parametrize("size", SIZES)
def test_attention_on_slices_is_explicit_softmax(ranks: dict[int, list[dict[str, Any]]], size: int) -> None:
    """Context and gradients of every rank, packed and padded, for odd lengths; padding neither gets nor gives."""
    for actual in ranks[size]:
        for mix, differences in actual["attention"]["mixes"].items():
            assert len(differences) == 8
            assert max(differences.values()) <= FP64_TOLERANCE, (mix, differences)


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("size", SIZES)
def test_windows_sinks_and_value_heads(ranks: dict[int, list[dict[str, Any]]], size: int, variant: str) -> None:
    """With the gradient of the sinks, added over ranks."""
    for actual in ranks[size]:
        chosen = {k: v for k, v in actual["attention"]["variants"].items() if k.startswith(f"{variant}, ")}
        assert chosen
        for name, differences in chosen.items():
            assert len(differences) == (10 if VARIANTS[variant].sinks else 8)
            assert max(differences.values()) <= FP64_TOLERANCE, (name, differences)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_training_dtypes(ranks: dict[int, list[dict[str, Any]]], size: int, dtype: torch.dtype) -> None:
    """As close as on one rank."""
    for actual in ranks[size]:
        differences = actual["attention"]["dtypes"][str(dtype)]
        assert max(differences.values()) <= DTYPES[dtype], differences


def test_gradients_of_keys_are_added_in_float32(ranks: dict[int, list[dict[str, Any]]]) -> None:
    """256 + 1 + 1 + 1 is 256 in bfloat16 additions, and 260 when it is rounded once."""
    assert [actual["attention"]["bf16 sum"] for actual in ranks[4]] == [260.0] * 4


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize(("name", "layout"), [*CASES, ("gemma3", "cp2 recomputed")])
def test_engines_agree_with_one_rank(ranks: dict[int, list[dict[str, Any]]], name: str, layout: str, form: str) -> None:
    """Log-probs, entropy, loss, gradient norm and every gradient; all ranks have the whole outputs."""
    one = ranks[1][0][f"{name} 1"][form]
    actual = ranks[PAIRS[layout.split()[0]][0]]
    for rank in (0, -1):
        many = actual[rank][f"{name} {layout}"][form]
        assert (many["logprobs"] - one["logprobs"]).abs().max() <= LOGPROB_TOLERANCE
        assert (many["entropy"] - one["entropy"]).abs().max() <= LOGPROB_TOLERANCE
        assert (many["inspected"] - one["logprobs"]).abs().max() <= LOGPROB_TOLERANCE
        assert many["metrics"]["inspected"] == 1.0
        for metric in ("actor/loss", "grad_norm", "actor/entropy", "actor/ratio_max"):
            assert many["metrics"][metric] == pytest.approx(one["metrics"][metric], rel=NORM_TOLERANCE), metric
        distance, weight = worst_difference(many["gradients"], one["gradients"])
        assert distance <= GRADIENT_TOLERANCE, weight


@pytest.mark.parametrize(("name", "layout"), [*CASES, ("gemma3", "cp2 recomputed")])
def test_engines_learn_what_one_rank_learns(ranks: dict[int, list[dict[str, Any]]], name: str, layout: str) -> None:
    """The way that each weight has gone in a step of Adam, relative to its length."""
    one = ranks[1][0][f"{name} 1"]
    many = ranks[PAIRS[layout.split()[0]][0]][0][f"{name} {layout}"]
    assert all(torch.equal(many["start"][n], one["start"][n]) for n in one["start"])
    moved = [{n: r["weights"][n] - r["start"][n] for n in r["start"]} for r in (many, one)]
    moved = [{n: way for n, way in ways.items() if float(moved[1][n].norm()) > 0} for ways in moved]
    assert len(moved[0]) > 0.9 * len(one["weights"])  # the experts' corrections stay
    distance, weight = worst_difference(*moved)
    assert distance <= MOVE_TOLERANCE, weight


@pytest.mark.parametrize("name", list(MODELS))
def test_the_cases_could_fail(ranks: dict[int, list[dict[str, Any]]], name: str) -> None:
    """Log-probs vary by far more than the tolerance, and packed and padded agree on one rank."""
    packed, padded = (ranks[1][0][f"{name} 1"][form] for form in ("packed", "padded"))
    inside = packed["logprobs"] != 0
    assert packed["logprobs"][inside].std() > 0.3
    assert (packed["logprobs"] - padded["logprobs"]).abs().max() <= LOGPROB_TOLERANCE


@pytest.mark.gpu
def test_chunks_on_a_gpu() -> None:
    """The kernels that know lower-right causality: bf16 inputs and outputs against fp32, 1 % of the norm."""
    differences = run_ranks(1, chunk_differences)[0]
    assert len(differences) == 3 * (1 + 2 + 4)
    assert max(differences.values()) <= 1e-2, differences
