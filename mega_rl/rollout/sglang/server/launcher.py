"""One SGLang server: `python -m mega_rl.rollout.sglang.server.launcher SGLANG_ARGUMENTS`, started by `ServerProcess`.

SGLang's own server with six things around it:

- Keys come in a file of the private folder (`MEGA_RL_SGLANG_SCRATCH`), not in SGLang's settings, which it logs.
  Every endpoint wants a key; see `control.KeyCheck`.
- All processes of the server end with the trainer, whose end closes standard input, and with this one, their leader.
- A server on several hosts has such a process on each of them, and they end together; see `nodes`.
- On one host a `store.WeightStore` takes changes of weights.
- Files that SGLang shares by public names go to the private folder, which is removed at the end.
- Without CUDA, `cpu_stand_ins` take the place of modules that need it.

SGLang's own processes run this module's top level, by spawn; without CUDA they are forked.
"""

from __future__ import annotations

import contextlib
import gc
import getpass
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast

import psutil

from mega_rl.rollout.sglang.control import KeyCheck, Keys, Receive, Scope, Send
from mega_rl.rollout.sglang.server import cpu_stand_ins, nodes
from mega_rl.rollout.sglang.server.store import StoreEndpoints, WeightStore

DEVICE_VARIABLE = "MEGA_RL_SGLANG_DEVICE"
SCRATCH_VARIABLE = "MEGA_RL_SGLANG_SCRATCH"
TRAINER_VARIABLE = "MEGA_RL_SGLANG_TRAINER"
SCRATCH_PREFIX = "mega-rl-sglang-"  # servers' private folders
KEYS_FILE = "keys.json"  # in one

# These remove files of the others from /dev/shm (semaphores, tensors) and end by themselves once the others are gone.
_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
_POLL_S = 0.5
_KILL_S = 10.0


def prepare(*, leads: bool) -> None:
    """Prepare a process of the server for its import of SGLang; `leads`: the first process."""
    if leads and os.getpgrp() != os.getpid():
        os.setsid()  # started by hand: the group that ends together must not be the caller's
    # Kept from one server to the next: torch puts it among the temporary files, which are about to move.
    cache = Path(os.environ.get("TMPDIR") or "/tmp") / f"torchinductor_{getpass.getuser()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    if leads:
        # SGLang's imports make a million objects, and the collector would go through them again and again: a fifth of
        # the processor time of a start, for 15 MB of garbage. `collect_again` ends that.
        gc.disable()
    scratch = Path(os.environ.get(SCRATCH_VARIABLE) or tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
    os.environ[SCRATCH_VARIABLE] = os.environ["TMPDIR"] = str(scratch)
    _watch(_until_the_trainer_ends if leads else _until_the_leader_ends, scratch)
    os.register_at_fork(after_in_child=lambda: _watch(_until_the_leader_ends, scratch))
    # For dumps of activations SGLang imports Megatron-Core where it is installed, and that imports wandb: half of the
    # processor time of a start. Without it the dumps lack Megatron's ranks, which a server has none of.
    sys.modules["megatron"] = cast(ModuleType, None)  # an import of it fails
    if os.environ.get(DEVICE_VARIABLE) == "cpu":
        cpu_stand_ins.install()
    use_private_files(scratch)


def use_private_files(folder: Path) -> None:
    """Move SGLang's publicly named files to a private folder.

    Ranks meet at a file, those of several hosts at the first one's store: torch's TCPStore listens on all interfaces,
    whatever address it is given. The file of the schedulers' load leaves /dev/shm, where SGLang never removes it.
    """
    node = nodes.Node.read(folder)
    method = f"file://{folder}/rendezvous" if node is None else nodes.let_ranks_meet(node)
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = method
    from sglang.srt.managers import load_snapshot

    load_snapshot.shm_path_for = lambda name: f"{folder}/load-{Path(name).name}"


def main(arguments: list[str]) -> None:
    """Serve until standard input ends."""
    scratch = Path(os.environ[SCRATCH_VARIABLE])
    keys = Keys.read(scratch / KEYS_FILE)
    node = nodes.Node.read(scratch)
    if node is not None:
        nodes.end_together(node, lambda reason: _end_all(scratch, reason))
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import engine, http_server
    from sglang.srt.server_args import prepare_server_args

    collect_again()
    if node is None:
        http_server.app.add_middleware(StoreEndpoints, store=WeightStore())
    http_server.app.add_middleware(KeyCheck, api_key=keys.api_key, admin_key=keys.admin_key)
    # SGLang would send itself two requests without a key: a first generation, which the trainer requests instead,
    # and a freeze of Python's garbage collector, which only saves time.
    http_server._freeze_gc_after_server_warmup = lambda _: None
    # SGLang would tell anybody the health of a node without the server's URL.
    engine.launch_dummy_health_check_server = lambda host, port, _: serve_health(keys, host, port)
    run_server(prepare_server_args([*arguments, "--skip-server-warmup"]))


def serve_health(keys: Keys, host: str, port: int) -> None:
    """Answer 200 to requests with a key, in a thread: this node has loaded its weights."""
    import uvicorn

    async def healthy(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app = KeyCheck(healthy, api_key=keys.api_key, admin_key=keys.admin_key)
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, lifespan="off", log_level="warning"))
    threading.Thread(target=server.run, name="health", daemon=True).start()


