from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mega_rl.cli.app import main
from mega_rl.operations.schedulers import RecipeFacts
from mega_rl.operations.schedulers.kubernetes import JobSetRun, check, render

ROOT = Path(__file__).parents[4]
MODELS = ROOT / ".venv" / "kubernetes"
FACTS = RecipeFacts(
    recipe="r.yaml", text="trainer:\n  steps: 3\n", overrides=["model.path=/runs/$(HOME)"], run_dir="/runs/a",
    resume="auto", device="cuda", saves=True,
)  # fmt: skip
RUN = JobSetRun(
    name="gsm8k", image="registry/mega_rl:0.1", nodes=4, nproc_per_node=8, mount=["pvc:runs:/runs", "host:/data:/data"]
)
EVERYTHING = replace(RUN, rdma=["rdma/hca=8"], env=["NCCL_DEBUG=INFO"], secret=["wandb"])
ARGUMENTS = ["launch", "kubernetes", "quickstart", "--nodes=2", "--nproc-per-node=1", "--image=r/mega_rl:0.1"]
SETTINGS = ["trainer.run_dir=/runs/a", "checkpoint.resume=auto"]


def documents(run: JobSetRun) -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all(render(run, FACTS))}


def job_of(run: JobSetRun) -> dict:
    return documents(run)["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]


def container_of(run: JobSetRun) -> dict:
    return job_of(run)["template"]["spec"]["containers"][0]


@pytest.mark.skipif(not MODELS.is_dir(), reason="the models of JobSet are not there: make kubernetes")
@pytest.mark.parametrize("run", [RUN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("planted", [False, True])
def test_schema_knows_every_field(run: JobSetRun, planted: bool) -> None:
    text = render(run, FACTS).replace("backoffLimit:", "backofLimit:") if planted else render(run, FACTS)
    program = [sys.executable, "-m", "tests.clusters.jobset_schema", str(MODELS)]
    checked = subprocess.run(program, input=text, capture_output=True, text=True, cwd=ROOT, check=True)
    assert ("backofLimit" in checked.stdout) == planted
    assert checked.stdout.strip() == "" or planted, checked.stdout


def test_pods_get_their_number_and_the_first_address() -> None:
    arguments = container_of(RUN)["args"]
    options = dict(zip(arguments[1:-1:2], arguments[2:-1:2], strict=True))
    assert options["--nnodes"] == "4"
    assert options["--node-rank"] == "$(JOB_COMPLETION_INDEX)"
    assert options["--master-addr"] == "gsm8k-node-0-0.gsm8k"
    assert documents(RUN)["JobSet"]["spec"]["network"]["subdomain"] == "gsm8k"
    assert job_of(RUN)["completionMode"] == "Indexed"
    assert job_of(RUN)["completions"] == job_of(RUN)["parallelism"] == 4


def test_mistake_fails_the_run_and_disruptions_do_not() -> None:
    fail, disruption, stopped = job_of(RUN)["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [2])
    assert (disruption["action"], disruption["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [143])
    assert {rule["onExitCodes"]["containerName"] for rule in (fail, stopped)} == {container_of(RUN)["name"]}
    policy = documents(RUN)["JobSet"]["spec"]["failurePolicy"]
    assert policy["rules"] == [
        {"name": "UserMistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    assert policy["maxRestarts"] == 3


def test_key_is_in_no_manifest() -> None:
    key = next(entry for entry in container_of(RUN)["env"] if entry["name"] == "MEGA_RL_LAUNCH_KEY")
    assert key["valueFrom"]["secretKeyRef"] == {"name": "gsm8k", "key": "launch-key"}
    assert "kubectl create secret generic gsm8k --from-literal=launch-key=" in render(RUN, FACTS)
    assert "Secret" not in documents(RUN)


def test_pods_are_restricted_and_only_rdma_locks_memory() -> None:
    pod = job_of(RUN)["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container_of(RUN)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container_of(EVERYTHING)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container_of(EVERYTHING)["resources"]["limits"]["rdma/hca"] == "8"
    assert not pod["automountServiceAccountToken"]
    assert pod["terminationGracePeriodSeconds"] == 600


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Run_1"}, "--name=Run_1: needs at most 42 lower-case letters"),
        ({"name": "a" * 60}, "needs at most 42 lower-case letters"),
        ({"rdma": ["rdma/hca=many"]}, "--rdma=rdma/hca=many: needs a device and a number"),
        ({"image": "mega_rl"}, "name a tag or a digest"),
        ({"mount": []}, "trainer.run_dir=/runs/a: is lost with its pod"),
        ({"mount": ["pvc:a:/run"]}, "trainer.run_dir=/runs/a: is lost with its pod"),
    ],
)
def test_runs_that_cannot_work_are_refused(changes: dict, message: str) -> None:
    assert check(RUN, FACTS) == []
    (problem,) = check(replace(RUN, **changes), FACTS)
    assert message in problem
    assert "begin anew" in check(RUN, replace(FACTS, resume="never"))[0]


def test_command_prints_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--mount=pvc:runs:/runs", *SETTINGS]) == 0
    kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == ["ConfigMap", "NetworkPolicy", "JobSet"]
    assert documents(RUN)["ConfigMap"]["data"] == {"recipe.yaml": FACTS.text}
    policy = documents(RUN)["NetworkPolicy"]["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    assert container_of(RUN)["args"][-1] == "model.path=/runs/$$(HOME)"  # Kubernetes makes $( of $$(
