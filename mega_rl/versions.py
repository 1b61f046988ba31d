"""Releases of the packages that mega_rl runs on: what is allowed, what was tested, and what is installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mega_rl.errors import UserErrors


@dataclass(frozen=True)
class Package:
    """A dependency: the releases that pyproject.toml allows, and the ends of them that the tests ran on."""

    name: str
    allowed: str  # as in pyproject.toml
    oldest: str
    newest: str


# Megatron-Core is not here: mega_rl.parallel.accelerator has a table of its releases.
PACKAGES = (
    Package("torch", ">=2.13,<3", "2.13.0", "2.15.0"),
    Package("transformers", ">=5.12,<6", "5.12.0", "5.23.0"),
    Package("tokenizers", ">=0.22.2", "0.22.2", "0.23.3"),
    Package("huggingface_hub", ">=1.33.0,<3", "1.33.0", "2.4.0"),
    Package("tensordict", ">=0.15,<1", "0.15.3", "0.15.3"),
    Package("safetensors", ">=0.8.0,<1", "0.8.0", "0.8.0"),
    Package("datasets", ">=5.2.0,<6", "5.2.0", "5.2.0"),
    Package("pyarrow", ">=26.0.1", "26.0.1", "26.0.1"),
    Package("numpy", ">=2.3.5,<3", "2.3.5", "2.4.6"),
    Package("xxhash", ">=4.1.0", "4.1.0", "4.1.0"),
    Package("httpx", ">=0.28.1,<1", "0.28.1", "0.28.1"),
    Package("PyYAML", ">=6.0.3", "6.0.3", "6.0.3"),
    Package("omegaconf", ">=2.4,<2.5", "2.4.0", "2.4.0"),
    Package("jinja2", ">=3.1,<4", "3.1.6", "3.1.6"),
    Package("typer", ">=0.29,<1", "0.29.2", "0.29.2"),
    Package("rich", ">=15.0.0", "15.0.0", "15.0.0"),
    Package("tensorboard", ">=2.21.0", "2.21.0", "2.21.0"),
    Package("matplotlib", ">=3.11.2", "3.11.2", "3.11.2"),
    Package("math-verify", ">=0.9,<1", "0.9.0", "0.9.0"),
    Package("packaging", ">=26.3", "26.3", "26.3"),
    Package("psutil", ">=7.2.2", "7.2.2", "7.2.2"),
    Package("py-spy", ">=0.4.3", "0.4.3", "0.4.3"),
    Package("einops", ">=0.8,<1", "0.8.2", "0.8.2"),
)
# Of the extra `gpu`, and no dependency. Megatron-Core imports it wherever it is installed; 0.16.1 asks for >=2.9,<2.12.
TRANSFORMER_ENGINE = Package("transformer-engine", "==2.11.*", "2.11.0", "2.11.0")
_KERNELS = {"13": "transformer-engine-cu13", "12": "transformer-engine-cu12"}  # CUDA release -> package


@cache
def require() -> None:
    """Raise UserErrors with a line for each installed package whose release is not allowed.

    What is allowed once is not read again in this process: it takes 12 ms.
    """
    lines = list(problems())
    if lines:
        raise UserErrors(lines)


def problems() -> Iterator[str]:
    """Yield a line for each installed package whose release is not allowed, with the fix."""
    for package in PACKAGES:
        installed = installed_version(package.name)
        if installed is not None and not is_allowed(package, installed):
            yield (
                f"{package.name} {installed} is installed, which mega_rl does not run on; "
                f"run 'pip install \"{package.name}{package.allowed}\"'"
            )
    engine = TRANSFORMER_ENGINE
    installed = installed_version(engine.name)
    if installed is not None and not is_allowed(engine, installed):
        yield (
            f"{engine.name} {installed} is installed, which Megatron-Core would import and has not been compared with; "
            f"run 'pip install --no-build-isolation \"{engine.name}[core_cu13,pytorch]{engine.allowed}\"', or 'pip "
            f"uninstall {engine.name}' to run Megatron-Core's own layers"
        )


def remark(name: str) -> str:
    """Return what `mega-rl doctor` adds to the installed release of a package; "" where the tests cover it."""
    package = next((package for package in (*PACKAGES, TRANSFORMER_ENGINE) if package.name == name), None)
    installed = installed_version(name)
    if package is None or installed is None:
        return ""
    if not is_allowed(package, installed):
        return f"NOT SUPPORTED: needs {package.name}{package.allowed}"
    if not Version(package.oldest) <= _release(installed) <= Version(package.newest):
        return f"not tested: {package.oldest} to {package.newest} are"
    return ""


def cuda_of_transformer_engine() -> str | None:
    """Return the CUDA release that Transformer Engine's kernels are built for; None where no wheel of them is here."""
    return next((cuda for cuda, name in _KERNELS.items() if installed_version(name)), None)


def is_allowed(package: Package, installed: str) -> bool:
    """Return whether a release is one that pyproject.toml allows; builds as 2.14.0a0+nv26.10 count as 2.14.0."""
    return _release(installed) in SpecifierSet(package.allowed)


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(installed: str) -> Version:
    """The version without its marks of a development build: containers carry those of the release to come."""
    return Version(Version(installed).base_version)
