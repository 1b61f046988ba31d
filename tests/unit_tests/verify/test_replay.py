"""`mega-rl replay`: recorded steps agree with what other layouts and engines compute, and faults are named."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_rl.cli.verify import in_words
from mega_rl.config.keys import flat
from mega_rl.converters.safetensors.header import read_entries
from mega_rl.errors import UserError
from mega_rl.tracking.records.reader import MODEL_OUTPUTS, RECORD_FILE, Record, read_record
from mega_rl.verify.layouts import parse
from mega_rl.verify.replay import ATOL, Difference, ReplayPlan, prepare, result_of
from mega_rl.verify.rl.faults import ALGORITHMS, algorithm_run
from mega_rl.verify.rl.inputs import with_layout
from mega_rl.verify.rl.run import ARCHITECTURE, write_inputs
from tests.helpers.distributed import run_ranks
from tests.helpers.selection import FULL
from tests.unit_tests.verify.replay_on_ranks import record_runs, replay_plans

pytestmark = pytest.mark.timeout(900)  # the first test pays for the launches of all

LAYOUTS = ("tp2pp2", "fsdp2")
STEPS = (1, 2)
# `make test` takes two: all that a step may have, and one update of a group, whose old log-probs are the sampler's.
CORRECTED = {"algorithm.correction": "tis", "algorithm.correction.cap": 1.2}
USUAL: dict[str, dict[str, object]] = {
    "ppo": {**ALGORITHMS["ppo"], **CORRECTED, "metrics.records.entropy": True},
    "one update": {**ALGORITHMS["grpo"], "trainer.minibatch_size": 8},
    "masked": {**ALGORITHMS["grpo"], "reward.weights": {"early": 1.0, "late": 0.5}},
}
MORE: dict[str, dict[str, object]] = {
    "bf16": {**ALGORITHMS["ppo"], "model.dtype": "bf16", "metrics.records.entropy": True},
    "mixture": {**ALGORITHMS["grpo"], "metrics.records.entropy": True},
}
CASES = ({name: dict(settings) for name, settings in ALGORITHMS.items()} | MORE if FULL else {}) | USUAL
FAULTS = {
    "values one token early": ("1", "values"),
    "advantages one token early": ("1", "advantages"),
    "attention of half the scale": ("tp2pp2", "old_logprobs"),
}


@dataclass(frozen=True)
class Replays:
    """What was recorded, and how far each replay is from it."""

    runs: dict[str, Path]
    records: dict[str, Record]  # by "run step"
    plans: dict[tuple[str, int, str], ReplayPlan]
    differences: dict[tuple[str, int, str], list[Difference]]
    faulty: dict[str, list[Difference]]


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Replays:
    root = tmp_path_factory.mktemp("replays")
    runs = {name: root / name.replace(" ", "_") for name in CASES}
    # Where weights are not in the record, they come from the checkpoint of the step before.
    settings = [(_settings(name, runs[name], with_weights=name != "ppo"), name == "masked") for name in CASES]
    run_ranks(2, record_runs, settings, timeout_s=600.0)
    records, plans = {}, {}
    for name, run in runs.items():
        for step in STEPS:
            work = root / f"work-{run.name}-{step}"
            records[f"{name} {step}"], own = prepare(record_of(run, step), ",".join(LAYOUTS), work, timeout_s=120.0)
            plans |= {(name, step, plan.layout.name): plan for plan in own}
    for layout, ranks in zip(LAYOUTS, (4, 2), strict=True):
        _replay([plan for (_, _, of), plan in plans.items() if of == layout], ranks)
    differences = {key: result_of(records[f"{key[0]} {key[1]}"], plan) for key, plan in plans.items()}
    return Replays(runs, records, plans, differences, _faulty(root, runs["ppo"]))


def _settings(name: str, folder: Path, *, with_weights: bool) -> dict[str, Any]:
    """Return the settings of a run on two replicas that records its steps."""
    folder.mkdir()
    kept: dict[str, object] = {"metrics.records.weights": True} if with_weights else {"checkpoint.save_interval": 1}
    settings = {**CASES[name], "trainer.steps": max(STEPS), "metrics.records.interval": 1, **kept}
    run = algorithm_run(settings, source=_mixture(folder) if name == "mixture" else None)
    config, _ = write_inputs(run, folder, multiple=2)
    return flat(with_layout(config, parse("dp2"), run_dir=folder / "run"))


def _mixture(folder: Path) -> Path:
    """Return the folder of a mixture's config.json."""
    place = folder / "mixture"
    place.mkdir()
    config = {
        **ARCHITECTURE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config))
    return place


