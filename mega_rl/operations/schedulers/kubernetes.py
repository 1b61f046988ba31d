"""A JobSet for Kubernetes: one Indexed Job with a pod for each node, its recipe as a ConfigMap, a NetworkPolicy.

Fields: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2 and
https://kubernetes.io/docs/concepts/workloads/controllers/job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import typer
import yaml

from mega_rl.errors import UserError
from mega_rl.operations.launcher.outcome import DEFAULT_RESTARTS
from mega_rl.operations.launcher.ranks import KEY
from mega_rl.operations.schedulers.options import (
    MaxRestarts,
    NodeRestarts,
    Nodes,
    RanksPerNode,
    RecipeFacts,
    Variables,
    is_below,
    pairs,
    variables,
)

JOB = "node"  # name in the JobSet; pods are NAME-node-0-0, NAME-node-0-1, ...
PORT = 29500  # of the launcher of node 0
SHM = "64Gi"  # most of a pod's memory that /dev/shm may take
GRACE_S = 600  # for a pod to end its step and save
USER = 1000  # user and group of the processes
RECIPE_FOLDER, RECIPE_FILE = "/etc/mega_rl", "recipe.yaml"
KEY_FIELD = "launch-key"
HOME = "/cache"  # programs write caches there
LABEL = "jobset.sigs.k8s.io/jobset-name"  # the controller of JobSets sets it on every pod
USER_MISTAKE, TOLD_TO_STOP = 2, 143
MAX_HOST_NAME = 63
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SIZE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")

Manifest = dict[str, object]


@dataclass(frozen=True)
class Mount:
    """Folder of a container: a PersistentVolumeClaim, or a folder of the node."""

    source: str  # "pvc" or "host"
    name: str  # the claim, or the path on the node
    path: str

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Return the mount of `pvc:CLAIM:/path` or `host:/path/on/the/node:/path`. Raises UserError."""
        source, _, rest = text.partition(":")
        name, _, path = rest.partition(":")
        if source not in ("pvc", "host") or not name or not path.startswith("/") or ":" in path:
            raise UserError(f"--mount={text}: is neither pvc:CLAIM:/PATH nor host:/PATH/ON/THE/NODE:/PATH")
        if source == "host" and not name.startswith("/"):
            raise UserError(f"--mount={text}: the folder of the node needs its path from the root on")
        return cls(source, name, path.rstrip("/") or "/")

    def volume(self, name: str) -> Manifest:
        """Return the volume of a pod."""
        if self.source == "pvc":
            return {"name": name, "persistentVolumeClaim": {"claimName": self.name}}
        return {"name": name, "hostPath": {"path": self.name, "type": "Directory"}}


@dataclass(frozen=True)
class JobSetRun:
    """A run on nodes of a Kubernetes cluster; every field is an option of the command."""

    nodes: Nodes
    image: Annotated[str, typer.Option("--image", help="Image whose entry point is mega-rl, with a tag or digest.")]
    nproc_per_node: RanksPerNode = 8
    name: Annotated[str, typer.Option("--name", help="Name of the JobSet and its Secret.")] = "mega-rl"
    mount: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="SOURCE", help="pvc:CLAIM:/PATH or host:/PATH/ON/THE/NODE:/PATH; repeatable."),
    ] = None
    cpus: Annotated[int, typer.Option("--cpus", min=0, help="CPUs of a pod; default: 8 for each rank.")] = 0
    memory: Annotated[str, typer.Option("--memory", help="Memory of a pod; default: 64Gi for each rank.")] = ""
    rdma: Annotated[
        list[str] | None, typer.Option("--rdma", metavar="RESOURCE=COUNT", help="RDMA devices of a pod, as rdma/hca=8.")
    ] = None
    env: Variables = None
    secret: Annotated[
        list[str] | None, typer.Option("--secret", help="Secret whose entries are variables of the ranks.")
    ] = None
    node_selector: Annotated[
        list[str] | None, typer.Option("--node-selector", metavar="LABEL=VALUE", help="Label of the nodes to use.")
    ] = None
    queue: Annotated[str, typer.Option("--queue", help="Local queue of Kueue, which admits all pods at once.")] = ""
    max_restarts: MaxRestarts = DEFAULT_RESTARTS
    node_restarts: NodeRestarts = 3

    @property
    def mounts(self) -> list[Mount]:
        """Return the folders of the container. Raises UserError."""
        return [Mount.parse(text) for text in self.mount or ()]

    @property
    def memory_size(self) -> str:
        """Return the memory of a pod as a Kubernetes quantity."""
        return self.memory or f"{64 * self.nproc_per_node}Gi"