def collect_again() -> None:
    """Turn Python's garbage collector on again, for objects that are made from now on.

    What there is stays for the server's life. On CPUs SGLang collects whenever its cache is emptied, before each update
    of the weights: 0.6 s of a core with all these objects, and copies of their pages in forked children.
    """
    gc.freeze()
    gc.enable()


def _watch(until: Callable[[], None], scratch: Path) -> None:
    """Start the thread that ends all processes of the server once `until` returns."""

    def watch() -> None:
        until()
        _end_all(scratch)

    threading.Thread(target=watch, name="line-of-life", daemon=True).start()


def _until_the_trainer_ends() -> None:
    """Return when standard input ends (a forked child may hold it open) or the parent changes."""
    trainer = int(os.environ.get(TRAINER_VARIABLE) or os.getppid())
    while os.getppid() == trainer:
        if select.select([0], [], [], _POLL_S)[0] and not os.read(0, 4096):
            return


def _until_the_leader_ends() -> None:
    try:
        leader = psutil.Process(os.getpgrp())
        while leader.is_running() and leader.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_POLL_S)
    except psutil.NoSuchProcess:
        return


def _end_all(scratch: Path, reason: str = "") -> None:
    """End all processes of the server; the log gets the reason."""
    if reason:
        os.write(sys.stderr.fileno(), f"The server ends: {reason}\n".encode())
    # Before and after: once its processes die, SGLang's main thread may end this one at any moment.
    shutil.rmtree(scratch, ignore_errors=True)
    deadline = time.monotonic() + _KILL_S
    while kill_group(os.getpgrp(), spare=os.getpid()) and time.monotonic() < deadline:
        time.sleep(0.02)  # a process that is still there could write into the folder
    shutil.rmtree(scratch, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def group_members(group: int) -> list[psutil.Process]:
    """Return the living processes of a process group, without zombies."""
    assert group > 1, f"{group} is not the group of a server"
    living = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return living


def kill_group(group: int, *, spare: int = 0, cleaners: bool = False) -> int:
    """Send SIGKILL to a group's members but `spare`, and to `_CLEANERS` only if asked; return the number of signals."""
    targets = [one for one in group_members(group) if one.pid != spare and (cleaners or not _cleans(one))]
    for process in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # checks first that the id is still this process's
    return len(targets)


def end_group(group: int, *, deadline_s: float) -> list[int]:
    """Kill a group and wait for its end; return the processes left at the deadline.

    `_CLEANERS` have half of that time to end by themselves.
    """
    start = time.monotonic()
    while left := group_members(group):
        passed = time.monotonic() - start
        if passed > deadline_s:
            return [process.pid for process in left]
        kill_group(group, cleaners=passed > deadline_s / 2)  # again and again: one may have been started meanwhile
        time.sleep(0.05)
    return []


def _cleans(process: psutil.Process) -> bool:
    try:
        return any(name in argument for argument in process.cmdline() for name in _CLEANERS)
    except psutil.Error:
        return False


if __name__ in ("__main__", "__mp_main__"):
    prepare(leads=__name__ == "__main__")
if __name__ == "__main__":
    main(sys.argv[1:])
