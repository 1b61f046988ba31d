"""Programs under bubblewrap: what they see, what ends them, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import mega_rl.rewards.sandbox.local as local
from mega_rl.rewards.sandbox import MIB, Limits, SandboxError
from mega_rl.rewards.sandbox.local import LocalSandbox, Tool
from tests.helpers.sandboxes import SMALL, local_sandbox


def test_a_program_gets_its_input_and_its_output_is_read() -> None:
    ran = local_sandbox().run(
        "import sys\nprint(input()[::-1])\nsys.stderr.write('e')\nsys.exit(3)", b"abc\n", timeout_s=5
    )
    assert (ran.status, ran.return_code, ran.stdout, ran.stderr) == ("finished", 3, b"cba\n", b"e")
    assert not ran.succeeded


def test_large_inputs_and_closed_streams_block_nobody() -> None:
    sandbox, text = local_sandbox(memory_bytes=256 * MIB), b"x" * (3 << 20)
    assert sandbox.run("print(len(open(0).read()))", text, timeout_s=5).stdout == b"3145728\n"
    assert sandbox.run("print(1)", text, timeout_s=5).stdout == b"1\n"
    ran = sandbox.run("import os, time\nfor fd in range(3): os.close(fd)\ntime.sleep(0.2)", text, timeout_s=5)
    assert (ran.status, ran.return_code) == ("finished", 0)


@pytest.mark.parametrize(
    ("program", "status", "code"),
    [
        ("while True: pass", "timeout", None),
        ("import time\ntime.sleep(60)", "timeout", None),
        ("while True: print('x' * 1000)", "output", None),
        ("import os\nwhile True: os.write(2, b'x' * 1000)", "output", None),
        ("x = bytearray(1 << 30)", "finished", 1),
        ("import os, time\nfor _ in range(2): os.fork()\nx = bytearray(90 << 20)\ntime.sleep(5)", "memory", None),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "finished", 128 + signal.SIGSEGV),
        ("import os\nos._exit(7)", "finished", 7),
        ("def f(: pass", "finished", 1),
        ("\0", "finished", 1),
    ],
)
def test_how_programs_end(program: str, status: str, code: int | None) -> None:
    ran = local_sandbox(output_bytes=10_000).run(program, b"", timeout_s=1.5)
    assert (ran.status, ran.return_code) == (status, code)
    assert max(len(ran.stdout), len(ran.stderr)) <= 10_001


SLEEP = "import sys; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}])"


def test_nothing_of_a_program_is_left() -> None:
    marker = f"left-{os.getpid()}"
    program = f"""
import os
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        {SLEEP.format(marker=marker)}
print("left")
"""
    sandbox = local_sandbox()
    assert sandbox.run(program, b"", timeout_s=5).stdout == b"left\n"
    assert processes_with(marker) == []
    assert sandbox.run(f"{program}\nwhile True: pass", b"", timeout_s=1).status == "timeout"
    assert processes_with(marker) == []


def processes_with(text: str) -> list[int]:
    """Return the processes with a text in their command, but this one."""
    processes = psutil.process_iter(["cmdline"])
    return [one.pid for one in processes if text in " ".join(one.info["cmdline"] or ()) and one.pid != os.getpid()]


def test_everything_ends_with_the_process_that_started_it() -> None:
    local_sandbox()
    marker = f"orphan-{os.getpid()}"
    inside = "import os\n" + SLEEP.format(marker=marker).replace(repr(marker), f"{marker!r} + '-inside'")
    run = f"LocalSandbox(Tool.find(), replace(SMALL, timeout_s=60.0)).run({inside!r}, b'', timeout_s=60)"
    outside = f"from tests.helpers.sandboxes import *\n{run}"
    starter = subprocess.Popen([sys.executable, "-c", outside])
    inner = f"{marker}-inside"  # in no command outside
    assert eventually(lambda: processes_with(inner))
    starter.kill()
    starter.wait()
    assert eventually(lambda: not processes_with(inner))


def eventually(holds: object) -> bool:
    """Return whether a condition holds within ten seconds."""
    assert callable(holds)
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(holds())


NAMESPACES = ("pid", "net", "ipc", "uts", "mnt")


def test_what_a_program_sees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_SECRET", "sesame")
    (tmp_path / "secret").write_text("sesame")
    program = f"""
