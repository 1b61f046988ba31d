"""`mega-rl audit`: a run's own records pass, resumed or not, and each planted fault is named with step and ticket."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mega_rl.cli.app import main
from mega_rl.config.schema import Config
from mega_rl.errors import UserError
from mega_rl.tracking.records.reader import RECORD_FILE
from mega_rl.tracking.report.content import AUDIT
from mega_rl.verify.audit import Audit, audit_records, lines_of, read_steps
from mega_rl.verify.audit_run import audit_run
from tests.helpers.distributed import run_ranks
from tests.helpers.engines import replaced
from tests.unit_tests.distributed.test_layout_invariance import run_config, write_inputs
from tests.unit_tests.trainer.dynamic_sampling_on_ranks import REWARD

pytestmark = pytest.mark.timeout(600)

PROMPTS, SAVED = 4, 2
# (name, steps at the end): the second continues "dynamic", which died after its checkpoint of step 2 and one more step.
RUNS = (("plain", 4), ("dynamic", 3), ("dynamic", 5))


def config_of(folder: Path, name: str, steps: int) -> Config:
    """GRPO with a high learning rate, so that versions of the weights differ."""
    config = run_config(folder, "1", "grpo")
    config = replaced(config, "optim", lr=1e-2)
    config = replaced(config, "metrics.records", interval=1, weights=name == "plain")
    config = replaced(config, "checkpoint", save_interval=SAVED, save_final=False)
    if name == "dynamic":
        config = replaced(config, "reward", function=f"{folder / 'hopeless.py'}:half_are_hopeless")
        config = replaced(config, "rollout.dynamic_sampling", max_generations=5, prompts=3)
    sizes = {"steps": steps, "prompts_per_step": PROMPTS, "minibatch_size": PROMPTS}
    return replaced(config, "trainer", run_dir=str(folder / name), **sizes)


def train_runs(rank: int, folder: str) -> None:
    from mega_rl.parallel.accelerator import prepare

    accelerator = prepare("auto")
    from mega_rl.trainer.assemble import build_trainer, session

    for name, steps in RUNS:
        config = config_of(Path(folder), name, steps)
        with session(config, accelerator) as groups, ExitStack() as resources:
            build_trainer(config, accelerator, groups, stop_requested=lambda: False, resources=resources).fit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = write_inputs(tmp_path_factory.mktemp("inputs"))
    (inputs / "hopeless.py").write_text(REWARD, encoding="utf-8")
    run_ranks(1, train_runs, str(inputs), timeout_s=300)
    return inputs


@pytest.mark.parametrize(("name", "steps"), [("plain", 4), ("dynamic", 5)])
def test_an_own_run_passes(folder: Path, tmp_path: Path, name: str, steps: int) -> None:
    audit = audit_run(folder / name, tmp_path, versions=9)
    assert audit.breaches == []
    assert audit.steps == list(range(1, steps + 1))
    assert audit.checked["rewards"] == audit.checked["versions"] == steps * PROMPTS * 4
    if name == "plain":  # each step's weights are in its record; else only those of the checkpoint and of the begin
        assert audit.checked["logprobs"] == audit.checked["stale"]
        assert audit.unchecked == []
    else:
        assert 0 < audit.checked["logprobs"] < audit.checked["stale"]
        assert [one.reason for one in audit.bias if one.groups] == ["equal", "surplus"]


def test_the_command_writes_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(folder / "dynamic"), "--versions", "0"]) == 0
    page = capsys.readouterr().out
    assert "no breach" in page
    assert json.loads((folder / "dynamic" / AUDIT).read_text())["page"] == page.splitlines()
    assert len(page.splitlines()) < 60


def edit(run: Path, step: int, *, of: dict[str, Any] | None = None, **columns: Callable[[Any], Any]) -> None:
    """Change a record: fields of its description, and tensors by functions."""
    folder = run / "records" / f"step_{step:06d}"
    described = json.loads((folder / RECORD_FILE).read_text())
    described |= of or {}
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors |= {name: np.ascontiguousarray(change(dict(tensors))) for name, change in columns.items()}
    save_file(tensors, file)
    for shard in described["files"]:
        if shard["file"] == file.name:
            data, rows = file.read_bytes(), len(tensors["lengths"])
            shard |= {"nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "rows": rows}
    described["tensors"] = (
        described["tensors"] | {"token_versions": "I64"} if "token_versions" in tensors else described["tensors"]
    )
    (folder / RECORD_FILE).write_text(json.dumps(described))


def described(run: Path, step: int) -> dict[str, Any]:
    return json.loads((run / "records" / f"step_{step:06d}" / RECORD_FILE).read_text())  # type: ignore[no-any-return]


def ahead(run: Path, steps: int) -> None:
    """Let the config of all records allow tokens to be `steps` versions old."""
    for step in range(1, 5):
        config = described(run, step)["config"]
        config["trainer"]["async_steps"] = steps
        edit(run, step, of={"config": config})


def loader_restored_ahead(run: Path) -> None:
    for step in (3, 4):  # two prompts were drawn and not trained when the run died
        edit(run, step, of={"tickets": [ticket + 2 for ticket in described(run, step)["tickets"]]})


def groups_dropped(run: Path) -> None:
    """Of one group the rows are gone, and its ticket with them."""
    tickets, rows = described(run, 2)["tickets"], described(run, 2)["data_rows"]
    for name in load_file(next((run / "records/step_000002").glob("*.safetensors"))):
        edit(run, 2, **{name: lambda own, name=name: own[name][: 3 * 4]})
    edit(run, 2, of={"tickets": tickets[:3], "data_rows": rows[:3], "prompts": 3})


def group_split(run: Path) -> None:
    """One sample of a group trains a step later, in a group that has another one's ticket."""
    tickets = described(run, 3)["tickets"]
    tickets[0] = described(run, 2)["tickets"][3]
    edit(run, 2, sample_index=lambda own: np.where(np.arange(16) == 15, 4, own["sample_index"]))
    edit(run, 3, of={"tickets": tickets})


