"""A sandbox on this machine: bubblewrap, a filter of system calls, and limits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from mega_rl.rewards.sandbox import Execution, Limits, SandboxError, Status
from mega_rl.rewards.sandbox.seccomp import build_filter

START_S = 20.0  # for bubblewrap to have made its namespaces, on a busy machine
END_S = 10.0  # for a killed sandbox to be gone
LOOK_S = 0.02  # between two looks at the memory and the outputs
SHOWN_BYTES = 400  # longest error of bubblewrap in a message
INODE_BYTES = 1024  # kernel memory for a file, however short
_HINT = (
    "bubblewrap needs user namespaces, or root with CAP_SYS_ADMIN: on the host set kernel.unprivileged_userns_clone=1, "
    "user.max_user_namespaces above 0 and, on Ubuntu, an AppArmor profile for bwrap; start a container with "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined; or "
    "name a service with reward.sandbox=remote"
)
_FORKS = """
import os, time
try:
    for _ in range({count}):
        if os.fork() == 0:
            time.sleep(60)
except BlockingIOError:
    print("limited", flush=True)
os.kill(-1, 9)
"""


@dataclass(frozen=True)
class LocalSandbox:
    """Runs programs under bubblewrap, each in its own namespaces, which end with it."""

    tool: Tool
    limits: Limits

    def run(self, program: str, stdin: bytes, *, timeout_s: float) -> Execution:
        limits = replace(self.limits, timeout_s=min(timeout_s, self.limits.timeout_s))
        with ExitStack() as stack:
            text, rules, given, stdout, stderr = (stack.enter_context(TemporaryFile()) for _ in range(5))
            for file, content in ((text, program.encode("utf-8", "replace")), (rules, build_filter()), (given, stdin)):
                file.write(content)
                file.flush()
                file.seek(0)
            uid = choose_uid()
            if uid:  # so that the program may open /dev/stdin
                for file in (given, stdout, stderr):
                    os.fchown(file.fileno(), uid, uid)
            deadline = time.monotonic() + limits.timeout_s
            run = _Run(self.tool, limits, uid, text, rules, (given, stdout, stderr))
            stack.callback(run.end)
            run.find_init()
            status = run.status(deadline)
            run.end()
            output, errors = (_read(file, limits.output_bytes) for file in (stdout, stderr))
            if status == "finished" and max(len(output), len(errors)) > limits.output_bytes:
                status = "output"
            code = run.process.returncode if status == "finished" else None
            return Execution(status, code, output, errors)

    def check(self) -> None:
        """Run a program and one that starts too many processes. Raises SandboxError."""
        outcome = self.run("print(6 * 7)", b"", timeout_s=START_S)
        if not outcome.succeeded or outcome.stdout != b"42\n":
            said = _readable(outcome.stderr) or f"{outcome.status}, exit code {outcome.return_code}"
            raise SandboxError(f"a sandbox does not work on this machine: {said}; {_HINT}")
        outcome = self.run(_FORKS.format(count=4 * self.limits.processes), b"", timeout_s=START_S)
        if b"limited" not in outcome.stdout:
            raise SandboxError(
                "the limit of processes does not bind here: it needs Linux 5.14, or the rights of root; use "
                "reward.sandbox=remote"
            )


class _Run:
    """One sandbox, whose standard streams are files: no program can block this process."""

    def __init__(
        self, tool: Tool, limits: Limits, uid: int, text: IO[bytes], rules: IO[bytes], streams: tuple[IO[bytes], ...]
    ) -> None:
        """Start bubblewrap. Raises SandboxError."""
        self._limits, self._streams = limits, streams
        self._info, info_end = os.pipe()
        self._init: int | None = None  # descriptor of the sandbox's first process, with which all others end
        self._init_pid = 0
        words = command(tool, limits, uid=uid, filter_fd=rules.fileno(), program_fd=text.fileno(), info_fd=info_end)
        stdin, stdout, stderr = streams
        try:
            self.process = subprocess.Popen(
                words,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(rules.fileno(), text.fileno(), info_end),
                start_new_session=True,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
            )
        except OSError as error:
            os.close(self._info)
            raise SandboxError(f"{tool.bwrap} cannot be started: {error.strerror}; {INSTALL}") from error
        finally:
            os.close(info_end)

    def find_init(self) -> None:
        """Read from bubblewrap which process is the sandbox's first. Raises SandboxError if it started none."""
        text, deadline = b"", time.monotonic() + START_S
        with open(self._info, "rb", buffering=0) as file:
            while b"}" not in text:
                if not _is_ready(file.fileno(), deadline - time.monotonic()):
                    raise SandboxError(f"bubblewrap has made no sandbox in {START_S:g} s")
                part = file.read(4096)
                if not part:
                    self.end()
                    said = _readable(_read(self._streams[2], SHOWN_BYTES)) or f"exit code {self.process.returncode}"
                    raise SandboxError(f"bubblewrap cannot make a sandbox: {said}; {_HINT}")
                text += part
        self._init_pid = int(json.loads(text)["child-pid"])
        with contextlib.suppress(OSError):  # ended already
            self._init = os.pidfd_open(self._init_pid)

    def status(self, deadline: float) -> Status:
        """Wait for the program's end, by itself or for a limit."""
        while True:
            if time.monotonic() >= deadline:
                return "timeout"
            if any(os.fstat(file.fileno()).st_size > self._limits.output_bytes for file in self._streams[1:]):
                return "output"
            if self._exceeds_memory():
                return "memory"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(min(LOOK_S, max(0.0, deadline - time.monotonic())))
                return "finished"

    def _exceeds_memory(self) -> bool:
        """Return whether the sandbox uses too much memory; a look after its end says nothing."""
        if self._init is None or used_bytes(self._init_pid) <= self._limits.memory_bytes:
            return False
        return not _is_ready(self._init, 0)

    def end(self) -> None:
        """Kill all processes of the sandbox and wait for their end; repeatable. Raises SandboxError."""
        init, self._init = self._init, None
        gone = True
        if init is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(init, signal.SIGKILL)
            gone = _is_ready(init, END_S)
            os.close(init)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)
        self.process.kill()
        self.process.wait()
        if not gone:
            raise SandboxError(f"a sandbox has not ended {END_S:g} s after it was killed")


