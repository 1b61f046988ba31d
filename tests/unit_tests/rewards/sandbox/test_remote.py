"""A sandbox at a service: the tests' own server of SandboxFusion's protocol over the local sandbox, and bad answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.schema.rollout import RemoteSandboxConfig, RewardSandboxConfig
from mega_rl.errors import UserError
from mega_rl.rewards.code import build_sandbox, check_sandbox, read_cases
from tests.helpers.sandboxes import local_sandbox
from tests.unit_tests.rewards.test_service import Answer, FakeService, Post, serving


def run(number: int, post: Post) -> Answer:
    """Answer as SandboxFusion does, by a run in the local sandbox."""
    body = post.body
    assert body["language"] == "python"
    ran = local_sandbox().run(body["code"], body["stdin"].encode(), timeout_s=body["run_timeout"])
    result = {
        "status": "Success" if ran.succeeded else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "Finished" if ran.status == "finished" else "TimeLimitExceeded",
            "execution_time": 0.1,
            "return_code": ran.return_code,
            "stdout": ran.stdout.decode(errors="replace"),
            "stderr": ran.stderr.decode(errors="replace"),
        },
        "executor_pod_name": None,
        "files": {},
    }
    return Answer(json.dumps(result).encode())


def finished(**changes: Any) -> Answer:
    """Return the answer of a run that printed 42, with changes of its result."""
    result = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "42\n", "stderr": ""}
    return Answer(json.dumps({"status": "Success", "message": "", "run_result": result | changes}).encode())


def settings(service: FakeService, **others: Any) -> RewardSandboxConfig:
    return RemoteSandboxConfig(url=service.url.replace("/score", "/run_code"), timeout_s=3.0, **others)


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
def test_service_runs_the_same_tests(answer: Any, program: str, passes: list[bool]) -> None:
    local_sandbox()
    with serving(run) as service:
        sandbox = build_sandbox(settings(service))
        assert [case.run(sandbox, program, 2.0) for case in read_cases(answer)] == passes
    post = service.posts[0]
    assert (post.path, post.body["run_timeout"], post.body["memory_limit_MB"]) == ("/run_code", 2.0, 512)


def test_key_goes_with_each_request(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    key.chmod(0o600)
    with serving(lambda number, post: Answer(b"sesame", status=403) if number else finished()) as service:
        check_sandbox(settings(service, key_file=str(key)))
        with pytest.raises(UserError, match=r"reward.sandbox=remote: sandbox service .*run_code: HTTP 403") as error:
            check_sandbox(settings(service, key_file=str(key)))
    assert service.posts[0].headers["Authorization"] == "Bearer sesame"
    assert "sesame" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Answer(b"no JSON"), "no run_result that finished .*no JSON"),
        (Answer(b"[" * 100_000), "no run_result that finished"),
        (Answer(b"[1]"), "no run_result that finished"),
        (Answer(b'{"status": "SandboxError", "message": "no disk"}'), "no run_result that finished .*no disk"),
        (finished(status="Error"), "no run_result that finished .*Error"),
        (finished(return_code=True), "no run_result that finished .*true"),
        (finished(stdout=3), "output b'3' of"),
        (finished(stdout="41"), "output b'41' of"),
        (Answer(status=302), "HTTP 302"),
        (Answer(b"x" * (6 << 20)), "an answer of more than"),
    ],
)
def test_other_answers_are_a_mistake(answer: Answer, why: str) -> None:
    with serving(lambda number, post: answer) as service, pytest.raises(UserError, match=why):
        check_sandbox(settings(service))


def test_busy_service_is_asked_again() -> None:
    answers = (Answer(status=503), Answer(status=429), finished())
    with serving(lambda number, post: answers[number]) as service:
        check_sandbox(settings(service))
    assert len(service.posts) == 3


def test_limits_of_time_and_output_are_kept() -> None:
    answers = (finished(status="TimeLimitExceeded", return_code=None), finished(stdout="x" * 2000))
    with serving(lambda number, post: answers[number]) as service:
        sandbox = build_sandbox(settings(service, output_kib=1))
        assert [sandbox.run("", b"", timeout_s=1).status for _ in answers] == ["timeout", "output"]
