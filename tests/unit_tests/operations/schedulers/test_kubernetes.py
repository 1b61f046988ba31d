from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mega_rl.cli.app import main
from mega_rl.errors import UserError
from mega_rl.operations.schedulers.kubernetes import JobSetRun, check, parse_mount
from mega_rl.operations.schedulers.options import RecipeFacts

ROOT = Path(__file__).parents[4]
MODELS = ROOT / ".venv" / "kubernetes"
FACTS = RecipeFacts(
    recipe="r.yaml", text="trainer:\n  steps: 3\n", overrides=["model.path=/runs/$(HOME)"], run_dir="/runs/a",
    resume="auto", device="cuda", saves=True,
)  # fmt: skip
RUN = JobSetRun(name="gsm8k", image="registry/mega_rl:0.1", nodes=4, mount=["pvc:runs:/runs", "host:/data:/data"])
EVERYTHING = replace(RUN, rdma=["rdma/hca=8"], env=["NCCL_DEBUG=INFO"], secret=["wandb"])


def test_runs_that_cannot_work_are_refused(changes: dict, message: str) -> None:
    assert check(RUN, FACTS) == []
    (problem,) = check(replace(RUN, **changes), FACTS)
    assert message in problem
    assert "begin anew" in check(RUN, replace(FACTS, resume="never"))[0]


@pytest.mark.parametrize(
    "text", ["runs:/runs", "pvc:runs", "pvc::/runs", "host:data:/data", "pvc:runs:runs", "host:/a:/b:/c"]
)
def test_mounts_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--mount="):
        parse_mount(text)


def test_command_prints_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--mount=pvc:runs:/runs", *SETTINGS]) == 0
    kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == ["ConfigMap", "NetworkPolicy", "JobSet"]
    assert documents(RUN)["ConfigMap"]["data"] == {"recipe.yaml": FACTS.text}
    policy = documents(RUN)["NetworkPolicy"]["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    assert container_of(RUN)["args"][-1] == "model.path=/runs/$$(HOME)"  # Kubernetes makes $( of $$(


def test_command_names_every_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, *SETTINGS, "engine.megatron.tp=3"]) == 2
    output = capsys.readouterr()
    assert "trainer.run_dir=/runs/a" in output.err
    assert "tp" in output.err
    assert output.out == ""