def _is_ready(descriptor: int, within_s: float) -> bool:
    """Return whether there is something to read in time; of a process: whether it has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, within_s) * 1000))


def _read(file: IO[bytes], limit: int) -> bytes:
    """Return the start of a file, of one byte above the limit at most."""
    return os.pread(file.fileno(), limit + 1, 0)


def _readable(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:SHOWN_BYTES]


def used_bytes(init_pid: int) -> int:
    """Return the resident memory of a sandbox's processes and the size of its files.

    The sandbox's own /proc lists them; shared pages count in each. 0 while its first process has the root of this
    machine, and after its end. The caller checks that `init_pid` has not ended meanwhile.
    """
    total = 0
    with ExitStack() as stack, contextlib.suppress(FileNotFoundError, ProcessLookupError):

        def opened(name: str, below: int | None = None) -> int:
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=below)  # the same whatever happens to the path
            stack.callback(os.close, folder)
            return folder

        root = opened(f"/proc/{init_pid}/root")
        if os.path.samestat(os.fstat(root), os.stat("/")):  # bubblewrap has not changed it yet
            return 0
        processes = opened("proc", root)
        for pid in filter(str.isdigit, os.listdir(processes)):
            with (
                contextlib.suppress(OSError, IndexError),
                open(os.open(f"{pid}/statm", os.O_RDONLY, dir_fd=processes)) as file,
            ):
                total += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for name in ("tmp", "dev/shm"):
            usage = os.fstatvfs(opened(name, root))
            total += (usage.f_blocks - usage.f_bfree) * usage.f_frsize + (usage.f_files - usage.f_ffree) * INODE_BYTES
    return total


PROGRAM = "/sandbox/program.py"  # the program's path inside
NOBODY = 65534  # uid and gid inside a user namespace
OPEN_FILES = 32  # a socket of each may keep a fifth of a megabyte of the kernel
INSTALL = (
    "install it (Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap), or name a service with "
    "reward.sandbox=remote"
)

# Runs inside before the program: another user where bubblewrap was started by root, then the limits, which are not for
# bubblewrap itself. The program starts in a fresh interpreter, as a file.
PRELUDE = r"""
import os, resource, sys
uid, count, *rest = sys.argv[1:]
arguments, limits = rest[: int(count)], rest[int(count) :]
if int(uid):
    os.setgroups([])
    os.setresgid(*[int(uid)] * 3)
    os.setresuid(*[int(uid)] * 3)
with open("/proc/self/status") as status:
    fields = dict(line.split(":", 1) for line in status)
rights = [name for name in ("CapEff", "CapPrm", "CapAmb") if int(fields[name], 16)]
if rights or int(fields["NoNewPrivs"]) != 1 or int(fields["Seccomp"]) != 2:
    sys.exit("the sandbox is not locked: " + str({name: fields[name] for name in rights + ["NoNewPrivs", "Seccomp"]}))
for limit in limits:
    name, value = limit.split("=")
    number = getattr(resource, "RLIMIT_" + name)
    highest = resource.getrlimit(number)[1]
    value = int(value) if highest == resource.RLIM_INFINITY else min(int(value), highest)
    resource.setrlimit(number, (value, value))