def version_of_row(run: Path) -> None:
    """A response went on under the next weights, and all its tokens are called of its first version."""
    ahead(run, 1)
    edit(run, 3, weight_version=lambda own: own["weight_version"] - (np.arange(16) == 5))


def newer_than_trainer(run: Path) -> None:
    edit(run, 2, token_versions=lambda own: own["loss_mask"] * (2 + (np.arange(16) == 3)[:, None]))


def age_from_newest(run: Path) -> None:
    """A row's first token is two versions old and its last one: the trainer has looked at the last."""
    ahead(run, 1)

    def versions(own: Any) -> Any:
        mask, first = own["loss_mask"], own["loss_mask"] & (own["loss_mask"].cumsum(axis=1) == 1)
        return np.where(mask, 4, 0) - 2 * (first & (np.arange(16) == 6)[:, None])

    edit(run, 4, token_versions=versions, weight_version=lambda own: 4 - 2 * (np.arange(16) == 6))


def row_called_newer(run: Path) -> None:
    ahead(run, 2)
    edit(run, 4, token_versions=lambda own: np.where(own["loss_mask"], 4 - (np.arange(16) == 6)[:, None], 0))


def ticket_twice(run: Path) -> None:
    edit(run, 3, of={name: described(run, 2)[name] for name in ("tickets", "data_rows")})


def expired_trained(run: Path) -> None:
    edit(run, 3, of={"dropped": [[described(run, 2)["tickets"][1], "expired", 3.0, 0.5]]})


def other_reward(run: Path) -> None:
    edit(run, 2, rewards=lambda own: np.roll(own["rewards"], 4))


def other_prompt(run: Path) -> None:
    rows = described(run, 2)["data_rows"]
    edit(run, 2, of={"data_rows": [rows[1], rows[0], *rows[2:]]})


def answers_other_prompt(run: Path) -> None:
    edit(run, 2, tokens=lambda own: np.roll(own["tokens"], 4, axis=0))


def trains_read_token(run: Path) -> None:
    edit(run, 2, train_mask=lambda own: own["train_mask"] | (np.arange(own["tokens"].shape[1]) == 0))


