"""Parameters, gradients and optimizer state leave the accelerator part by part, and nothing is different afterwards."""

from __future__ import annotations

import itertools
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.config.schema import MegatronConfig, MegatronOptimizerConfig
from mega_rl.config.schema.engine import DdpConfig
from mega_rl.engines.offload import PartsOffload, StorageOffload
from mega_rl.errors import RunError
from mega_rl.protocols import PARTS
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import exported, make_config, own_rows, running_engine
from tests.helpers.models import random_experience, write_tiny_checkpoint
from tests.unit_tests.distributed.engine_cases import losses

HOST = torch.device("cpu")
EVERY_SUBSET = [subset for size in (1, 2, 3) for subset in itertools.combinations(PARTS, size)]
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "parameters gathered late": {"ddp": DdpConfig(overlap_param_gather=True, overlap_grad_reduce=True)},
    "experts": {"model": "routed", "ep": 2},
    "state on the host": {"dtype": "bf16", "optimizer": MegatronOptimizerConfig(cpu_offload=0.5)},
}


def subsets_of(case: str) -> list[tuple[str, ...]]:
    """Which parts are taken off together, one after the other."""
    return EVERY_SUBSET if case == "fp32" else [("optimizer",), ("gradients",), PARTS]


def run_case(
    root: Path, *, subsets: list[tuple[str, ...]], stay: bool, model: str = "dense", ep: int = 1, **settings: Any
) -> dict[str, Any]:
    """A step for each subset of parts, then these parts are taken off, looked at, and brought back (unless `stay`)."""
    config = make_config(root / model, megatron=MegatronConfig(ep=ep), **settings)
    actual: dict[str, Any] = {"norms": [], "freed": [], "sizes": [], "left": [], "still there": [], "back": []}
    with running_engine(config) as engine:
        rows = own_rows(random_experience(), engine)
        for subset in subsets:
            actual["norms"].append(engine.train_minibatch(rows, losses("lm"), lr=1e-2)["grad_norm"])
            if stay:
                continue
            before = sizes(engine)
            actual["freed"].append(engine.offload(subset))
            actual["sizes"].append(sum(before[part] for part in subset))
            after = sizes(engine)
            actual["left"].append(sum(after[part] for part in subset))
            actual["still there"].append(all(after[part] == before[part] for part in PARTS if part not in subset))
            if "parameters" not in subset:
                engine.forward(rows)
            engine.onload(subset)
            actual["back"].append(sizes(engine) == before)
        actual["weights"] = exported(engine)
        actual["logprobs"] = engine.forward(rows).logprobs
    return actual


def sizes(engine: Any) -> dict[str, int]:
    """Bytes of the storages of each part on the engine's device; what parts share counts for the first."""
    from mega_rl.ddp.access import gradient_tensors, main_gradients, optimizer_tensors, parameter_tensors
    from mega_rl.ddp.optimizer import torch_optimizers

    optimizers = torch_optimizers(engine.optimizer)
    tensors = {
        "parameters": list(parameter_tensors(engine.chunks)),
        "gradients": list(chain(gradient_tensors(engine.chunks), *map(main_gradients, optimizers))),
        "optimizer": [tensor for optimizer in optimizers for tensor in optimizer_tensors(optimizer)],
    }
    taken: set[int] = set()
    counted = {}
    for part, members in tensors.items():
        here = [t.untyped_storage() for t in members if t.device.type == engine.device.type]
        storages = {storage._cdata: storage.nbytes() for storage in here}
        counted[part] = sum(size for key, size in storages.items() if key not in taken)
        taken |= storages.keys()
    return counted


def expert_buffers(root: Path) -> list[int]:
    """Bytes that the experts' own buffers keep while everything is off."""
    config = make_config(root / "routed", megatron=MegatronConfig(ep=2))
    with running_engine(config) as engine:
        engine.offload()
        buffers = [buffer for chunk in engine.chunks for buffer in chunk.expert_parallel_buffers]
        assert buffers
        return [t.untyped_storage().nbytes() for b in buffers for t in (b.grad_data, b.param_data) if t is not None]


def restored_case(root: Path) -> dict[str, bool]:
    """Whether a detour keeps what a resume writes, into the device's memory or into the host's; and zero gradients."""
    config = make_config(root / "dense", dtype="bf16")
    actual = {}
    with running_engine(config) as engine:
        rows = own_rows(random_experience(), engine)
        for place in ("device", "host"):
            engine.train_minibatch(rows, losses("lm"), lr=1e-2)
            live = engine.state()
            engine.offload()
            state = engine.on_host(live) if place == "host" else live
            if place == "device":
                engine.onload()
            for number, piece in enumerate(state.pieces):
                piece.data.fill_(number % 7)
            if place == "host":
                engine.onload()
            engine.resume_from(state.numbers)
            engine.offload()
            engine.onload()
            actual[place] = all(bool((p.data == number % 7).all()) for number, p in enumerate(engine.state().pieces))
        buffers = [buffer.grad_data for chunk in engine.chunks for buffer in chunk.buffers]
        actual["gradients are zero"] = bool(buffers) and not any(bool(buffer.any()) for buffer in buffers)
    return actual