os.closerange(3, 4096)
os.execv(sys.executable, [sys.executable, *arguments])
"""
# Without the packages of an interpreter nothing brings `exit` and `quit`, which programs of contests end with; the
# rest of Python's start-up takes longer than many a program.
START = f"""
import _sitebuiltins, builtins, sys
builtins.exit, builtins.quit = (_sitebuiltins.Quitter(name, "Ctrl-D") for name in ("exit", "quit"))
sys.argv, sys.path[0], __file__ = [{PROGRAM!r}], {os.path.dirname(PROGRAM)!r}, {PROGRAM!r}
exec(compile(open(__file__, encoding="utf-8").read(), __file__, "exec"))
"""


@dataclass(frozen=True)
class Tool:
    """bubblewrap of this machine, and the interpreter inside."""

    bwrap: str
    python: str  # its path, inside as outside
    prefixes: tuple[str, ...]  # folders of the interpreter outside of /usr, visible inside
    packages: bool = True  # whether programs may import the interpreter's packages

    @classmethod
    def find(cls, interpreter: str = "") -> Tool:
        """Return bubblewrap and an interpreter: a path, or this process's own. Raises SandboxError."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError(f"bubblewrap (bwrap) is not installed; {INSTALL}")
        own = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
        python = Path(interpreter) if interpreter else own
        if not python.is_absolute() or not os.access(python, os.X_OK):
            raise SandboxError(f"{str(python)!r} is not the absolute path of an interpreter")
        # A virtual environment refers to the interpreter that it was made of by a link.
        folders = {str(path.parent.parent) for path in (python, python.resolve())}
        if "/" in folders:
            raise SandboxError(f"{str(python)!r}: its folder is the root, all of which would be visible inside")
        prefixes = tuple(sorted(one for one in folders if not Path(one).is_relative_to("/usr")))
        return cls(bwrap, str(python), prefixes, packages=bool(interpreter))


def command(tool: Tool, limits: Limits, *, uid: int, filter_fd: int, program_fd: int, info_fd: int) -> list[str]:
    """Return the command of one run.

    uid: user that the program becomes, where bubblewrap is started by root; 0 of others, whose namespace has one.
    filter_fd, program_fd: descriptors that the filter of system calls and the program's text can be read from.
    info_fd: one that bubblewrap writes the process id of the sandbox's first process to.
    """
    words = [tool.bwrap, *(_ROOT if uid else _USER), "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    words += ["--info-fd", str(info_fd), "--seccomp", str(filter_fd)]
    words += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if Path("/", name).is_symlink():
            words += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif Path("/", name).is_dir():
            words += ["--ro-bind", f"/{name}", f"/{name}"]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for prefix in tool.prefixes:
        for parent in reversed(Path(prefix).parents[:-1]):
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", prefix, prefix]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp"):
        words += ["--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs", folder]
    words += ["--perms", "0755", "--dir", "/sandbox", "--perms", "0444", "--file", str(program_fd), PROGRAM]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--clearenv"]
    for name, value in VARIABLES.items():
        words += ["--setenv", name, value]
    arguments = ["-s", PROGRAM] if tool.packages else ["-s", "-S", "-c", START]
    words += ["--", tool.python, "-I", "-S", "-c", PRELUDE, str(uid), str(len(arguments)), *arguments]
    return [*words, *_resource_limits(limits)]


_COMMON = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
_DROPPED = ("--cap-drop", "ALL")
# Root needs no user namespace. Inside, the program becomes a user that nobody else is, and whose processes the kernel
# counts: the limit of processes does not bind root, nor a user namespace that root has made.
_ROOT = (*_COMMON, *_DROPPED, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
_USER = ("--unshare-user", *_COMMON, *_DROPPED, "--uid", str(NOBODY), "--gid", str(NOBODY))
VARIABLES = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program, the same score
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONIOENCODING": "utf-8",
    "MALLOC_ARENA_MAX": "1",  # each arena takes 64 MiB of address space
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def _resource_limits(limits: Limits) -> list[str]:
    """Return the limits of one process as the prelude reads them."""
    values = {
        "AS": limits.memory_bytes,
        "NPROC": limits.processes,
        "CPU": int(limits.timeout_s) + 2,  # seconds of each process: the wall clock ends it before
        "FSIZE": limits.tmp_bytes,
        "NOFILE": OPEN_FILES,
        "CORE": 0,
        "MEMLOCK": 0,
        "STACK": 8 << 20,
        "MSGQUEUE": 0,
    }
    return [f"{name}={value}" for name, value in values.items()]


def choose_uid() -> int:
    """Return a user id that root may take and nobody has; else 0."""
    if os.geteuid():
        return 0
    try:
        first, _, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
    except (OSError, ValueError):
        first, count = 0, 1 << 16
    end = min(first + count, 1 << 31)
    return random.SystemRandom().randrange(max(first + 1, end // 2), end)
