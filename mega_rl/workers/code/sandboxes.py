"""The sandbox of the settings reward.sandbox. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from mega_rl.config.schema import RewardSandboxConfig
from mega_rl.errors import UserError
from mega_rl.sandbox.bubblewrap import Tool
from mega_rl.sandbox.limits import MIB, Limits, SandboxError
from mega_rl.sandbox.local import LocalSandbox
from mega_rl.workers.code.cases import AssertCase
from mega_rl.workers.code.remote import RETRIES, WAIT_S, RemoteSandbox
from mega_rl.workers.code.suites import unfit
from mega_rl.workers.reward_service import RewardService
from mega_rl.workers.scoring.posting import Poster

SECTION = "reward.sandbox"


def build_sandbox(settings: RewardSandboxConfig) -> LocalSandbox | RemoteSandbox:
    """Return the sandbox, which has run nothing yet. Raises UserError where it cannot work, with the fix."""
    limits = Limits(
        timeout_s=settings.timeout_s,
        memory_bytes=settings.memory_mib * MIB,
        processes=settings.processes,
        output_bytes=settings.output_kib << 10,
        tmp_bytes=settings.tmp_mib * MIB,
    )
    if settings.kind == "remote":
        service = RewardService.find(settings.url, settings.key_file, SECTION)
        timeout_s = settings.timeout_s + WAIT_S
        return RemoteSandbox(Poster(service, section=SECTION, timeout_s=timeout_s, retries=RETRIES), limits)
    try:
        return LocalSandbox(Tool.find(settings.interpreter), limits)
    except SandboxError as error:
        raise UserError(f"{SECTION}.kind=local: {error}") from None


def check_sandbox(settings: RewardSandboxConfig) -> None:
    """Run a program in the sandbox of the settings. Raises UserError unless it works."""
    try:
        build_sandbox(settings).check()
    except SandboxError as error:
        raise UserError(f"{SECTION}.kind={settings.kind}: {error}") from None


def unfit_tests(settings: RewardSandboxConfig, cases: Sequence[AssertCase]) -> list[str]:
    """Return for each case why no program can be judged by it, or "". Raises UserError where the sandbox fails."""
    try:
        return [*unfit(build_sandbox(settings), [one.suite for one in cases], settings.timeout_s)] if cases else []
    except SandboxError as error:
        raise UserError(f"{SECTION}.kind={settings.kind}: {error}") from None
