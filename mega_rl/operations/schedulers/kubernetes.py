"""A JobSet for Kubernetes: a pod for each node, the recipe as a ConfigMap, a NetworkPolicy.

Fields: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2 and
https://kubernetes.io/docs/concepts/workloads/controllers/job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import yaml

from mega_rl.errors import UserError
from mega_rl.operations.launcher.ranks import KEY
from mega_rl.operations.schedulers import ClusterRun, NodeRestarts, RecipeFacts, is_below, variables

TEMPLATE = Path(__file__).with_name("jobset.yaml")
KEY_FIELD = "launch-key"
LABEL = "jobset.sigs.k8s.io/jobset-name"  # the controller of JobSets sets it on every pod
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")  # with the pod's number it is a name of a host


def parse_mount(text: str) -> tuple[str, dict[str, object]]:
    """Return (path, volume) of `pvc:CLAIM:/path` or `host:/path/on/the/node:/path`. Raises UserError."""
    source, _, rest = text.partition(":")
    name, _, path = rest.partition(":")
    forms = {"pvc": r"[^:/]+:/[^:]*", "host": r"/[^:]+:/[^:]*"}
    if not re.fullmatch(forms.get(source, ""), rest):
        raise UserError(f"--mount={text}: is neither pvc:CLAIM:/PATH nor host:/PATH/ON/THE/NODE:/PATH")
    claim, folder = {"claimName": name}, {"path": name, "type": "Directory"}
    return path.rstrip("/") or "/", {"persistentVolumeClaim": claim} if source == "pvc" else {"hostPath": folder}


@dataclass(frozen=True, kw_only=True)
class JobSetRun(ClusterRun):
    """A run on nodes of a Kubernetes cluster; every field is an option of the command."""

    image: Annotated[str, typer.Option(help="Image whose entry point is mega-rl, with a tag or digest.")]
    name: Annotated[str, typer.Option(help="Name of the JobSet and its Secret.")] = "mega-rl"
    mount: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="pvc:CLAIM:/PATH or host:/PATH/ON/THE/NODE:/PATH; repeatable."),
    ] = None
    cpus: Annotated[int, typer.Option(min=0, help="CPUs of a pod; default: 8 for each rank.")] = 0
    memory: Annotated[str, typer.Option(help="Memory of a pod; default: 64Gi for each rank.")] = ""
    rdma: Annotated[
        list[str] | None, typer.Option(metavar="RESOURCE=COUNT", help="RDMA devices of a pod, as rdma/hca=8.")
    ] = None
    secret: Annotated[list[str] | None, typer.Option(help="Secret whose entries are variables of the ranks.")] = None
    node_restarts: NodeRestarts = 3


def check(run: JobSetRun, facts: RecipeFacts) -> list[str]:
    """Return the problems of a run, one line each."""
    problems = []
    if facts.resume == "never":
        problems.append(
            "checkpoint.resume=never: pods that are made again would begin anew; set checkpoint.resume=auto"
        )
    if not _NAME.fullmatch(run.name):
        problems.append(f"--name={run.name}: needs at most 42 lower-case letters, digits and dashes, a letter first")
    if not re.fullmatch(r"\S+[@:]\S+", run.image):
        problems.append(f"--image={run.image}: nodes and restarts may get different images; name a tag or a digest")
    problems += [
        f"--rdma={text}: needs a device and a number, as rdma/hca=8"
        for text in run.rdma or ()
        if not re.fullmatch("[^=]+=[1-9][0-9]*", text)
    ]
    paths = [path for path, _ in map(parse_mount, run.mount or ())]
    if not is_below(facts.run_dir, paths):
        problems.append(
            f"trainer.run_dir={facts.run_dir}: is lost with its pod; take a folder below a --mount of all nodes "
            f"({', '.join(paths) or 'there is none'}), as trainer.run_dir=/runs/{run.name} with --mount pvc:CLAIM:/runs"
        )
    return problems


def render(run: JobSetRun, facts: RecipeFacts) -> str:
    """Return the manifests as YAML; comments on top say how to start the run."""
    head = (
        f"# mega_rl on {run.nodes} nodes. Once, the key by which launchers know one another:\n"
        f"#   kubectl create secret generic {run.name} --from-literal={KEY_FIELD}=$(openssl rand -hex 32)\n"
        f"# then: kubectl apply -f THIS_FILE; kubectl logs -f -l {LABEL}={run.name} --prefix\n"
    )
    recipe, policy, job_set = documents = list(yaml.safe_load_all(TEMPLATE.read_text(encoding="utf-8")))
    for document in documents:
        document["metadata"] = {"name": run.name, "labels": {**_labels(run)}}
    recipe["data"] = {"recipe.yaml": facts.text}
    policy["spec"]["podSelector"] = {"matchLabels": {LABEL: run.name}}
    policy["spec"]["ingress"][0]["from"] = [{"podSelector": {"matchLabels": {LABEL: run.name}}}]
    job_set["spec"]["network"]["subdomain"] = run.name
    job_set["spec"]["failurePolicy"]["maxRestarts"] = run.node_restarts
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    job |= {"completions": run.nodes, "parallelism": run.nodes}
    job["template"]["metadata"] = {"labels": _labels(run)}
    pod = job["template"]["spec"]
    pod["volumes"][0]["configMap"]["name"] = run.name
    (container,) = pod["containers"]
    container |= _container(run, facts)
    if facts.device != "cpu":
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if run.rdma:
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]  # registers memory with the network card
    for number, (path, volume) in enumerate(map(parse_mount, run.mount or ())):
        container["volumeMounts"].append({"name": f"mount-{number}", "mountPath": path})
        pod["volumes"].append({"name": f"mount-{number}", **volume})
    return head + yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=120)


def _container(run: JobSetRun, facts: RecipeFacts) -> dict[str, object]:
    """Return the image, arguments, variables and devices of a pod's container."""
    resources = {
        "cpu": str(run.cpus or 8 * run.nproc_per_node),
        "memory": run.memory or f"{64 * run.nproc_per_node}Gi",
        **{name: count for name, _, count in (text.partition("=") for text in run.rdma or ())},
    }
    resources |= {} if facts.device == "cpu" else {"nvidia.com/gpu": str(run.nproc_per_node)}
    key = {"name": KEY, "valueFrom": {"secretKeyRef": {"name": run.name, "key": KEY_FIELD}}}
    values = {"HOME": "/cache", **variables(run.env)}
    options = [*run.launcher_options, "--node-rank", "$(JOB_COMPLETION_INDEX)"]  # Kubernetes puts the number in
    options += ["--master-addr", f"{run.name}-node-0-0.{run.name}", "--master-port", "29500"]  # the pod of node 0
    settings = [setting.replace("$(", "$$(") for setting in facts.overrides]  # else a variable's value
    return {
        "image": run.image,
        "args": ["train", *options, "--config", "/etc/mega_rl/recipe.yaml", *settings],
        "env": [key, *({"name": name, "value": value} for name, value in values.items())],
        "envFrom": [{"secretRef": {"name": name}} for name in run.secret or ()],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
    }


def _labels(run: JobSetRun) -> dict[str, str]:
    return {"app.kubernetes.io/name": "mega-rl", "app.kubernetes.io/instance": run.name}