def run_all(rank: int, root: str) -> dict[str, Any]:
    """Every case with and without the detour."""
    actual: dict[str, Any] = {}
    for name, case in CASES.items():
        actual[name] = {
            "stayed": run_case(Path(root), subsets=subsets_of(name), stay=True, **case),
            "moved": run_case(Path(root), subsets=subsets_of(name), stay=False, **case),
        }
    return actual | {"experts' buffers": expert_buffers(Path(root)), "restored": restored_case(Path(root))}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found."""
    root: Path = tmp_path_factory.mktemp("models")
    write_tiny_checkpoint(root / "dense", family="qwen3", tied=True)
    write_tiny_checkpoint(root / "routed", family="qwen3_moe", tied=False)
    return run_ranks(2, run_all, str(root), timeout_s=240)


@pytest.mark.parametrize("case", list(CASES))
def test_the_chosen_parts_are_gone_and_the_others_are_not(ranks: list[dict[str, Any]], case: str) -> None:
    """The bytes returned are those of the parts' storages (message buffers may add to them), which are empty then."""
    for actual in (rank[case]["moved"] for rank in ranks):
        for subset, freed, size in zip(subsets_of(case), actual["freed"], actual["sizes"], strict=True):
            assert size > 0
            assert freed >= size if "gradients" in subset else freed == size, subset
        assert not any(actual["left"])
        assert all(actual["still there"])
        assert all(actual["back"])


@pytest.mark.parametrize("case", list(CASES))
def test_training_goes_on_to_the_bit(ranks: list[dict[str, Any]], case: str) -> None:
    """Norms, weights and log-probs of a run that never gave anything away."""
    for stayed, moved in ((rank[case]["stayed"], rank[case]["moved"]) for rank in ranks):
        assert moved["norms"] == stayed["norms"]
        assert torch.equal(moved["logprobs"], stayed["logprobs"])
        assert moved["weights"].keys() == stayed["weights"].keys()
        assert all(torch.equal(moved["weights"][name], stayed["weights"][name]) for name in stayed["weights"])


def test_a_resume_is_not_undone(ranks: list[dict[str, Any]]) -> None:
    """By a copy of earlier values on the host."""
    for rank in ranks:
        assert rank["restored"] == {"device": True, "host": True, "gradients are zero": True}


def test_buffers_of_experts_are_gone_too(ranks: list[dict[str, Any]]) -> None:
    """Their gradients and parameters have buffers of their own."""
    for rank in ranks:
        assert rank["experts' buffers"]
        assert not any(rank["experts' buffers"])


def test_parts_that_share_memory() -> None:
    """Shared memory is the first part's; taking a part off twice is an error, bringing back what is there is not."""
    whole, own = torch.arange(8.0), torch.ones(4)
    tensors = {"a": [whole], "b": [whole[2:4], own]}
    offload = PartsOffload(tensors, device=HOST)
    assert offload.offload(tensors, ["b"]) == 16
    assert (whole.untyped_storage().nbytes(), own.untyped_storage().nbytes()) == (32, 0)
    with pytest.raises(RuntimeError, match="called twice"):
        offload.offload(tensors, ["a", "b"])
    offload.onload(["a", "b"])
    assert own.tolist() == [1.0] * 4
    assert offload.offload(tensors, ["a"]) == 32
    offload.onload(["a"])
    assert tensors["b"][0].tolist() == [2.0, 3.0]


def test_what_never_changes_travels_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what does, each time: into the host's memory go the bytes that it has not got."""
    copied: list[int] = []
    copy = torch.UntypedStorage.copy_

    def counted(target: torch.UntypedStorage, source: torch.UntypedStorage, non_blocking: bool = False) -> Any:
        copied.append(target.data_ptr())
        return copy(target, source, non_blocking)

    monkeypatch.setattr(torch.UntypedStorage, "copy_", counted)
    weights = torch.arange(6.0)
    offload = StorageOffload(HOST)
    for changes in (False, False, True, False):
        if changes:
            weights += 1
            offload.changed()
        offload.offload([weights])
        place = offload.on_host(weights)
        assert place is not None
        offload.onload()
        copied.append(0)
        assert weights.tolist() == place.tolist()
    there = place.data_ptr()
    turns = " ".join(str(address == there) for address in copied if address).split()
    # Out and back, back, out and back, back.
    assert turns == ["True", "False", "False", "True", "False", "False"]


def test_a_later_storage_never_gets_the_values_of_an_earlier_one() -> None:
    """Even if it has the address that the earlier one had."""
    offload = StorageOffload(HOST)
    for value in range(50):
        tensor = torch.full((4,), float(value))
        offload.offload([tensor])
        offload.onload()
        assert tensor.tolist() == [float(value)] * 4
        del tensor
    assert sum(copy.host.nbytes() for copy in offload._copies.values()) == 16


def test_values_written_on_the_host_come_to_the_device() -> None:
    """As a resume writes them: into views of any shape and offset, of what is off alone."""
    weights, other = torch.arange(12.0), torch.zeros(2)
    piece = weights[4:10].view(2, 3)[:, 1:]
    offload = PartsOffload(["parameters", "optimizer"], device=HOST)
    offload.offload({"parameters": [weights], "optimizer": [other]}, ["parameters"])
    place = offload.on_host(piece)
    assert place.tolist() == [[5.0, 6.0], [8.0, 9.0]]
    place.fill_(-1.0)
    assert offload.on_host(other) is other
    offload.onload(["parameters"])
    assert weights.tolist() == [0, 1, 2, 3, 4, -1, -1, 7, -1, -1, 10, 11]
    assert offload.on_host(piece) is piece


def test_a_host_without_memory_offloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mega_rl.engines.offload.mmap.mmap", refuse)
    weights, offload = torch.arange(3.0), StorageOffload(HOST)
    with pytest.raises(RunError, match=r"the host has no 0\.0 GB for a model's state .* engine.resident_roles=all"):
        offload.offload([weights])
    assert weights.tolist() == [0.0, 1.0, 2.0]
    assert not offload.is_off