def record_of(run: Path, step: int) -> Path:
    return run / "run" / "records" / f"step_{step:06d}"


def _replay(plans: list[ReplayPlan], ranks: int, fault: str = "") -> None:
    for plan in plans:
        Path(plan.target).mkdir(parents=True)
    run_ranks(ranks, replay_plans, plans, fault, timeout_s=600.0)


def _faulty(root: Path, run: Path) -> dict[str, list[Difference]]:
    results = {}
    for number, (fault, (layout, _)) in enumerate(FAULTS.items()):
        work = root / f"fault-{number}"
        record, (plan,) = prepare(record_of(run, 2), layout, work, timeout_s=120.0)
        _replay([plan], plan.layout.ranks, fault)
        results[fault] = result_of(record, plan)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_agrees_with_its_record(replays: Replays, name: str, layout: str) -> None:
    for step in STEPS:
        differences = replays.differences[name, step, layout]
        assert {"advantages", "loss_weights"} < {difference.tensor for difference in differences}
        assert [in_words(difference) for difference in differences if not difference.good] == []
        # Of bf16 only what stands behind the models is exact: it has the recorded numbers.
        exact = [one for one in differences if name != "bf16" or one.tensor not in MODEL_OUTPUTS]
        assert max(difference.largest for difference in exact) < ATOL


def test_rows_without_reward_train_nothing(replays: Replays) -> None:
    """NaN in the record and null in its rows, for the parts, too; no advantage and no weight."""
    record = replays.records["masked 2"]
    rewards, parts = record.tensors["rewards"], record.tensors["reward_parts"]
    masked = np.isnan(rewards)
    assert 0 < masked.sum() < len(masked)
    assert (np.isnan(parts).all(axis=1) == masked).all()
    assert [row["reward"] is None for row in record.rows] == masked.tolist()
    assert record.tensors["loss_mask"][masked].any()
    for name in ("train_mask", "advantages", "loss_weights", "token_weights"):
        assert not record.tensors[name][masked].any(), name
        assert record.tensors[name][~masked].any(), name


def test_actor_critic_step_compares_every_tensor(replays: Replays) -> None:
    one_update = {difference.tensor for difference in replays.differences["one update", 2, "tp2pp2"]}
    assert one_update > {"policy_logprobs", "entropy", "old_logprobs"}
    ppo = {difference.tensor for difference in replays.differences["ppo", 2, "tp2pp2"]}
    models, derived = {"entropy", "old_logprobs", "ref_logprobs", "values"}, {"kl_penalty", "advantages", "returns"}
    assert ppo > models | derived | {"correction_weights"}
    tensors = replays.records["ppo 2"].tensors
    assert all(len(np.unique(tensors[name])) > 30 for name in models | derived), "none is constant"
    assert (tensors["old_logprobs"] != tensors["ref_logprobs"]).any()


@pytest.mark.parametrize("fault", FAULTS)
def test_layout_fault_is_named_with_its_tensor(replays: Replays, fault: str) -> None:
    wrong = [difference for difference in replays.faulty[fault] if not difference.good]
    tensor = FAULTS[fault][1]
    assert wrong[0].tensor == tensor, [difference.tensor for difference in wrong]
    place = wrong[0].first
    assert place is not None
    assert place.token is not None
    record = replays.records["ppo 2"]
    assert record.tensors["loss_mask"][place.row, place.token]
    assert place.recorded == pytest.approx(float(record.tensors[tensor][place.row, place.token]))
    # Off the mask both are 0, and before the first token of the mask nothing can differ.
    assert place.text == record.rows[place.row]["token_texts"][place.token]
    # What stands behind a wrong tensor gets the recorded numbers: only the fault itself is named.
    assert {difference.tensor for difference in wrong} <= {tensor, "entropy", "ref_logprobs", "values"}


