"""Settings of the sandbox for the reward function code_tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_rl.config.setting import Kind, setting

if TYPE_CHECKING:
    from mega_rl.config.schema.rollout import RewardConfig

CODE_TESTS = "code_tests"  # the reward function that reads these settings


def runs_code(reward: RewardConfig) -> bool:
    """Return whether a reward function of a run reads the settings of the sandbox."""
    functions = reward.functions.values() if reward.functions else (reward.function,)
    return reward.source.name == "function" and CODE_TESTS in functions


@dataclass(frozen=True)
class RewardSandboxConfig(Kind):
    """Settings of every sandbox."""

    timeout_s: float = setting(6.0, "Wall clock of one case, with the start of its sandbox.", unit="seconds", above=0.0)
    total_s: float = setting(20.0, "Wall clock of all cases of a response.", unit="seconds", above=0.0)
    memory_mib: int = setting(
        512, "Address space of each process of a case, and resident memory of all.", unit="MiB", min=64
    )
    output_kib: int = setting(256, "Longest output of a case, and longest error output.", unit="KiB", min=1)
    parallel: int = setting(1, "Cases of a response at a time.", min=1, max=64)
    score: str = setting(
        "share", "Score of a response: the share of cases that pass, or 1 if all pass.", choices=("share", "all")
    )


@dataclass(frozen=True)
class LocalSandboxConfig(RewardSandboxConfig):
    """Locked processes under bubblewrap on the rank's host."""

    name = "local"

    processes: int = setting(
        16, "Processes and threads of a case at a time; tests of calls and asserts take three.", min=4, max=1024
    )
    tmp_mib: int = setting(16, "Size of a case's temporary files, and of its shared memory.", unit="MiB", min=1)
    interpreter: str = setting("", "Absolute path of the Python inside; empty: this environment's, without packages.")


@dataclass(frozen=True)
class RemoteSandboxConfig(RewardSandboxConfig):
    """A service that speaks SandboxFusion's protocol."""

    name = "remote"

    url: str = setting("", "Address of the service, as http://127.0.0.1:8080/run_code.")
    key_file: str = setting("", "File with the service's bearer token, mode 0600; empty sends none.")
