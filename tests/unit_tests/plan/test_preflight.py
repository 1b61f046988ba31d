"""Preflight refuses a run that does not fit the GPUs here, and `mega-rl plan` answers without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mega_rl.cli.app import main
from mega_rl.config.keys import with_settings
from mega_rl.config.schema import Config
from mega_rl.converters.hf.config import read_hf_config
from mega_rl.plan.preflight import host
from mega_rl.plan.preflight.checkpoints import known_bug
from mega_rl.plan.preflight.host import check_memory, smallest_gpu
from tests.unit_tests.converters.tiny_configs import TINY
from tests.unit_tests.plan.models import QWEN3, QWEN3_8B, QWEN3_32B
from tests.unit_tests.plan.test_plan import COMMON, GB, OF_8B, OF_32B


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3), encoding="utf-8")
    return tmp_path


def refusal(monkeypatch: pytest.MonkeyPatch, hf: Any, gpus: int, own: dict[str, Any], size: int | None) -> list[str]:
    monkeypatch.setattr(host, "smallest_gpu", lambda: size)
    config = with_settings(Config(), {**COMMON, **own, "model.path": "Qwen"})
    return list(check_memory(config, {"model.path": hf}, gpus))


@pytest.mark.parametrize(("hf", "gpus", "own"), [(QWEN3_8B, 8, OF_8B), (QWEN3_32B, 64, OF_32B)], ids=["8b", "32b"])
def test_too_large_run_is_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch, hf: Any, gpus: int, own: dict[str, Any]
) -> None:
    (problem,) = refusal(monkeypatch, hf, gpus, own, 80 * GB)
    assert f"on {gpus} GPUs: it does not fit: rank " in problem
    assert "GB while generating (KV cache and logits" in problem
    assert "set rollout.backend=sglang (now hf)" in problem
    assert "mega-rl plan shows all of it" in problem


def test_fitting_runs_and_cpus_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, QWEN3_8B, 8, OF_8B, 200 * GB) == []
    assert refusal(monkeypatch, QWEN3_8B, 8, OF_8B, None) == []
    assert refusal(monkeypatch, QWEN3_8B, 8, {**OF_8B, "trainer.device": "cpu"}, 80 * GB) == []


def test_plan_refuses_families_that_transformers_computes_wrongly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mega_rl.plan.preflight.checkpoints.version", lambda package: "5.12.1")
    (tmp_path / "config.json").write_text(
        json.dumps(TINY["glm_moe_dsa"] | {"max_position_embeddings": 4096}), encoding="utf-8"
    )
    arguments = ["gsm8k_qwen3_8b_8gpu", f"model.path={tmp_path}", "engine.megatron.etp=1", "engine.megatron.tp=1"]
    assert main(["plan", *arguments, "--gpus", "8", "--gpu-memory", "80G"]) == 2
    assert "transformers" in capsys.readouterr().err
    hf = read_hf_config(tmp_path)
    assert [known_bug(hf, transformers=release) is None for release in ("5.12.1", "5.13.0")] == [False, True]


def test_preflight_plans_only_legal_settings(
    monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the settings: a run of illegal ones is not planned."""
    from mega_rl.plan import preflight as run

    seen: list[int] = []

    def record(config: Config, checkpoints: Any, world_size: int) -> list[str]:
        seen.append(world_size)
        return ["too large"]

    monkeypatch.setattr(run, "check_memory", record)
    config = with_settings(Config(), {"model.path": str(model), "trainer.run_dir": str(model / "run")})
    checkpoints = {"model.path": QWEN3_8B}
    assert "too large" in run._of_models(config, checkpoints, 1)
    illegal = with_settings(config, {"trainer.minibatch_size": 7})
    assert "too large" not in run._of_models(illegal, checkpoints, 1)
    assert seen == [1]


@pytest.mark.parametrize("shown", ["", "-1"])
def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    monkeypatch.setattr(host, "Child", lambda *_, **__: pytest.fail("the driver is asked"))
    assert smallest_gpu() is None


@pytest.mark.parametrize(("output", "size"), [("81559\n40960\n", 40960 << 20), ("No devices were found\n", None)])
def test_driver_names_the_smallest_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, size: int | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{output}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert smallest_gpu() == size


class TestCommand:
    def test_it_answers_without_torch(self, model: Path) -> None:
        """In a process of its own; JSON, so that the text around it does not matter."""
        program = (
            "import sys; from mega_rl.cli.app import main; "
            f"code = main(['plan', 'gsm8k_qwen3_8b_8gpu', 'model.path={model}', '--gpus', '8', '--gpu-memory', '80G', "
            "'--json']); assert 'torch' not in sys.modules, 'torch'; sys.exit(code)"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        record = json.loads(result.stdout)
        assert record["world_size"] == 8
        assert isinstance(record["fits"], bool)
        assert record["ranks"][0]["state"]["actor"]["weights"] > 4 * GB

    def test_text_begins_with_the_verdict(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert (
            main(["plan", "gsm8k_qwen3_8b_8gpu_fsdp", f"model.path={model}", "--gpus", "8", "--gpu-memory", "80G"]) == 0
        )
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"{model}: qwen3, 36 layers, 8.19 B parameters; 8 GPUs of 80.0 GB on 1 host, ")
        assert lines[1].startswith("Verdict: it ")

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--gpu-memory", "much"], "--gpu-memory='much': needs a size"),
            (["--layers", "apex"], "--layers='apex': legal: auto"),
            (["--gpu", "abacus"], "--gpu='abacus': legal: a100, h100, h200, b200"),
            (["--server-gpus", "8"], "--server-gpus: is of servers that are joined"),
            (["--server-link", "1"], "--server-link: is of servers that are joined"),
            (["--search"], "--search: engine.backend=fsdp has no layouts"),
            (["trainer.minibatch_size=7"], "trainer.minibatch_size=7 does not divide"),
            (["model.path=/nowhere"], "model.path: "),
        ],
    )
    def test_mistake_is_one_sentence(
        self, model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
    ) -> None:
        assert main(["plan", "gsm8k_qwen3_8b_8gpu_fsdp", f"model.path={model}", *arguments]) == 2
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == 1
        assert words in errors[0]