def trains_shared_twice(run: Path) -> None:
    """A second row of a sample trains the turn that both have."""
    edit(run, 2, sample_index=lambda own: np.where(np.arange(16) == 1, 0, own["sample_index"]),
         branch=lambda own: (np.arange(16) == 1).astype(np.int64),
         turn=lambda own: own["loss_mask"].astype(np.int16),
         tokens=lambda own: own["tokens"][[0, 0, *range(2, 16)]],
         train_mask=lambda own: own["loss_mask"][[0, 0, *range(2, 16)]],
         loss_mask=lambda own: own["loss_mask"][[0, 0, *range(2, 16)]])  # fmt: skip
    content = described(run, 2)
    edit(run, 2, of={"tensors": content["tensors"] | {"branch": "I64", "turn": "I16"}})


def published_twice(run: Path) -> None:
    """Each step but the last publishes within itself, too: step s begins with version 2 s - 1."""
    ahead(run, 1)
    for step in range(1, 5):
        edit(run, step, of={"weight_version": 2 * step - 1, "begun": [max(2 * step - 3, 0), 2 * step - 1]},
             weight_version=lambda own: 2 * own["weight_version"] - 1)  # fmt: skip


def of_row(step: int, version: int, row: int = 6) -> Callable[[Any], Any]:
    """Return the versions of rows with one that weights from within a step sampled."""
    return lambda own: np.where(np.arange(len(own["lengths"])) == row, version, 2 * step - 1)


def older_than_steps(run: Path) -> None:
    """Of weights from within the step before the last one that may be: no step began with them."""
    published_twice(run)
    edit(run, 4, weight_version=of_row(4, 4))


def version_of_other_step(run: Path) -> None:
    """Step 4 takes version 4 for the one that step 3 began with."""
    published_twice(run)
    edit(run, 4, of={"begun": [4, 7]}, weight_version=of_row(4, 5))


def weights_fall_back(run: Path) -> None:
    edit(run, 4, of={"weight_version": 1}, weight_version=lambda own: own["weight_version"] * 0 + 1)


def wrong_logprob(run: Path) -> None:
    edit(run, 2, rollout_logprobs=lambda own: own["rollout_logprobs"] - 0.01 * (np.arange(16) == 9)[:, None])


def marked_kept(run: Path) -> None:
    """A wrong log-prob in a row that is called kept, by a run that interrupts all requests."""
    wrong_logprob(run)
    mark_kept(run, 9)


def mark_kept(run: Path, row: int) -> None:
    edit(run, 2, kept=lambda own: own["loss_mask"] & (np.arange(16) == row)[:, None])
    edit(run, 2, of={"tensors": described(run, 2)["tensors"] | {"kept": "BOOL"}})


# fault -> rule that names it, step, place of the ticket in its step; all of the plain run's records.
FAULTS = {
    loader_restored_ahead: ("skipped", 3, 8),
    groups_dropped: ("skipped", 3, 7),
    group_split: ("once", 3, 7),
    version_of_row: ("logprobs", 3, 9),
    newer_than_trainer: ("stale", 2, 4),
    age_from_newest: ("stale", 4, 13),
    row_called_newer: ("versions", 4, 13),
    ticket_twice: ("once", 3, 4),
    expired_trained: ("once", 3, 5),
    other_reward: ("rewards", 2, None),
    other_prompt: ("order", 2, 4),
    answers_other_prompt: ("order", 2, 4),
    trains_read_token: ("tokens", 2, 4),
    trains_shared_twice: ("tokens", 2, 4),
    weights_fall_back: ("versions", 4, 12),
    older_than_steps: ("stale", 4, 13),
    version_of_other_step: ("versions", 4, 12),
    wrong_logprob: ("logprobs", 2, 6),
    marked_kept: ("logprobs", 2, 6),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named(folder: Path, tmp_path: Path, fault: Callable[[Path], None]) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "plain", run)
    fault(run)
    rule, step, ticket = FAULTS[fault]
    if rule in ("once", "skipped", "stale", "tokens", "versions"):
        audit = audit_records(read_steps(run))
    else:
        audit = audit_run(run, tmp_path / "work", versions=9)
    named = {(one.rule, one.step, one.ticket) for one in audit.breaches}
    assert any(one[:2] == (rule, step) and ticket in (None, one[2]) for one in named), named
    assert audit.breaches[0].what in "\n".join(lines_of(audit, "run"))