class _Dumper(yaml.SafeDumper):
    """A dumper of plain YAML: texts of several lines as blocks, nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def check(run: JobSetRun, facts: RecipeFacts) -> list[str]:
    """Return what is wrong with a run, one line each."""
    problems = []
    if facts.resume == "never":
        problems.append(
            "checkpoint.resume=never: pods that are made again would begin anew; set checkpoint.resume=auto"
        )
    if not _NAME.fullmatch(run.name):
        problems.append(f"--name={run.name}: needs lower-case letters, digits and dashes, a letter first")
    if len(host := pod_name(run, run.nodes - 1)) > MAX_HOST_NAME:
        problems.append(
            f"--name={run.name}: makes host names of {len(host)} characters ({host}), more than {MAX_HOST_NAME}; "
            f"take at most {len(run.name) - len(host) + MAX_HOST_NAME} characters"
        )
    if not _SIZE.fullmatch(run.memory_size):
        problems.append(f"--memory={run.memory}: is no quantity of Kubernetes; write 64Gi or the like")
    for name, count in pairs("--rdma", run.rdma).items():
        if not (count.isascii() and count.isdigit() and int(count)):
            problems.append(f"--rdma={name}={count}: needs a whole number of at least 1")
    if re.search(r"\s", run.image) or not run.image:
        problems.append(f"--image={run.image!r}: is no name of an image; write REGISTRY/NAME:TAG")
    elif "@" not in run.image and run.image.rpartition("/")[2].partition(":")[2] in ("", "latest"):
        problems.append(f"--image={run.image}: nodes and restarts may get different images; name a tag or a digest")
    paths = [mount.path for mount in run.mounts]
    if doubled := sorted({path for path in paths if paths.count(path) > 1}):
        problems.append(f"--mount: {doubled[0]} is given twice; one source for each path")
    if not is_below(facts.run_dir, paths):
        problems.append(
            f"trainer.run_dir={facts.run_dir}: is lost with its pod; take a folder below a --mount of all nodes "
            f"({', '.join(paths) or 'there is none'}), as trainer.run_dir=/runs/{run.name} with --mount pvc:CLAIM:/runs"
        )
    return problems


def render(run: JobSetRun, facts: RecipeFacts) -> str:
    """Return the manifests as YAML, with the commands that make the Secret and start the run on top."""
    head = (
        f"# mega_rl on {run.nodes} nodes. Once, the key by which launchers know one another:\n"
        f"#   kubectl create secret generic {run.name} --from-literal={KEY_FIELD}=$(openssl rand -hex 32)\n"
        f"# then: kubectl apply -f THIS_FILE; kubectl logs -f -l {LABEL}={run.name} --prefix\n"
    )
    pods: Manifest = {"podSelector": {"matchLabels": {LABEL: run.name}}}
    # Collectives listen on every interface without a key: only the run's own pods may reach its pods.
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(run),
        "spec": {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]},
    }
    recipe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(run), "data": {RECIPE_FILE: facts.text}}
    documents = [recipe, policy, job_set(run, facts)]
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def pod_name(run: JobSetRun, node: int) -> str:
    """Return the host name of a node's pod."""
    return f"{run.name}-{JOB}-0-{node}"


