"""Releases of the packages that mega_rl runs on, as the installed metadata of pyproject.toml declares them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from mega_rl.errors import UserErrors

# Of the extra `gpu`, and no dependency. Megatron-Core imports it wherever it is installed; 0.16.1 asks for >=2.9,<2.12.
TRANSFORMER_ENGINE = Requirement("transformer-engine==2.11.*")


@cache
def requirements() -> tuple[Requirement, ...]:
    """Return the dependencies, in their order, and Transformer Engine.

    Megatron-Core is not among them: mega_rl.parallel.accelerator has a table of its releases. Sources that are only on
    the path declare nothing.
    """
    try:
        declared = [Requirement(text) for text in requires("mega_rl") or [] if "extra ==" not in text]
    except PackageNotFoundError:
        declared = []
    return (*(one for one in declared if one.name != "megatron-core"), TRANSFORMER_ENGINE)


@cache
def require() -> None:
    """Raise UserErrors with a line for each installed package whose release is not allowed.

    What is allowed once is not read again in this process: it takes 12 ms.
    """
    if lines := list(problems()):
        raise UserErrors(lines)


def problems() -> Iterator[str]:
    """Yield a line for each installed package whose release is not allowed, with the fix."""
    for one in requirements():
        installed = installed_version(one.name)
        if installed is None or is_allowed(one, installed):
            continue
        if one is TRANSFORMER_ENGINE:
            fix = (
                f"--no-build-isolation \"{one.name}[core_cu13,pytorch]{one.specifier}\"', or 'pip uninstall {one.name}"
            )
        else:
            fix = f'"{one}"'
        yield f"{one.name} {installed} is installed, which mega_rl does not run on; run 'pip install {fix}'"


def is_allowed(required: Requirement, installed: str) -> bool:
    """Return whether a release is allowed; builds as 2.14.0a0+nv26.10 count as the release to come."""
    return Version(installed).base_version in required.specifier


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
