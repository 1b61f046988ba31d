"""Weight updates over a link of 100 Mbit/s: changes against all weights, to a real SGLang server.

Trainer and server are in two network namespaces of this machine, and `tc` limits both directions of their link. The
trainer joins the server twice, first with `rollout.sglang.sync.delta=off`, then with `auto`, which must choose changes,
and takes optimizer steps between updates. The server's log-probs prove each of them, and the kernel counts what crosses
the link. Linux, as root, with iproute2; `make slow-link`.

    python -m tests.slow_link            # three minutes on two cores
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.two_hosts import HOSTS, INTERFACE, START_S, hosts, run, sent_bytes

RATE = "100mbit"
MODEL = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 8}
STEPS = ((1e-6, 1), (1e-6, 4), (1e-5, 1), (1e-5, 4))  # learning rate, optimizer steps between two updates


def serve(folder: Path) -> None:
    """Run a server until standard input ends; its URL and keys go to files."""
    from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings

    settings = ServerSettings(
        model_path=folder / "a", host=HOSTS[1], device="cpu", dtype="bfloat16", args={"max_total_tokens": 2000},
        start_timeout_s=START_S,
    )  # fmt: skip
    with ServerProcess(settings, index=0, folder=folder) as server:
        endpoint = server.wait_ready()
        endpoint.keys.write(folder / "keys.json")
        (folder / "url.new").write_text(endpoint.url)
        (folder / "url.new").rename(folder / "url")
        sys.stdin.read()


def train(folder: Path) -> None:
    """Send updates both ways, and write results.json."""
    import torch

    torch.set_num_threads(1)
    from mega_rl.algorithms.kl import k3
    from mega_rl.algorithms.policy_losses import PPO
    from mega_rl.config.schema import RolloutConfig
    from mega_rl.config.schema.rollout import SglangConfig, SglangSyncConfig
    from mega_rl.parallel.accelerator import prepare
    from mega_rl.parallel.comm import GroupRanks
    from mega_rl.rollout.sglang.build import connect
    from mega_rl.rollout.sglang.server.fleet import JoinedServers
    from mega_rl.trainer.assemble.plan import plan_run
    from mega_rl.workers.models import PolicyLoss
    from tests.helpers.engines import make_config, own_rows, running_engine
    from tests.helpers.models import random_experience

    loss = PolicyLoss(PPO(clip_low=0.2, clip_high=0.3), kl=None, kl_estimator=k3)
    results: dict[str, list[dict[str, float]]] = {}
    for mode in ("off", "auto"):
        sync = SglangSyncConfig(timeout_s=120.0, delta=mode)
        url, keys = (folder / "url").read_text(), folder / "keys.json"
        sglang = SglangConfig(urls=[url], keys_file=str(keys), sync=sync)
        config = make_config(folder / "b", dtype="bf16", rollout=RolloutConfig(sglang=sglang, bucket_mib=16))
        with running_engine(config) as engine, ExitStack() as stack:
            world = GroupRanks(engine.groups.world)
            servers = JoinedServers(world, [url], keys, timeout_s=START_S)
            servers.wait_ready()
            plan = plan_run(config, prepare("auto"))
            connection = connect(
                config.rollout, plan.rollout_dtype, servers, stack, actor=engine, world=world,
                hidden_tokens=plan.engine.hidden_tokens,
            )  # fmt: skip
            chosen = type(connection.sync._transport).__name__
            assert (chosen == "DeltaTransport") is (mode == "auto"), chosen
            results[mode] = []
            for number, (lr, steps) in enumerate([(0.0, 0), *STEPS]):
                for step in range(steps):
                    rows = random_experience(vocab_size=engine.sharding.hf.vocab_size, seed=10 * number + step)
                    engine.train_minibatch(own_rows(rows, engine), loss, lr=lr)
                before = sent_bytes()
                metrics = connection.sync.publish()
                assert sorted(connection.sync.ready) == [0]
                crossed = float(sent_bytes() - before)
                results[mode].append({**metrics, "lr": lr, "steps": float(steps), "link": crossed})
    (folder / "results.json").write_text(json.dumps(results))


def inside(name: str, *command: str, **more: object) -> subprocess.Popen[bytes]:
    """Start a program of Python in a namespace, with a /dev/shm of its own."""
    here = Path(__file__).parents[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here)}
    text = f"mount -t tmpfs shm /dev/shm && exec {' '.join([sys.executable, *command])}"
    within = ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", text]
    return subprocess.Popen(within, env=environment, cwd=here, **more)  # type: ignore[call-overload, no-any-return]


def main() -> int:
    """Print what each update moved."""
    if len(sys.argv) > 1:
        {"serve": serve, "train": train}[sys.argv[1]](Path(sys.argv[2]))
        return 0
    from tests.helpers.models import write_tiny_checkpoint

    with tempfile.TemporaryDirectory(prefix="slow_link_") as folder, hosts() as names:
        import torch

        for seed, model in enumerate("ab"):
            write_tiny_checkpoint(Path(folder) / model, seed=seed, dtype=torch.bfloat16, **MODEL)
        for name in names:
            shaped = ("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root")
            run(*shaped, "tbf", "rate", RATE, "burst", "128kb", "latency", "400ms")
        server = inside(names[1], "-m", "tests.slow_link", "serve", folder, stdin=subprocess.PIPE)
        try:
            deadline = time.monotonic() + START_S
            while not (Path(folder) / "url").exists():
                assert server.poll() is None, "no server"
                assert time.monotonic() < deadline, "no server in time"
                time.sleep(0.2)
            torchrun = "-m torch.distributed.run --nnodes 1 --master-addr 127.0.0.1 --master-port 29500"
            trainer = inside(names[0], *torchrun.split(), "-m", "tests.slow_link", "train", folder)
            assert trainer.wait(600.0) == 0, "the trainer failed"
        finally:
            assert server.stdin is not None
            server.stdin.close()
            server.wait(60.0)
        results = json.loads((Path(folder) / "results.json").read_text())
    sys.stdout.write(f"Link of {RATE}, model of {results['off'][0]['sync/bytes'] / 1e6:.1f} MB.\n\n")
    sys.stdout.write("| learning rate, steps | changed | all: MB | changes: MB | all: s | changes: s | faster |\n")
    for full, changes in zip(results["off"], results["auto"], strict=True):
        what = f"{full['lr']:g}, {full['steps']:.0f}" if full["steps"] else "first"
        seconds = full["sync/send_seconds"], changes["sync/send_seconds"]
        sys.stdout.write(
            f"| {what} | {changes['sync/changed_share']:.2%} | {full['link'] / 1e6:.2f} | {changes['link'] / 1e6:.2f} "
            f"| {seconds[0]:.2f} | {seconds[1]:.2f} | {seconds[0] / seconds[1]:.1f}x |\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
