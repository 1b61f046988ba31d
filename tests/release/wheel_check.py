"""Install the wheel, and nothing else of this repository, into a clean environment, and use it from another directory.

`make wheel-check` runs it; CONTRIBUTING.md has the options. Exit code 0 if all is as a new user needs it, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mega_rl
from tests.release.sources import copy_sources

ACCURACY = 0.9  # that the quickstart must reach
EXPLAINED = 0.5  # share of the returns' variance that its critic must explain in the end
TRAIN_STEPS = 3
BUILD_S, INSTALL_S, LOOK_S, TRAIN_S = 600, 3600, 300, 3600  # deadlines of one command
DISTRIBUTIONS = ("mega_rl", "torch", "megatron-core", "transformers", "tensordict", "safetensors", "datasets")
DISTRIBUTIONS += ("huggingface_hub", "numpy", "math-verify", "antlr4-python3-runtime", "typer")
VERSIONS = (
    "import importlib.metadata as m, json, platform, sys, mega_rl\n"
    "names = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}\n"
    "shown = {n: names.get(n.lower().replace('_', '-'), '-') for n in sys.argv[1:]}\n"
    "print(json.dumps({'python': platform.python_version(), 'package': mega_rl.__file__, 'versions': shown}))\n"
)


class CheckError(Exception):
    """A command that failed, or an outcome that is not the expected one."""


@dataclass
class Environment:
    """A clean virtual environment and a working directory without sources."""

    folder: Path  # of everything that the check writes
    installer: str  # pip or uv
    python: str  # interpreter that the environment is made of
    steps: list[tuple[str, float]] = field(default_factory=list)  # commands that ended well, with their seconds

    @property
    def bin(self) -> Path:
        return self.folder / "env" / "bin"

    @property
    def work(self) -> Path:
        return self.folder / "elsewhere"

    def variables(self) -> Mapping[str, str]:
        """Return the environment of its commands: none of the variables that would lead to this repository."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {**kept, "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def run(self, command: Sequence[str | Path], *, deadline_s: float, cwd: Path | None = None) -> str:
        """Run a command, in the working directory unless `cwd` is given; returns its output.

        Raises CheckError with the end of the output if it fails or takes longer than `deadline_s` seconds.
        """
        shown = " ".join([Path(command[0]).name, *map(str, command[1:])])
        print(f"$ {shown}", flush=True)
        start = time.perf_counter()
        log = self.folder / "log"
        with log.open("w+b") as output:
            try:
                code = subprocess.run(
                    command, cwd=cwd or self.work, env=self.variables(), stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT, timeout=deadline_s, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                code = -1
        text = log.read_text(encoding="utf-8", errors="replace")
        seconds = time.perf_counter() - start
        if code:
            reason = f"took longer than {deadline_s:.0f} s" if code == -1 else f"ended with exit code {code}"
            raise CheckError(f"{shown}: {reason}; its output ends with\n" + "\n".join(text.splitlines()[-40:]))
        self.steps.append((shown, seconds))
        return text


def build(environment: Environment) -> Path:
    """Build sdist and wheel (from the sdist) of the repository's files; returns the wheel."""
    sources = copy_sources(environment.folder / "sources")
    dist = environment.folder / "dist"
    command = [sys.executable, "-m", "build", "--outdir", dist, sources]
    environment.run(command, deadline_s=BUILD_S, cwd=sources)
    shutil.rmtree(sources)
    (wheel,) = dist.glob("*.whl")
    return wheel


def install(environment: Environment, wheel: Path, options: argparse.Namespace) -> None:
    """Make the clean environment; install what was asked to come first, then the wheel with what it requires."""
    env = environment.folder / "env"
    if environment.installer == "uv":
        uv = find_uv(environment)
        environment.run([uv, "venv", "--python", environment.python, env], deadline_s=INSTALL_S)
        installer: list[str | Path] = [uv, "pip", "install", "--python", environment.bin / "python"]
    else:
        environment.run([environment.python, "-m", "venv", env], deadline_s=INSTALL_S)
        installer = [environment.bin / "python", "-m", "pip", "install", "--progress-bar", "off"]
    constraint = ["--constraint", options.constraint.resolve()] if options.constraint else []
    if options.preinstall:
        environment.run([*installer, *options.preinstall], deadline_s=INSTALL_S)
    text = environment.run([*installer, *constraint, wheel, *options.with_], deadline_s=INSTALL_S)
    warnings = [line for line in text.splitlines() if "does not provide the extra" in line]
    expect(not warnings, f"an extra that does not exist: {warnings}")


def find_uv(environment: Environment) -> Path:
    """Return the uv of this machine, or one installed by pip into an environment of its own."""
    known = shutil.which("uv")
    if known:
        return Path(known)
    private = environment.folder / "uv"
    environment.run([sys.executable, "-m", "venv", private], deadline_s=INSTALL_S)
    environment.run([private / "bin" / "python", "-m", "pip", "install", "-q", "uv"], deadline_s=INSTALL_S)
    return private / "bin" / "uv"


def use(environment: Environment, engine: str) -> None:
    """Use the installed package as a new user would. Raises CheckError."""
    program = environment.bin / "mega-rl"
    said = environment.run([program, "--version"], deadline_s=LOOK_S).strip()
    expect(said == f"mega-rl {mega_rl.__version__}", f"--version says {said!r}")
    doctor = environment.run([program, "doctor"], deadline_s=LOOK_S)
    expect("MISSING" not in doctor, f"doctor misses something:\n{doctor}")
    expect("'make " not in doctor, f"doctor speaks of make outside a checkout:\n{doctor}")
    recipes = environment.run([program, "recipes", "list"], deadline_s=LOOK_S)
    expect("quickstart" in recipes, f"recipes list says {recipes!r}")
    environment.run([program, "recipes", "show", "quickstart"], deadline_s=LOOK_S)

    environment.run([program, "quickstart", "--engine", engine], deadline_s=TRAIN_S)
    summary = json.loads((environment.work / "runs/quickstart/summary.json").read_text())
    print(f"  held-out accuracy {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%}", flush=True)
    expect(summary["accuracy_after"] >= ACCURACY, f"the quickstart reached {summary['accuracy_after']:.1%}")
    explained = summary["explained_variance"]
    expect(explained > EXPLAINED, f"the quickstart's critic explains {explained:.2f} of the returns' variance")
    for recipe in ("quickstart", "mine.yaml"):
        run_dir = Path("runs", f"train_{Path(recipe).stem}")
        settings = [f"trainer.steps={TRAIN_STEPS}", f"trainer.run_dir={run_dir}"]
        command = [program, "train", "--config", recipe, "--nproc-per-node", "2", *settings]
        environment.run(command, deadline_s=TRAIN_S)
        records = [json.loads(line) for line in (environment.work / run_dir / "metrics.jsonl").read_text().splitlines()]
        expect(max(record["step"] for record in records) == TRAIN_STEPS, f"{recipe}: steps missing in metrics.jsonl")


def expect(condition: bool, otherwise: str) -> None:
    """Raise CheckError with the message `otherwise` unless `condition` holds."""
    if not condition:
        raise CheckError(otherwise)


def show(environment: Environment) -> None:
    """Print seconds of the commands and the versions that the installer chose. Raises CheckError."""
    command = [environment.bin / "python", "-c", VERSIONS, *DISTRIBUTIONS]
    output = subprocess.run(
        command, cwd=environment.work, env=environment.variables(), capture_output=True, text=True, check=True
    ).stdout
    facts = json.loads(output)
    inside = Path(facts["package"]).is_relative_to(environment.folder)
    expect(inside, f"mega_rl came from {facts['package']}, not from the wheel")
    print("\n| command | seconds |\n|---|---|")
    for shown, seconds in environment.steps:
        print(f"| `{shown.replace(str(environment.folder) + os.sep, '')}` | {seconds:.0f} |")
    print(f"\n| package | version ({environment.installer}) |\n|---|---|\n| python | {facts['python']} |")
    for name, version in facts["versions"].items():
        print(f"| {name} | {version} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check with command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(prog="wheel_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--installer", choices=("pip", "uv"), default="pip")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the clean environment")
    parser.add_argument("--engine", choices=("megatron", "fsdp"), default="megatron", help="that the quickstart uses")
    parser.add_argument("--preinstall", nargs="+", default=[], metavar="REQUIREMENT", help="installed before the wheel")
    parser.add_argument("--with", nargs="+", default=[], metavar="REQUIREMENT", dest="with_", help="with the wheel")
    parser.add_argument("--constraint", type=Path, help="constraints for the wheel's requirements")
    parser.add_argument("--keep", type=Path, help="a new folder for everything, which stays")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="wheel_check_")) if options.keep is None else options.keep.resolve()
    environment = Environment(folder=folder, installer=options.installer, python=options.python)
    try:
        environment.work.mkdir(parents=True)
        install(environment, build(environment), options)
        use(environment, options.engine)
        show(environment)
    except CheckError as error:
        print(f"wheel check failed: {error}", flush=True)
        return 1
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