@pytest.mark.parametrize("tensor", ["old_logprobs", "values", "advantages"])
def test_changed_record_is_named_with_tensor_and_token(replays: Replays, tmp_path: Path, tensor: str) -> None:
    changed = tmp_path / "step_000002"
    shutil.copytree(replays.records["ppo 2"].folder, changed)
    row, token = _change(changed, tensor)
    plan = replays.plans["ppo", 2, LAYOUTS[0]]
    wrong = [difference for difference in result_of(read_record(changed), plan) if not difference.good]
    assert [(difference.tensor, difference.num_beyond) for difference in wrong] == [(tensor, 1)]
    place = wrong[0].first
    assert place is not None
    assert (place.prompt, place.sample, place.token) == (row["prompt_index"], row["sample_index"], token)
    assert f"{tensor} differs first at prompt {row['prompt_index']}, sample {row['sample_index']}" in in_words(wrong[0])
    assert f"token {token} {row['token_texts'][token]!r}" in in_words(wrong[0])


def _change(record: Path, tensor: str) -> tuple[dict[str, Any], int]:
    """Add 0.01 to a tensor at the last response token of the second replica's third row; return (row, token)."""
    path = record / "replica_00001.safetensors"
    entry = read_entries(path)[tensor]
    lengths = read_entries(path)["lengths"]
    data = bytearray(path.read_bytes())
    token = int(np.frombuffer(data, np.int64, lengths.shape[0], lengths.offset)[2]) - 1
    numbers = np.frombuffer(data, np.float32, int(np.prod(entry.shape)), entry.offset).reshape(entry.shape)
    numbers[2, token] += 0.01
    path.write_bytes(data)
    described = json.loads((record / RECORD_FILE).read_text())
    for file in described["files"]:
        if file["file"] == path.name:
            file["sha256"] = hashlib.sha256(data).hexdigest()
    (record / RECORD_FILE).write_text(json.dumps(described))
    lines = path.with_suffix(".jsonl").read_text().splitlines()
    return json.loads(lines[2]), token


def test_a_record_tells_what_computed_it(replays: Replays) -> None:
    record = replays.records["ppo 2"]
    description = record.description
    assert (description.step, description.steps_before, description.prompts) == (2, 1, 8)
    assert (description.world_size, description.dtype, description.device) == (2, "fp32", "cpu")
    assert {"mega_rl", "torch", "megatron-core"} <= set(description.versions)
    assert description.config["algorithm"]["kl"]["coef"] == description.kl_coef == 0.05
    keys = list(zip(record.tensors["prompt_index"].tolist(), record.tensors["sample_index"].tolist(), strict=True))
    assert keys == [(prompt, sample) for prompt in range(8) for sample in range(4)]
    assert keys == [(row["prompt_index"], row["sample_index"]) for row in record.rows]
    for number, row in enumerate(record.rows):
        assert len(row["token_texts"]) == record.tensors["lengths"][number]
        assert row["reward"] == pytest.approx(float(record.tensors["rewards"][number]))


def test_mistakes_of_records_and_weights_are_one_line(replays: Replays, tmp_path: Path) -> None:
    alone = tmp_path / "run" / "records" / "step_000002"
    shutil.copytree(record_of(replays.runs["ppo"], 2), alone)
    with pytest.raises(UserError, match=r"weights after step 1.*give it by --weights") as failure:
        prepare(alone, "1", tmp_path / "work")
    assert "\n" not in str(failure.value)
    checkpoint = replays.runs["ppo"] / "run" / "checkpoints" / "step_000001"
    _, (given,) = prepare(alone, "1", tmp_path / "given", weights=checkpoint)
    assert set(given.models) == {"actor", "critic", "reference"}
    with pytest.raises(UserError, match="is of step 2, the record began after step 1"):
        prepare(alone, "1", tmp_path / "later", weights=checkpoint.with_name("step_000002"))
    for record, layout, words in ((alone, "tp16", "tp16 is not possible"), (tmp_path, "1", "is not a record")):
        with pytest.raises(UserError, match=words):
            prepare(record, layout, tmp_path / layout, weights=checkpoint)