@pytest.mark.parametrize("recorded", [True, False])
def test_ages_are_those_of_steps(folder: Path, tmp_path: Path, recorded: bool) -> None:
    """One step old: weights from within the step before, and those it began with; with its record and without."""
    run = tmp_path / "run"
    shutil.copytree(folder / "plain", run)
    published_twice(run)
    for step in (1, 2, 3) if not recorded else ():
        shutil.rmtree(run / "records" / f"step_{step:06d}")
    for version in (5, 6, 7):
        edit(run, 4, weight_version=of_row(4, version))
        assert audit_records(read_steps(run)).breaches == []
    for version, rule in ((4, "is of version 4, and step 3 began with 5"), (8, "and the trainer had 7")):
        edit(run, 4, weight_version=of_row(4, version))
        assert [one.what.endswith(rule) for one in audit_records(read_steps(run)).breaches] == [True]


@pytest.mark.parametrize("row", [9, 8])
def test_only_kept_tokens_are_exempt(folder: Path, tmp_path: Path, row: int) -> None:
    """Of a run that keeps requests; row 9 has other log-probs than its version's weights give."""
    run = tmp_path / "run"
    shutil.copytree(folder / "plain", run)
    marked_kept(run)
    mark_kept(run, row)
    config = described(run, 1)["config"]
    config["rollout"]["sglang"]["sync"]["in_flight"] = "keep"
    edit(run, 2, of={"config": config})
    audit = audit_run(run, tmp_path / "work", versions=9)
    assert [(one.rule, one.step, one.ticket) for one in audit.breaches] == [("logprobs", 2, 6)] * (row != 9)
    (unchecked,) = audit.unchecked
    mask = load_file(next((run / "records/step_000002").glob("*.safetensors")))["loss_mask"]
    assert unchecked.startswith(f"logprobs: {int(mask[row].sum())} tokens sampled on KV cache that rollout.sglang.sync")
    assert audit.checked["logprobs"] == audit.checked["stale"] - int(mask[row].sum())


def test_a_split_group_lacks_samples(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "plain", run)
    group_split(run)
    assert ("complete", 2, 7) in {(one.rule, one.step, one.ticket) for one in audit_records(read_steps(run)).breaches}


def test_a_group_that_was_sampled_again_trains(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "plain", run)
    edit(run, 2, of={"dropped": [[described(run, 3)["tickets"][1], "redrawn", 3.0, 0.5]]})
    audit = audit_records(read_steps(run))
    assert not audit.breaches
    assert [(one.reason, one.groups) for one in audit.bias] == [("redrawn", 1)]


def test_gaps_of_records_are_not_breaches(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder / "plain", run)
    for step in (1, 3):
        shutil.rmtree(run / "records" / f"step_{step:06d}")
    audit = audit_records(read_steps(run))
    assert audit.breaches == []
    assert "2 of 4 steps have no record" in audit.unchecked[0]


def test_a_run_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.records\.interval=1"):
        read_steps(tmp_path)
    assert main(["audit", str(tmp_path / "none")]) == 2


def test_bias_is_the_difference_of_means(folder: Path) -> None:
    """Against means of groups by loops."""
    steps = read_steps(folder / "dynamic")
    trained, dropped = [], []
    for step in steps:
        tensors = step.tensors
        for place in range(PROMPTS):
            rows = np.flatnonzero(tensors["prompt_index"] == place)
            trained.append(np.mean([tensors["loss_mask"][row].sum() for row in rows]))
        dropped += [group.tokens for group in step.description.dropped if group.reason == "equal"]
    audit: Audit = audit_records(steps)
    bias = next(one for one in audit.bias if one.reason == "equal")
    spread = np.var(trained, ddof=1) / len(trained) + np.var(dropped, ddof=1) / len(dropped)
    assert bias.tokens == pytest.approx(np.mean(dropped) - np.mean(trained))
    assert bias.tokens_within == pytest.approx(1.96 * spread**0.5)
    assert replace(bias, groups=len(dropped)) == bias