import json, os, sys
FOLDERS = "/", "/usr", "/dev", "/sandbox", sys.prefix, "/proc"
def can(function, *arguments):
    try: return function(*arguments) is not None
    except OSError: return False
print(json.dumps({{
    "environment": sorted(os.environ),
    "root": sorted(os.listdir("/")),
    "home": can(os.listdir, "/root/.ssh") or can(os.listdir, "/home"),
    "file": can(open, {str(tmp_path / "secret")!r}),
    "repository": can(os.listdir, {str(Path(__file__).parent)!r}),
    "writable": [path for path in FOLDERS if can(open, path + "/x", "w")],
    "sysctl": can(open, "/proc/sys/kernel/hostname", "w"),
    "tmp": can(open, "/tmp/x", "w"),
    "root user": os.getuid() == 0 or 0 in os.getgroups() or can(os.setuid, 0),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "interfaces": os.listdir("/sys/class/net") if os.path.exists("/sys") else [],
    "read-only": [line.split()[4] for line in open("/proc/self/mountinfo") if line.split()[5].startswith("ro")],
    "namespaces": [os.readlink(f"/proc/self/ns/{{name}}") for name in {NAMESPACES}],
}}))
"""
    ran = local_sandbox().run(program, b"", timeout_s=5)
    assert ran.succeeded, ran.stderr
    sees = json.loads(ran.stdout)
    assert "A_SECRET" not in sees["environment"]
    assert not {"home", "etc", "var", "work", "mnt", "run", "sys"} & set(sees["root"]) - {"etc"}
    for name in ("home", "file", "repository", "sysctl", "root user"):
        assert not sees[name], name
    assert sees["tmp"]
    assert sees["writable"] == []
    assert sees["processes"] <= 3
    assert sees["interfaces"] == []
    assert {"/", "/dev", "/usr"} <= set(sees["read-only"])
    assert not set(sees["namespaces"]) & {os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_user_without_rights_gets_the_same_sandbox(tmp_path: Path) -> None:
    """Bubblewrap then makes a user namespace, in which the limit of processes binds by itself."""
    local_sandbox()
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        pytest.skip("no interpreter that other users may read: apt-get install python3")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.chdir("/")
            LocalSandbox(Tool(shutil.which("bwrap") or "", python, ()), replace(SMALL, timeout_s=20.0)).check()
            code = 0
        except SandboxError as error:
            os.write(2, str(error).encode())
            code = 77 if "uid map" in str(error) or "namespace" in str(error) else 1
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 77:
        pytest.skip("users may make no namespaces here")
    assert code == 0


def test_without_bubblewrap_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxError, match=r"bwrap\) is not installed; install it \(Debian, Ubuntu: apt-get install"):
        Tool.find()


@pytest.mark.parametrize("script", ["echo no namespaces >&2; exit 1", "exit 1", "exec sleep 60 >/dev/null"])
def test_a_bubblewrap_that_fails_is_an_error_and_no_run(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_rl.rewards.sandbox.local.START_S", 1.0)
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    tool = Tool(str(fake), sys.executable, ())
    with pytest.raises(
        SandboxError, match=r"bubblewrap (cannot make a sandbox: (no namespaces|exit code 1)|has made no)"
    ):
        LocalSandbox(tool, Limits()).run("print(1)", b"", timeout_s=1)


def test_a_sandbox_with_rights_left_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the filter of system calls is one that allows everything but is not there."""
    sandbox = local_sandbox()
    whole = local.command

    def without_filter(*arguments: object, **descriptors: object) -> list[str]:
        words = whole(*arguments, **descriptors)  # type: ignore[arg-type]
        place = words.index("--seccomp")
        return words[:place] + words[place + 2 :]

    monkeypatch.setattr(local, "command", without_filter)
    ran = sandbox.run("print('ran')", b"", timeout_s=5)
    assert ran.stdout == b""
    assert b"the sandbox is not locked: {'NoNewPrivs': '\\t1\\n', 'Seccomp': '\\t0\\n'}" in ran.stderr
