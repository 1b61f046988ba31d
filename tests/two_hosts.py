"""A trainer and its SGLang servers on two hosts, in network namespaces of this machine.

A trainer of two pipeline stages sends weights. Neither host has a whole copy of the model. The trainer sends it to a
server on each host, at the default setting of its address, then to one server that has a rank on each host. That server
loses its second node, ends, and is started again.
Each is sent two updates, proved by the servers' log-probs, and the kernel counts what crosses the link. Linux, as root,
with iproute2 and util-linux; `make two-hosts`.

    python -m tests.two_hosts            # four minutes on two cores
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HOSTS = ("10.99.0.1", "10.99.0.2")
INTERFACE = "link0"
START_S = 280.0
DEADLINE_S = 900.0
# What is shown -> hosts of each server.
CASES = {"a server on each host": 1, "one server on both hosts": 2}
MODEL = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192, "num_hidden_layers": 4}


def rank_main(folder: Path) -> None:
    """Run one of the two ranks, the only one of its host, with the host's server; rank 0 writes results.json."""
    import torch

    torch.set_num_threads(1)
    from mega_rl.config.schema import MegatronConfig, RolloutConfig, SglangServerConfig
    from mega_rl.config.schema.rollout import SglangConfig, SglangSyncConfig
    from mega_rl.parallel.accelerator import prepare
    from mega_rl.parallel.comm import GroupRanks
    from mega_rl.rollout.sglang.build import connect
    from mega_rl.rollout.sglang.server.addresses import listening_address
    from mega_rl.rollout.sglang.server.pool import StartedServers
    from mega_rl.rollout.sglang.server.process import ServerSettings
    from mega_rl.trainer.assemble.plan import plan_run
    from tests.helpers.engines import make_config, replaced, running_engine

    rank = int(os.environ["RANK"])
    results: dict[str, list[dict[str, float]]] = {}
    for case, nodes in CASES.items():
        server = SglangServerConfig(tp=nodes, nodes=nodes, **({} if nodes == 1 else {"host": INTERFACE}))
        sglang = SglangConfig(server=server, sync=SglangSyncConfig(timeout_s=120.0))
        config = make_config(
            folder / "b", rollout=RolloutConfig(sglang=sglang, bucket_mib=4), megatron=MegatronConfig(pp=2)
        )
        config = replaced(config, "trainer", run_dir=str(folder / "run"))
        with running_engine(config, trainable=False) as engine, ExitStack() as stack:
            world = GroupRanks(engine.groups.world)
            settings = ServerSettings(
                model_path=folder / "a",
                host=listening_address(server.host, world, hosts=2),
                tp=nodes,
                nodes=nodes,
                device="cpu",
                args={"max_total_tokens": 2000},
                start_timeout_s=START_S,
            )
            servers = StartedServers(world, settings, count=1, ranks_per_host=1, folder=folder / f"host{rank}")
            stack.callback(servers.close)
            servers.wait_ready()
            plan = plan_run(config, prepare("auto"))
            connection = connect(
                config.rollout, plan.rollout_dtype, servers, stack, actor=engine, world=world,
                hidden_tokens=plan.engine.hidden_tokens,
            )  # fmt: skip
            results[case] = [update(connection, world, servers=2 // nodes) for _ in range(2)]
            if nodes == 2:
                lose_a_node(connection, servers, rank)
        assert not list((folder / "run").rglob("*.safetensors")), "weights went through the disk"
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))


def lose_a_node(connection: Any, servers: Any, rank: int) -> None:
    """Kill the second host's part of the only server; the first host's ends, and both come back with the weights."""
    part = servers._own[0]
    if rank == 1:
        os.kill(part.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30.0
    while part.exit_code is None:
        assert time.monotonic() < deadline, "a part outlived the other one"
        time.sleep(0.05)
    assert rank == 1 or f"node 1 at {HOSTS[1]} has ended" in part.log_file.read_text()
    connection.bring_back([0])
    assert sorted(connection.sync.ready) == [0]


def update(connection: Any, world: Any, *, servers: int) -> dict[str, float]:
    """Publish once; return the update's metrics and the bytes of both directions of the link while it sent."""
    import torch

    transport = connection.sync._transport
    crossed = torch.zeros(2, dtype=torch.int64)
    send = transport.send

    def counted(**kwargs: Any) -> Any:
        before = sent_bytes()
        report = send(**kwargs)
        crossed[world.rank] = sent_bytes() - before
        return report

    transport.send = counted
    metrics = connection.sync.publish()
    transport.send = send
    assert sorted(connection.sync.ready) == list(range(servers))
    total = world.sum(crossed).tolist()
    return {**metrics, "link/0_to_1_bytes": total[0], "link/1_to_0_bytes": total[1]}


def sent_bytes() -> int:
    """Return the bytes that left this host so far."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


@contextmanager
def hosts(tag: str = "") -> Iterator[list[str]]:
    """Two network namespaces with a link between them; gone at the end. tag: of their names, random by default."""
    tag = tag or secrets.token_hex(3)
    names = [f"mega{tag}{number}" for number in range(2)]
    with ExitStack() as stack:
        for name in names:
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
        ends = [f"v{tag}{number}" for number in range(2)]
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, HOSTS, strict=True):
            run("ip", "link", "set", end, "netns", name)
            inside = ("ip", "-n", name)
            run(*inside, "link", "set", end, "name", INTERFACE)
            run(*inside, "address", "add", f"{address}/24", "dev", INTERFACE)
            run(*inside, "link", "set", INTERFACE, "up")
            run(*inside, "link", "set", "lo", "up")
        yield names


def run(*command: str) -> None:
    """Run a program to its end."""
    subprocess.run(command, check=True)


def launch(names: list[str], folder: Path) -> None:
    """Start torchrun on both hosts and wait for both.

    Each has a host name and a /dev/shm of its own, as machines have: by that SGLang finds ranks of one host.
    """
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    processes = []
    for number, name in enumerate(names):
        torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --node-rank {number}"
        torchrun += f" --master-addr {HOSTS[0]} --master-port 29500 -m tests.two_hosts {folder}"
        inside = f"hostname {name} && mount -t tmpfs shm /dev/shm && exec {torchrun}"
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", inside]
        processes.append(subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[1]))
    deadline = time.monotonic() + DEADLINE_S
    try:
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
        assert codes == [0, 0], f"torchrun ended with {codes}"
    finally:
        for process in processes:
            process.kill()


def main() -> int:
    """Print what each update moved."""
    if len(sys.argv) > 1:
        rank_main(Path(sys.argv[1]))
        return 0
    from tests.helpers.models import write_tiny_checkpoint

    with tempfile.TemporaryDirectory(prefix="two_hosts_") as name, hosts() as names:
        folder = Path(name)
        for seed, model in enumerate("ab"):  # servers start from one and are sent the other
            write_tiny_checkpoint(folder / model, seed=seed, **MODEL)
        launch(names, folder)
        results = json.loads((folder / "results.json").read_text())
    sys.stdout.write(
        "| servers | update | model | host 0 to 1 | host 1 to 0 | requests | send | largest difference |\n"
    )
    for case, updates in results.items():
        for number, one in enumerate(updates, 1):
            sys.stdout.write(
                f"| {case} | {number} | {one['sync/bytes'] / 1e6:.1f} MB "
                f"| {one['link/0_to_1_bytes'] / 1e6:.1f} MB | {one['link/1_to_0_bytes'] / 1e6:.1f} MB "
                f"| {one['sync/requests']:.0f} | {one['sync/send_seconds']:.2f} s "
                f"| {one['sync/probe_logprob_diff_max']:.1e} nats |\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
