"""Megatron-Core's own model, DDP, distributed optimizer, schedules and checkpoints on the stand-in, against one rank.

All layouts start from the weights one rank has saved, so the loss and the global gradient norm must agree: float32 to
2e-5 (sums in another order, through two Adam steps), bfloat16 to 3e-2. Checkpoints cross layouts both ways.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL

pytestmark = pytest.mark.skipif(not FULL, reason="make test-full: upstream's own training, half a minute")

# (loss, gradient norm) of steps 1 to 4, then of 3 and 4 after loading one rank's step 2, then after loading one's own.
# Two steps after each load: the first tells of the weights, only the second of the optimizer's state.
Record = list[tuple[float, float]]

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {},
        {"tp": 2},
        {"pp": 2},
        {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
        {"pp": 2, "vpp": 2},
        {"pp": 2, "tied": True},
        {"tp": 2, "dtype": "bfloat16"},
    ],
    4: [
        {"tp": 2, "pp": 2, "sequence_parallel": True},
        {"tp": 2},
        {"pp": 2, "tied": True, "recompute": "full"},
    ],
}
if not FULL:  # every kind of parallelism and each model in one of them
    LAYOUTS = {
        2: [
            {"tp": 2, "sequence_parallel": True, "recompute": "selective"},
            {"pp": 2, "vpp": 2},
            {"pp": 2, "tied": True},
        ],
        4: [{"tp": 2, "pp": 2, "sequence_parallel": True}, {"tp": 2, "dtype": "bfloat16"}],
    }
MODELS = [{}, {"tied": True}, {"dtype": "bfloat16"}]


def train(
    folder: Path, rank: int, *, tied: bool = False, dtype: str = "float32", recompute: str = "none", **sizes: Any
) -> Record:
    """Records of one layout; the first caller of a model makes its checkpoints, the others start from them."""
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.parallel import groups
    from mega_rl.parallel.layout import ParallelLayout
    from tests.unit_tests.parallel.accelerator import tiny_gpt

    world = int(os.environ["WORLD_SIZE"])
    built = groups.initialize(ParallelLayout(world_size=world, **sizes), accelerator=accelerator, timeout_s=60)
    groups.seed_model_parallel(3, built)
    training = tiny_gpt.build(built, accelerator, dtype=getattr(torch, dtype), recompute=recompute, tied=tied)
    name = f"{dtype}{'_tied' if tied else ''}"
    fresh, after_two, own = folder / f"{name}_0", folder / f"{name}_2", folder / f"own{world}_{len(os.listdir(folder))}"
    torch.distributed.barrier()
    makes = not fresh.exists()
    torch.distributed.barrier()
    if makes:
        tiny_gpt.save(training, fresh)
    else:
        tiny_gpt.load(training, fresh)
    records = [tiny_gpt.step(training) for _ in range(2)]
    tiny_gpt.save(training, after_two if makes else own)
    records += [tiny_gpt.step(training) for _ in range(2)]
    for checkpoint in (after_two, after_two if makes else own):
        tiny_gpt.load(training, checkpoint)
        records += [tiny_gpt.step(training) for _ in range(2)]
    del training, built
    groups.destroy()
    return [(record["loss"], record["grad_norm"]) for record in records]


def train_all(rank: int, folder: str, layouts: list[dict[str, Any]]) -> list[Record]:
    return [train(Path(folder), rank, **layout) for layout in layouts]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Record]]:
    """Checkpoints and records of one rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    (records,) = run_ranks(1, train_all, str(folder), MODELS, device="cpu")
    return folder, {str(model): record for model, record in zip(MODELS, records, strict=True)}


def test_one_rank_learns_and_resumes_exactly(reference: tuple[Path, dict[str, Record]]) -> None:
    for record in reference[1].values():
        losses = [loss for loss, _ in record]
        assert abs(losses[0] - math.log(64)) < 0.2, "an untrained model knows nothing"
        assert losses[3] < losses[2] < losses[1] < losses[0]
        assert record[2:4] == record[4:6] == record[6:8], "loading step 2 does not give steps 3 and 4 again"


@pytest.mark.parametrize("world", [2, 4])
def test_layouts_agree_with_one_rank(world: int, reference: tuple[Path, dict[str, Record]]) -> None:
    folder, expected = reference
    for records in run_ranks(world, train_all, str(folder), LAYOUTS[world], device="cpu", timeout_s=240):
        for layout, record in zip(LAYOUTS[world], records, strict=True):
            model = {key: layout[key] for key in ("tied", "dtype") if key in layout}
            tolerance = 3e-2 if layout.get("dtype") == "bfloat16" else 2e-5
            for step, (actual, wanted) in enumerate(zip(record, expected[str(model)], strict=True)):
                assert actual == pytest.approx(wanted, rel=tolerance), (layout, step)
            assert record[6:8] == record[2:4], layout
