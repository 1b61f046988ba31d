"""A JobSet for Kubernetes: one Indexed Job with a pod for each node, its recipe as a ConfigMap, a NetworkPolicy.

Fields: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2 and
https://kubernetes.io/docs/concepts/workloads/controllers/job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from mega_rl.errors import UserError
from mega_rl.launcher.ranks import KEY

JOB = "node"  # of the JobSet; pods are NAME-node-0-0, NAME-node-0-1, ...
RECIPE_FOLDER, RECIPE_FILE = "/etc/mega_rl", "recipe.yaml"
KEY_FIELD = "launch-key"
HOME = "/cache"  # of caches and whatever else programs write beside their data
LABEL = "jobset.sigs.k8s.io/jobset-name"  # set by the JobSet's controller on every pod
USER_MISTAKE, TOLD_TO_STOP = 2, 143
MAX_HOST_NAME = 63
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SIZE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)?")

Manifest = dict[str, object]


@dataclass(frozen=True)
class Mount:
    """Folder of a container: of a PersistentVolumeClaim, or of the node."""

    source: str  # "pvc" or "host"
    name: str  # of the claim, or the path on the node
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
    """A run to be rendered; sizes are Kubernetes quantities, as 64Gi.

    overrides: KEY=VALUE. rdma: resources of a pod, as {"rdma/hca": 8}. restarts: of all pods, after a failure that is
    no mistake of the user's. max_restarts: of the ranks inside their pods. grace_s: to end a step and save it.
    """

    name: str
    recipe: str
    overrides: Sequence[str]
    image: str
    nodes: int
    nproc_per_node: int
    gpus: int
    cpus: int
    memory: str
    shm: str
    mounts: Sequence[Mount]
    namespace: str = ""
    rdma: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    pull_secret: str = ""
    queue: str = ""
    priority_class: str = ""
    host_network: bool = False
    port: int = 29500
    restarts: int = 3
    max_restarts: int = 0
    grace_s: int = 600
    user: int = 1000


class _Dumper(yaml.SafeDumper):
    """A dumper of plain YAML: texts of several lines as blocks, nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def check(run: JobSetRun, *, run_dir: str, resume: str) -> list[str]:
    """Return what is wrong with a run, one line each; run_dir and resume: of the recipe."""
    problems = []
    if resume == "never":
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
    for option, size in (("--memory", run.memory), ("--shm", run.shm)):
        if not _SIZE.fullmatch(size):
            problems.append(f"{option}={size}: is no quantity of Kubernetes; write 64Gi or the like")
    if re.search(r"\s", run.image) or not run.image:
        problems.append(f"--image={run.image!r}: is no name of an image; write REGISTRY/NAME:TAG")
    elif "@" not in run.image and run.image.rpartition("/")[2].partition(":")[2] in ("", "latest"):
        problems.append(f"--image={run.image}: nodes and restarts may get different images; name a tag or a digest")
    paths = [mount.path for mount in run.mounts]
    if doubled := sorted({path for path in paths if paths.count(path) > 1}):
        problems.append(f"--mount: {doubled[0]} is given twice; one source for each path")
    if not any(run_dir == path or run_dir.startswith(path.rstrip("/") + "/") for path in paths):
        problems.append(
            f"trainer.run_dir={run_dir}: is lost with its pod; take a folder below a --mount that all nodes share "
            f"({', '.join(paths) or 'there is none'}), as trainer.run_dir=/runs/{run.name} with --mount pvc:CLAIM:/runs"
        )
    return problems


def render(run: JobSetRun) -> str:
    """Return the manifests as YAML, with the commands that make the Secret and start the run on top."""
    namespace = f" -n {run.namespace}" if run.namespace else ""
    head = (
        f"# mega_rl on {run.nodes} nodes. Once, the key by which launchers know one another:\n"
        f"#   kubectl{namespace} create secret generic {run.name} --from-literal={KEY_FIELD}=$(openssl rand -hex 32)\n"
        f"# then: kubectl{namespace} apply -f THIS_FILE; kubectl{namespace} logs -f -l {LABEL}={run.name} --prefix\n"
    )
    documents = [config_map(run), *([] if run.host_network else [network_policy(run)]), job_set(run)]
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def pod_name(run: JobSetRun, node: int) -> str:
    """Return the host name of a node's pod."""
    return f"{run.name}-{JOB}-0-{node}"


