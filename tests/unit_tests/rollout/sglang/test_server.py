"""A server's life: what it is given, how its start fails, who may talk to it, and that nothing of it is left.

Two real servers, started together: `own` of one rank belongs to another program, `pair` of two ranks to this one. The
tests that end them stand last.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mega_rl.errors import RunError
from mega_rl.rollout.sglang.control import GENERATION, Endpoint, Keys
from mega_rl.rollout.sglang.server import installation, launcher
from mega_rl.rollout.sglang.server import process as server
from mega_rl.rollout.sglang.server.installation import missing_tools
from mega_rl.rollout.sglang.server.process import ServerProcess, ServerSettings, arguments, environment
from tests.helpers.models import write_tiny_checkpoint
from tests.helpers.sglang import (
    DEVICE,
    START_S,
    assert_gone,
    generate,
    listening_addresses,
    needs_sglang,
    owner,
    private_folder,
    request,
    shared_files,
    wait_until,
)

SETTINGS = ServerSettings(Path("/some/checkpoint"))

# ---------------------------------------------------------------------------------------------------------------------
# What a server is given


def test_arguments_on_cuda() -> None:
    plain = replace(SETTINGS, device="cuda", dtype="bfloat16", tp=4, base_gpu=4)
    common = [
        "--model-path", "/some/checkpoint", "--host", "127.0.0.1", "--port", "31001", "--device", "cuda",
        "--dtype", "bfloat16", "--tp-size", "4", "--random-seed", "0", "--base-gpu-id", "4",
    ]  # fmt: skip
    assert arguments(plain, 31001) == [*common, "--skip-tokenizer-init"]
    args = {"max_total_tokens": 9, "mem_fraction_static": 0.6}
    assert arguments(replace(plain, memory_saver=True, deterministic=True, args=args), 31001) == [
        *common, "--skip-tokenizer-init", "--enable-memory-saver", "--enable-deterministic-inference",
        "--max-total-tokens", "9", "--mem-fraction-static", "0.6",
    ]  # fmt: skip


def test_the_environment_makes_no_rank_of_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", "LOCAL_RANK": "1",
            "TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "0", "PET_NNODES": "1", "OMP_NUM_THREADS": "77"}  # fmt: skip
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    given = environment(replace(SETTINGS, tp=2), scratch=tmp_path, packages=Path("/packages"))
    assert not given.keys() & (ours.keys() - {"OMP_NUM_THREADS"})
    assert given["OMP_NUM_THREADS"] != "77"
    assert given["CUDA_VISIBLE_DEVICES"] == "2,3"
    root = str(Path(server.__file__).parents[4])
    assert given["PYTHONPATH"].split(os.pathsep) == [root, "/packages", "/mine"]
    assert len(given["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert given["GLOO_SOCKET_IFNAME"] == "lo"
    elsewhere = environment(replace(SETTINGS, device="cuda", host="10.0.0.7"), scratch=tmp_path, packages=None)
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in elsewhere
    assert elsewhere.get("GLOO_SOCKET_IFNAME") == os.environ.get("GLOO_SOCKET_IFNAME")
    colocated = replace(SETTINGS, device="cuda", host="10.0.0.7", memory_saver=True)
    assert environment(colocated, scratch=tmp_path, packages=None)["NCCL_SOCKET_IFNAME"] == "lo"
    spanning = environment(replace(colocated, tp=2, nodes=2), scratch=tmp_path, packages=None)
    assert spanning.get("NCCL_SOCKET_IFNAME") == os.environ.get("NCCL_SOCKET_IFNAME")


def test_servers_find_the_tools_of_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SGLang compiles kernels when it starts, and `.venv/bin/mega-rl` puts neither ninja nor nvcc on PATH."""
    programs = tmp_path / "bin"
    toolkit = tmp_path / "packages" / "nvidia" / "cu13"
    for program in (programs / "ninja", toolkit / "bin" / "nvcc"):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "packages"))
    monkeypatch.setattr(installation, "SYSTEM_TOOLKIT", tmp_path / "none")
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    given = environment(replace(SETTINGS, device="cuda"), scratch=tmp_path, packages=None)
    assert given["PATH"] == os.pathsep.join([str(programs), os.defpath])
    assert given["CUDA_HOME"] == str(toolkit)
    monkeypatch.setenv("PATH", str(toolkit / "bin"))
    assert "CUDA_HOME" not in environment(SETTINGS, scratch=tmp_path, packages=None), "nvcc is on PATH"
    nowhere = {"PATH": str(tmp_path), "CUDA_HOME": "/nowhere", "HOME": "/nowhere", "CXX": "c+++"}
    assert list(missing_tools(nowhere)) == [
        "no compiler /nowhere/bin/nvcc: install the CUDA toolkit or set CUDA_HOME to its folder",
        "no C++ compiler c+++ on PATH: install g++, or name one in CXX",
        "HOME=/nowhere is not a writable folder, and compiled kernels are kept there: set HOME to one",
    ]
    (programs / "ninja").unlink()
    assert f"no program ninja in {programs} or on PATH: pip install ninja" in list(missing_tools(nowhere))


