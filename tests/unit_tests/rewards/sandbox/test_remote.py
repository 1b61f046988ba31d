"""A sandbox at a service: the tests' own server of SandboxFusion's protocol over the local sandbox, and bad answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.schema import RewardSandboxConfig
from mega_rl.errors import UserError
from mega_rl.rewards.code import build_sandbox, check_sandbox, read_cases
from mega_rl.rewards.sandbox.limits import SandboxError
from tests.helpers.sandboxes import local_sandbox

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Service:
    """A server whose answers a test decides; `requests` are what it has got."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.answer: Answer = run
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append((self.path, dict(self.headers), body))
                status, answer = service.answer(body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/run_code"


@pytest.fixture
def service() -> Iterator[Service]:
    own = Service()
    thread = threading.Thread(target=own.server.serve_forever, args=(0.02,))
    thread.start()
    yield own
    own.server.shutdown()
    own.server.server_close()
    thread.join()


def run(body: dict[str, Any]) -> tuple[int, Any]:
    """Answer as SandboxFusion does, by a run in the local sandbox."""
    assert body["language"] == "python"
    ran = local_sandbox().run(body["code"], body["stdin"].encode(), timeout_s=body["run_timeout"])
    return 200, {
        "status": "Success" if ran.succeeded else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "Finished" if ran.status == "finished" else "TimeLimitExceeded",
            "execution_time": ran.seconds,
            "return_code": ran.return_code,
            "stdout": ran.stdout.decode(errors="replace"),
            "stderr": ran.stderr.decode(errors="replace"),
        },
        "executor_pod_name": None,
        "files": {},
    }


def finished(**changes: Any) -> tuple[int, Any]:
    """Return the answer of a run that printed 42, with changes of its result."""
    result = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "42\n", "stderr": ""}
    return 200, {"status": "Success", "message": "", "run_result": result | changes}


def settings(service: Service, **others: Any) -> RewardSandboxConfig:
    return RewardSandboxConfig(kind="remote", url=service.url, timeout_s=3.0, **others)


@pytest.mark.parametrize(
    ("answer", "program", "passes"),
    [
        ({"inputs": ["1", "2"], "outputs": ["2", "5"]}, "print(2 * int(input()))", [True, False]),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f"}, "def f(x): return 2 * x", [True]),
        (["assert f(1) == 2", "assert f(1) == 3"], "def f(x): return 2 * x", [True, False]),
        (["assert f(1) == 2"], "while True: pass", [False]),
        (["assert f(1) == 2"], "import os\nos._exit(0)", [False]),
    ],
)
def test_the_same_tests_pass_at_a_service(service: Service, answer: Any, program: str, passes: list[bool]) -> None:
    local_sandbox()
    sandbox = build_sandbox(settings(service))
    assert [case.run(sandbox, program, 2.0)[0] for case in read_cases(answer)] == passes
    path, _, body = service.requests[0]
    assert path == "/run_code"
    assert body["run_timeout"] == 2.0
    assert body["memory_limit_MB"] == 512


def test_the_key_goes_with_each_request(service: Service, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    key.chmod(0o600)
    service.answer = lambda body: finished()
    check_sandbox(settings(service, key_file=str(key)))
    assert service.requests[0][1]["Authorization"] == "Bearer sesame"
    service.answer = lambda body: (403, {"no": "sesame"})
    with pytest.raises(UserError, match=r"reward.sandbox.kind=remote: sandbox service .*run_code: HTTP 403") as error:
        check_sandbox(settings(service, key_file=str(key)))
    assert "sesame" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, b"no JSON"), "no JSON: .no JSON"),
        ((200, b"[" * 100_000), "no JSON"),
        ((200, [1]), 'no status "Success"'),
        ((200, {"status": "SandboxError", "message": "no disk"}), "SandboxError: 'no disk'"),
        ((200, {"status": "Success", "run_result": None}), "Success: None"),
        (finished(status="Error"), "run_result.status 'Error'"),
        (finished(return_code=None), "return_code None"),
        (finished(return_code=True), "return_code True"),
        (finished(stdout=3), "output b'' of"),
        (finished(stdout="41"), "output b'41' of"),
        ((302, {}), "HTTP 302.*redirects are not followed"),
        ((200, b"x" * (6 << 20)), "an answer of more than"),
    ],
)
def test_a_service_that_answers_something_else_is_a_mistake(service: Service, answer: Any, why: str) -> None:
    service.answer = lambda body: answer
    with pytest.raises(UserError, match=why):
        check_sandbox(settings(service))


def test_a_busy_service_is_asked_again(service: Service) -> None:
    answers = iter([(503, {}), (429, {}), finished()])
    service.answer = lambda body: next(answers)
    check_sandbox(settings(service))
    assert len(service.requests) == 3


def test_limits_of_time_and_output(service: Service) -> None:
    sandbox = build_sandbox(settings(service, output_kib=1))
    service.answer = lambda body: finished(status="TimeLimitExceeded", return_code=None)
    assert sandbox.run("", b"", timeout_s=1).status == "timeout"
    service.answer = lambda body: finished(stdout="x" * 2000)
    assert sandbox.run("", b"", timeout_s=1).status == "output"


def test_a_service_that_is_not_there_is_an_error_of_the_sandbox() -> None:
    sandbox = build_sandbox(RewardSandboxConfig(kind="remote", url="http://127.0.0.1:9/run_code", timeout_s=1.0))
    with pytest.raises(SandboxError, match="all 4 tries failed"):
        sandbox.run("", b"", timeout_s=1)
