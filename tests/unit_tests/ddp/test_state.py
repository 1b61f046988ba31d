"""An engine's state as pieces of tensors that no layout changes: complete, each element written once, live memory."""

from __future__ import annotations

import io
from collections import defaultdict
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.models import write_tiny_checkpoint
from tests.unit_tests.ddp.state_cases import LAYOUTS, MISTAKES, run_all


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(root / "tied", family="qwen3", tied=True)
    write_tiny_checkpoint(root / "mtp", family="deepseek_v3", tied=False, mtp_layers=1)
    return run_ranks(2, run_all, str(root), timeout_s=170)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_written_once(ranks: list[dict[str, Any]], layout: str) -> None:
    """Owned pieces cover each tensor, and the tensors are the same on all layouts."""
    written: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
    for actual in ranks:
        for name, whole, offset, shape, owned in actual["layouts"][layout]["pieces"]:
            count = written.setdefault((name, whole), torch.zeros(whole, dtype=torch.int8))
            count[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] += int(owned)
    assert all(bool((count == 1).all()) for count in written.values())
    assert set(written) == {tuple(piece[:2]) for actual in ranks for piece in actual["layouts"]["dp2"]["pieces"]}
    kinds = defaultdict(set)
    for name, _ in written:
        kind, _, key = name.partition("/")
        kinds[kind].add(key)
    assert set(kinds) == {"weights", "exp_avg", "exp_avg_sq"}  # fp32: main parameters are the weights
    assert kinds["weights"] == kinds["exp_avg"] == kinds["exp_avg_sq"]
    assert {key.split(".")[2] for key in kinds["weights"] if ".layers." in key} == {"0", "1", "2", "3"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_are_live_memory_and_all_of_it(ranks: list[dict[str, Any]], layout: str) -> None:
    """A rank that loads writes every element of its own weights; shards of FSDP are less than the whole."""
    for actual in ranks:
        listed = actual["layouts"][layout]
        assert listed["shapes"]
        assert listed["own memory"]
        assert listed["memory of two pieces"] == 0  # so neither moment is saved as the other
        assert listed["numbers"] == {"optimizer_steps": 0}
        if layout != "torch_fsdp2":
            assert listed["weights"] == listed["parameters"]
    if layout == "torch_fsdp2":
        assert sum(actual["layouts"][layout]["weights"] for actual in ranks) == ranks[0]["layouts"]["dp2"]["parameters"]


def test_a_state_before_the_first_step(ranks: list[dict[str, Any]]) -> None:
    for actual in ranks:
        for name in ("device", "host"):
            assert actual["early"][f"{name} zeros"]
            assert actual["early"][f"{name} steps"] == 0
            assert actual["early"][f"{name} same"]
        assert actual["on the host"]


def test_what_cannot_be_restored(ranks: list[dict[str, Any]]) -> None:
    for actual in ranks:
        said = actual["refusals"]
        assert set(said) == {*MISTAKES, "parameters offloaded", "optimizer offloaded"}
        assert "of this model are {}, must be whole numbers of ['optimizer_steps']" in said["nothing"]
        for name in ("unknown", "negative", "fraction", "flag"):
            assert said[name].startswith("actor: the checkpoint's numbers of this model are {'optimizer_steps': ")
        for part in ("parameters", "optimizer"):
            assert said[f"{part} offloaded"] == f"actor: the memory of {part} is given back; onload before state()"


def test_an_engine_that_does_not_learn(ranks: list[dict[str, Any]]) -> None:
    for actual in ranks:
        assert actual["frozen engine"] == {"kinds": ["weights"], "numbers": {}}


def test_an_optimizer_that_makes_its_own_state(ranks: list[dict[str, Any]]) -> None:
    """A precision-aware optimizer has of a bf16 parameter the rest of its bits; an FP32 one is its own main."""
    for actual in ranks:
        assert actual["fused"] == {
            "before": 0,
            "after": 5,
            "group": 5,
            "main": [True, False],
            "moments": ["torch.bfloat16", "torch.bfloat16"],
        }


def test_multi_token_prediction_on_two_stages(ranks: list[dict[str, Any]]) -> None:
    """The last stage's copy of the embedding is nobody's to write; everything else is covered once."""
    first, last = (actual["multi-token prediction"] for actual in ranks)
    keys = {key for key, *_ in last}
    assert any(key.startswith("mtp.layers.0.") for key in keys)
    embedding = "embedding.word_embeddings.weight"
    assert [copy for key, _, _, copy in first if key == embedding] == [True]
    assert [copy for key, _, _, copy in last if key == embedding] == [False]
    covered: dict[str, int] = defaultdict(int)
    sizes = {}
    for key, size, here, is_first in [*first, *last]:
        covered[key] += here if is_first else 0
        sizes[key] = size
    assert covered == sizes


@pytest.mark.parametrize(
    ("data", "size"),
    [(None, 0), (torch.empty(0), 0), (io.BytesIO(), 0), (torch.zeros(3), 3), (io.BytesIO(b"ab"), 2), (b"abc", 3)],
)
def test_state_that_is_no_tensor(data: Any, size: int) -> None:
    """Transformer Engine's modules list an extra state, empty unless they compute in FP8."""
    said = run_ranks(1, extra_state, data if not isinstance(data, io.BytesIO) else list(data.getvalue()), timeout_s=60)
    name = "decoder.layers.0.mlp.linear_fc1"
    assert said == ([""] if not size else [f"{name}: has state that is not a tensor ({size} bytes"])


def extra_state(rank: int, data: Any) -> str:
    """The beginning of what is said of it; a list is a file's bytes."""
    from mega_rl.parallel.accelerator import prepare

    prepare("auto")
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from mega_rl.ddp.regions import _check_empty
    from mega_rl.errors import UserError

    held = io.BytesIO(bytes(data)) if isinstance(data, list) else data
    try:
        _check_empty(ShardedObject("decoder.layers.0.mlp.linear_fc1._extra_state", held, (1,), (0,)))
    except UserError as error:
        return str(error).partition(";")[0]
    return ""