# ---------------------------------------------------------------------------------------------------------------------
# Which SGLang


# ---------------------------------------------------------------------------------------------------------------------
# Starts that fail, with a program that behaves as given in SGLang's place

SCRIPTED = """
import json, os, sys, threading, time, http.server
how = sys.argv[1]
options = dict(zip(sys.argv[2:], sys.argv[3:]))
address = (options["--host"], int(options["--port"]))
print("a scripted server says hello", flush=True)
if how == "dies":
    print("Traceback (most recent call last):\\n  File x, line 1\\n    source code\\nValueError: no such model")
    sys.exit(3)
if how == "is silent":
    os.fork()
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(503 if how == "is never healthy" else 200, b"")
    def do_POST(self):
        if how == "hangs":
            time.sleep(600)
        bodies = {"generates nothing": b'{"output_ids": []}', "fails": b'{"error": "oom"}'}
        self.answer(500 if how == "fails" else 200, bodies.get(how, b'{"output_ids": [7]}'))
    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(address, Handler).serve_forever()
"""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Makes a ServerProcess whose program behaves as given; nothing of it may be left."""
    monkeypatch.setattr(server, "require_sglang", lambda **_: installation.Installation("0.5.21", None))
    made: list[ServerProcess] = []

    def make(how: str, *, timeout_s: float = 30.0, **given: Any) -> ServerProcess:
        monkeypatch.setattr(server, "PROGRAM", (sys.executable, "-c", SCRIPTED, how))
        settings = replace(SETTINGS, start_timeout_s=timeout_s, **given)
        made.append(ServerProcess(settings, index=5, folder=tmp_path / "logs"))
        made[-1].start()
        return made[-1]

    yield make
    for process in made:
        process.stop()


@pytest.mark.parametrize(
    ("how", "timeout_s", "said"),
    [
        ("dies", 30.0, r"ended with exit code 3 before /health answered"),
        ("is silent", 2.0, r"/health did not answer 200 within 2 s \(last: .*ConnectError"),
        ("is never healthy", 2.0, r"/health did not answer 200 within 2 s \(last: .*HTTP 503.*\)"),
        ("generates nothing", 30.0, r"the first generation was answered \{'output_ids': \[\]\}"),
        ("fails", 30.0, r"the first generation failed: .*HTTP 500: .*oom"),
    ],
)
def test_failed_start_is_explained_and_leaves_nothing(scripted: Any, how: str, timeout_s: float, said: str) -> None:
    process = scripted(how, timeout_s=timeout_s)
    process_group = process.pid
    start = time.monotonic()
    with pytest.raises(RunError, match=said) as caught:
        process.wait_ready()
    assert time.monotonic() - start < 30.0
    message = str(caught.value)
    assert message.startswith("SGLang server 5 did not start: ")
    assert str(process.log_file) in message
    assert "\n  a scripted server says hello" in message
    assert not launcher.group_members(process_group)
    assert process.exit_code is not None
    if how == "dies":
        assert message.endswith("\n  Traceback (most recent call last):\n  ValueError: no such model")


def test_keys_are_gone_before_the_server_is_killed(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may kill the rank while it waits for the server's end."""
    process, seen = scripted("hangs"), []
    scratch, end = process._scratch, launcher.end_group
    assert scratch.exists()
    monkeypatch.setattr(launcher, "end_group", lambda pid, **given: seen.append(scratch.exists()) or end(pid, **given))
    process.stop()
    assert seen == [False]
    assert not scratch.exists()


def test_server_that_starts_again_has_new_keys(scripted: Any) -> None:
    process = scripted("well")
    first, endpoint = process.pid, process.wait_ready()
    process.stop()
    process.start()
    assert not launcher.group_members(first)
    assert process.wait_ready().keys != endpoint.keys
    assert process.log_file.read_text("utf-8").count("hello") == 2  # appended
    os.kill(process.pid, signal.SIGKILL)
    while process.exit_code is None:
        time.sleep(0.01)
    assert process.exit_code == -signal.SIGKILL
    process.stop()
    process.stop()
    assert process.exit_code == -signal.SIGKILL


def test_quantised_checkpoint_is_served_without_its_weights(scripted: Any, tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    for name, text in (("config.json", json.dumps(config)), ("model.safetensors", "")):
        (tmp_path / name).write_text(text)
    process = scripted("well", model_path=tmp_path, config_changes={"quantization_config": None})
    deadline = time.monotonic() + 20.0  # until the child has become the server
    while "--model-path" not in (given := psutil.Process(process.pid).cmdline()) and time.monotonic() < deadline:
        time.sleep(0.01)
    folder = Path(given[given.index("--model-path") + 1])
    assert given[given.index("--load-format") + 1] == "dummy"
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "llama"}
    process.stop()
    assert not folder.exists()


# ---------------------------------------------------------------------------------------------------------------------
# Real servers


@dataclass(frozen=True)
class Running:
    """A real server that generates."""

    group: int  # its processes
    endpoint: Endpoint
    log_file: Path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mixture of experts. Not tied, for of the mixtures SGLang ties none: it leaves their output layer at zero."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), family="qwen3_moe", tied=False)