def config_map(run: JobSetRun) -> Manifest:
    """Return the recipe as a file for the pods."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(run), "data": {RECIPE_FILE: run.recipe}}


def network_policy(run: JobSetRun) -> Manifest:
    """Return that the pods are reached from one another alone: collectives listen on every interface, without a key."""
    pods = {"podSelector": {"matchLabels": {LABEL: run.name}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(run),
        "spec": {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]},
    }


def job_set(run: JobSetRun) -> Manifest:
    """Return the JobSet.

    Exit code 2 fails it. 143 and disruptions (a drained or preempted node) have the pods made again and count for
    nothing: every rank has saved. Whatever else fails a pod starts all of them again, `restarts` times at most.
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
        "template": {"metadata": {"labels": _labels(run)}, "spec": _pod(run)},
    }
    spec: Manifest = {
        "network": {"enableDNSHostnames": True, "subdomain": run.name, "publishNotReadyAddresses": True},
        "failurePolicy": {
            "maxRestarts": run.restarts,
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


def arguments(run: JobSetRun) -> list[str]:
    """Return the arguments of the image's entry point, mega-rl; the node's number is put in by Kubernetes."""
    options = ["--nnodes", str(run.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)"]
    options += ["--nproc-per-node", str(run.nproc_per_node), "--max-restarts", str(run.max_restarts)]
    options += ["--master-addr", f"{pod_name(run, 0)}.{run.name}", "--master-port", str(run.port)]
    settings = [setting.replace("$(", "$$(") for setting in run.overrides]  # else a variable's value
    return ["train", *options, "--config", f"{RECIPE_FOLDER}/{RECIPE_FILE}", *settings]


def _exits_with(code: int) -> Manifest:
    return {"containerName": "mega-rl", "operator": "In", "values": [code]}


def _labels(run: JobSetRun) -> dict[str, str]:
    return {"app.kubernetes.io/name": "mega-rl", "app.kubernetes.io/instance": run.name}


def _metadata(run: JobSetRun) -> Manifest:
    namespace = {"namespace": run.namespace} if run.namespace else {}
    return {"name": run.name, **namespace, "labels": _labels(run)}


def _pod(run: JobSetRun) -> Manifest:
    volumes = [mount.volume(f"mount-{i}") for i, mount in enumerate(run.mounts)]
    volumes += [
        {"name": "recipe", "configMap": {"name": run.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": run.shm}},
        {"name": "cache", "emptyDir": {}},
    ]
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": run.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": run.user,
            "runAsGroup": run.user,
            "fsGroup": run.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(run)],
        "volumes": volumes,
    }
    if run.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if run.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    optional: Manifest = {
        "nodeSelector": dict(run.node_selector),
        "imagePullSecrets": [{"name": run.pull_secret}] if run.pull_secret else [],
        "priorityClassName": run.priority_class,
    }
    return {**spec, **{name: value for name, value in optional.items() if value}}


def _container(run: JobSetRun) -> Manifest:
    resources = {"cpu": str(run.cpus), "memory": run.memory}
    resources |= {"nvidia.com/gpu": str(run.gpus)} if run.gpus else {}
    resources |= {name: str(count) for name, count in run.rdma.items()}
    environment: list[Manifest] = [
        {"name": KEY, "valueFrom": {"secretKeyRef": {"name": run.name, "key": KEY_FIELD}}},
        {"name": "HOME", "value": HOME},
    ]
    environment += [{"name": name, "value": value} for name, value in run.environment.items()]
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
        "args": arguments(run),
        "env": environment,
        "ports": [{"name": "launch", "containerPort": run.port, "protocol": "TCP"}],
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": mounts,
    }
    if run.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in run.secrets]
    return container