def job_set(run: JobSetRun, facts: RecipeFacts) -> Manifest:
    """Return the JobSet.

    Exit code 2 fails it. After 143 or a disruption (a drained or preempted node) every rank has saved: the pods are
    made again, which does not count. Any other failure starts all pods again, at most `node_restarts` times.
    """
    job = {
        "completionMode": "Indexed",
        "completions": run.nodes,
        "parallelism": run.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _exits_with(USER_MISTAKE)},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": _exits_with(TOLD_TO_STOP)},
            ]
        },
        "template": {"metadata": {"labels": _labels(run)}, "spec": _pod(run, facts)},
    }
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "subdomain": run.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": run.node_restarts,
            "restartStrategy": "BlockingRecreate",
            "rules": [
                {"name": "UserMistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            ],
        },
        "successPolicy": {"operator": "All"},
        "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
    }
    metadata = _metadata(run)
    if run.queue:
        metadata["labels"] = {**_labels(run), "kueue.x-k8s.io/queue-name": run.queue}
        spec = {"suspend": True, **spec}  # until Kueue admits it
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def arguments(run: JobSetRun, facts: RecipeFacts) -> list[str]:
    """Return the arguments of the image's entry point, mega-rl; Kubernetes puts in the node's number."""
    options = ["--nnodes", str(run.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    options += ["--nproc-per-node", str(run.nproc_per_node), "--max-restarts", str(run.max_restarts)]
    options += ["--master-addr", f"{pod_name(run, 0)}.{run.name}", "--master-port", str(PORT)]
    settings = [setting.replace("$(", "$$(") for setting in facts.overrides]  # else a variable's value
    return ["train", *options, "--config", f"{RECIPE_FOLDER}/{RECIPE_FILE}", *settings]


def _exits_with(code: int) -> Manifest:
    return {"containerName": "mega-rl", "operator": "In", "values": [code]}


def _labels(run: JobSetRun) -> dict[str, str]:
    return {"app.kubernetes.io/name": "mega-rl", "app.kubernetes.io/instance": run.name}


def _metadata(run: JobSetRun) -> Manifest:
    return {"name": run.name, "labels": _labels(run)}


def _pod(run: JobSetRun, facts: RecipeFacts) -> Manifest:
    volumes = [mount.volume(f"mount-{i}") for i, mount in enumerate(run.mounts)]
    volumes += [
        {"name": "recipe", "configMap": {"name": run.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM}},
        {"name": "cache", "emptyDir": {}},
    ]
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(run, facts)],
        "volumes": volumes,
    }
    if facts.device != "cpu":
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if run.node_selector:
        spec["nodeSelector"] = pairs("--node-selector", run.node_selector)
    return spec


def _container(run: JobSetRun, facts: RecipeFacts) -> Manifest:
    resources = {"cpu": str(run.cpus or 8 * run.nproc_per_node), "memory": run.memory_size}
    resources |= {} if facts.device == "cpu" else {"nvidia.com/gpu": str(run.nproc_per_node)}
    resources |= pairs("--rdma", run.rdma)
    environment: list[Manifest] = [
        {"name": KEY, "valueFrom": {"secretKeyRef": {"name": run.name, "key": KEY_FIELD}}},
        {"name": "HOME", "value": HOME},
    ]
    environment += [{"name": name, "value": value} for name, value in variables(run.env).items()]
    mounts: list[Manifest] = [{"name": f"mount-{i}", "mountPath": mount.path} for i, mount in enumerate(run.mounts)]
    mounts += [
        {"name": "recipe", "mountPath": RECIPE_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": HOME},
    ]
    capabilities: Manifest = {"drop": ["ALL"]}
    if run.rdma:
        capabilities["add"] = ["IPC_LOCK"]  # registers memory with the network card
    container: Manifest = {
        "name": "mega-rl",
        "image": run.image,
        "args": arguments(run, facts),
        "env": environment,
        "ports": [{"name": "launch", "containerPort": PORT, "protocol": "TCP"}],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": mounts,
    }
    if run.secret:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in run.secret]
    return container