@pytest.fixture(scope="module")
def both(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Running, ServerProcess, Any]]:
    """`own`, `pair`, the latter's ServerProcess and the former's program."""
    folder = tmp_path_factory.mktemp("own")
    settings = ServerSettings(
        checkpoint, tp=2, device=DEVICE, args={"max_total_tokens": 20000}, start_timeout_s=START_S
    )
    program = owner(checkpoint, folder, ready=True)
    try:
        with ServerProcess(settings, index=1, folder=tmp_path_factory.mktemp("pair")) as process:
            pair = Running(process.pid or 0, process.wait_ready(), process.log_file)
            assert program.stdout is not None
            said = json.loads(program.stdout.readline())
            endpoint = Endpoint(0, said["url"], Keys(said["api_key"], said["admin_key"]))
            yield Running(said["pid"], endpoint, folder / "server-0.log"), pair, process, program
    finally:
        program.kill()
        program.communicate()


@pytest.fixture(scope="module")
def own(both: Any) -> Running:
    return both[0]


@pytest.fixture(scope="module")
def pair(both: Any) -> Running:
    return both[1]


def routes(endpoint: Endpoint) -> list[tuple[str, str]]:
    """(method, path) of every endpoint that the server says it has, and of some more."""
    status, described = request(endpoint, "/openapi.json", key="admin")
    assert status == 200
    actual = [
        (method.upper(), re.sub(r"\{[^}]*\}", "x", path))
        for path, methods in described["paths"].items()
        for method in methods
    ]
    extra = [
        "/",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/metrics",
        "/metrics/",
        "/no/such/path",
        "//generate",
        "/health/x",
    ]
    return [*actual, *(("GET", path) for path in extra), ("OPTIONS", "/generate"), ("HEAD", "/health")]


@needs_sglang
def test_every_endpoint_refuses_missing_and_wrong_keys(own: Running) -> None:
    actual = routes(own.endpoint)
    assert {"/generate", "/update_weights_from_tensor", "/abort_request"} <= {path for _, path in actual}
    assert len(actual) > 80, "SGLang 0.5.21 has about 90"
    let_in = []
    for method, path in actual:
        wrong_for_it = "admin" if path in GENERATION else "api"
        for key in (None, "wrong", wrong_for_it):
            status, _ = request(own.endpoint, path, {} if method == "POST" else None, key=key, method=method)
            if status != 401:
                let_in.append((method, path, key, status))
    assert not let_in
    status, _ = request(own.endpoint, "/health")
    assert status == 200, "and the server is none the worse for it"


@needs_sglang
def test_the_keys_are_nowhere_to_be_read(own: Running, pair: Running) -> None:
    for running in (own, pair):
        keys = (running.endpoint.keys.api_key, running.endpoint.keys.admin_key)
        _, settings = request(running.endpoint, "/server_info")
        assert settings["tp_size"], "the answer holds the server's settings"
        log = running.log_file.read_text("utf-8")
        assert "server_args=" in log
        shown = [json.dumps(settings), log]
        for process in launcher.group_members(running.group):
            shown += [*process.cmdline(), *process.environ().values()]
        assert not [text[:200] for text in shown for key in keys if key in text]


@needs_sglang
def test_only_loopback_listens(own: Running, pair: Running) -> None:
    for running in (own, pair):
        assert listening_addresses(running.group) == {"127.0.0.1"}


@needs_sglang
def test_experts_compute_as_transformers_does(own: Running, pair: Running, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompts = [[3, 4, 5], [7], list(range(2, 40)), [9] * 20]
    for running in (own, pair):
        for prompt, answer in zip(prompts, generate(running.endpoint, prompts, max_new_tokens=32), strict=True):
            tokens = answer["output_ids"]
            with torch.no_grad():
                expected = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            assert tokens == expected.argmax(-1).tolist()
            given = torch.tensor([logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]])
            # float32 sums in another order: 7e-7 seen
            torch.testing.assert_close(
                given, expected.gather(1, torch.tensor(tokens)[:, None])[:, 0], atol=1e-5, rtol=0
            )


@needs_sglang
def test_server_with_killed_main_process_leaves_nothing(both: Any) -> None:
    _, pair, process, _ = both
    files, folder = shared_files(pair.group), private_folder(pair.group)
    assert len(launcher.group_members(pair.group)) >= 5, "the main process, what cleans up, two ranks, the detokenizer"
    assert files, "the ranks' message queue"
    os.kill(pair.group, signal.SIGKILL)
    assert_gone(pair.group, files)
    # Its main thread may have ended while others still do; only then has the process.
    wait_until("end of the main process", lambda: process.exit_code is not None, timeout_s=10.0)
    assert process.exit_code == -signal.SIGKILL
    process.stop()
    assert not folder.exists()


@needs_sglang
def test_a_server_whose_trainer_is_killed_leaves_nothing(both: Any) -> None:
    own, _, _, program = both
    folder = private_folder(own.group)
    assert (folder / launcher.KEYS_FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    files = shared_files(own.group)
    program.kill()
    assert_gone(own.group, {*files, folder})
