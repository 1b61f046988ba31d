"""Command line of bubblewrap, and the program that drops the last rights inside."""

from __future__ import annotations

import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from mega_rl.rewards.sandbox import Limits, SandboxError

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
        if sys.platform != "linux":
            raise SandboxError(f"needs Linux, and this is {sys.platform}; use reward.sandbox=remote")
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
        prefixes = tuple(sorted(one for one in folders if not _below_usr(one)))
        return cls(bwrap, str(python), prefixes, packages=bool(interpreter))


def _below_usr(folder: str) -> bool:
    return Path(folder) == Path("/usr") or Path("/usr") in Path(folder).parents


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
