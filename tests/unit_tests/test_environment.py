"""Variables of a run's processes: what follows from its config, what the user's win over, what servers do not get."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mega_rl import environment
from mega_rl.config.loader import load
from mega_rl.parallel import accelerator
from mega_rl.rollout.sglang.server import process as server

TP = "engine.megatron.tp=2"
SERVERS = "rollout.backend=sglang"
ORDERED = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
BESIDE_SERVERS = {"NCCL_CUMEM_ENABLE": "0"}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The process's environment, to be changed, in which the user has set nothing."""
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", *accelerator.DETERMINISTIC)
    variables = {name: value for name, value in os.environ.items() if name not in names}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(environment, "_set_by_run", set())
    return variables


def variables_of(settings: list[str]) -> dict[str, str]:
    config = load(None, settings)
    return accelerator.variables_of(config.engine, config.rollout, config.trainer)


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ([], {}),
        ([TP], ORDERED),
        ([TP, "engine.megatron.ddp=torch_fsdp2"], {}),
        ([TP, "engine.megatron.ddp=megatron_fsdp"], {}),
        (["engine.backend=fsdp"], {}),
        ([SERVERS], BESIDE_SERVERS | {"NCCL_NVLS_ENABLE": "0"}),
        ([SERVERS, "rollout.sglang.placement=separate"], BESIDE_SERVERS),
        ([SERVERS, "trainer.async_steps=1"], BESIDE_SERVERS),
        ([SERVERS, "rollout.sglang.urls=[http://h:1]"], BESIDE_SERVERS),
        (["trainer.deterministic=true"], accelerator.DETERMINISTIC),
    ],
)
def test_what_a_rank_on_a_gpu_is_given(settings: list[str], variables: dict[str, str]) -> None:
    assert variables_of(settings) == variables


def test_servers_get_neither_what_the_run_has_set_nor_the_trainers_allocator(
    shell: dict[str, str], tmp_path: Path
) -> None:
    shell |= {"NCCL_ALGO": "Tree", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "MINE": "1"}
    shell |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert environment.use({"NCCL_ALGO": "Ring"}) == [], "what the user has set stays"
    environment.use({**ORDERED, **accelerator.DETERMINISTIC})
    given = server.environment(server.ServerSettings(tmp_path, device="cuda"), scratch=tmp_path, packages=None)
    assert given["MINE"] == "1"
    assert given["NCCL_ALGO"] == "Tree", "the user's own reaches servers, too"
    assert not given.keys() & {
        "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    }  # fmt: skip


@pytest.mark.parametrize(("late", "said"), [(False, []), (True, ["CUDA was used before the run"])])
def test_variables_are_there_before_cuda_is_asked_for_devices(
    late: bool,
    said: list[str],
    shell: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str | None] = []

    def is_available() -> bool:
        seen.append(shell.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return False

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: late)
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    accelerator.prepare("auto", variables=ORDERED)
    assert seen[0] == "1"
    assert [record.getMessage()[:28] for record in caplog.records] == said


def test_the_page_names_every_variable() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")
    for name, value in variables_of([TP, SERVERS, "trainer.deterministic=true"]).items():
        assert f"| `{name}` | `{value}` |" in page
