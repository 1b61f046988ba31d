"""The images of docker/: versions agree with the package's, nothing is set twice, and the programs around them work."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import tomllib
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mega_rl.cli import doctor
from mega_rl.environment import TRANSFORMER_ENGINE
from mega_rl.parallel.accelerator import megatron_core
from mega_rl.rollout.sglang.server.installation import SGLANG_VERSION
from tests.release.sources import ROOT

DOCKER = ROOT / "docker"
TEXTS = {name: (DOCKER / name).read_text(encoding="utf-8") for name in ("Dockerfile", "Dockerfile.cpu")}
LINTERS = os.pathsep.join([str(ROOT / ".venv" / "linters" / "bin"), os.environ["PATH"]])

images = pytest.mark.parametrize("image", TEXTS)


def argument(name: str) -> str:
    """The default of a build argument of the CUDA image."""
    (value,) = re.findall(rf"^ARG {name}=(.*)$", TEXTS["Dockerfile"], re.M)
    return str(value)


def instructions(image: str, name: str) -> list[str]:
    """The instructions of one kind, each with its continued lines as one."""
    text = re.sub(r"^\s*#.*\n", "", TEXTS[image], flags=re.M).replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", text, re.M)


def pins(text: str) -> dict[str, str]:
    """Versions that a constraints file names, by canonical name."""
    lines = (re.split("[#;]", line)[0].strip() for line in text.splitlines())
    return {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }


def merged() -> dict[str, str]:
    """Constraints of the CUDA image, made as its Dockerfile makes them."""
    program = re.search(r"awk -F'==' '(.*?)'", TEXTS["Dockerfile"])
    assert program
    command = ["awk", "-F==", program[1], DOCKER / "constraints-cuda.txt", ROOT / "constraints.txt"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    named = [line.partition("==")[0] for line in text.splitlines() if "==" in line]
    assert len(named) == len(set(named)), "a package with two constraints cannot be installed"
    return pins(text)


@pytest.fixture(scope="module")
def project() -> dict[str, list[Requirement]]:
    """Requirements of pyproject.toml: of the package under "", of its extras under their names."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": content["dependencies"], **content["optional-dependencies"]}
    return {name: [Requirement(text) for text in texts] for name, texts in groups.items()}


def test_the_cuda_image_has_constraints_that_the_package_allows(project: dict[str, list[Requirement]]) -> None:
    constraints = merged()
    other, usual = (
        pins(file.read_text(encoding="utf-8")) for file in (DOCKER / "constraints-cuda.txt", ROOT / "constraints.txt")
    )
    assert constraints == {**usual, **other}
    assert {name for name in other if usual.get(name) in (None, other[name])} == set(), "replaces nothing"
    allowed = {canonicalize_name(one.name): one.specifier for one in project[""]}
    assert allowed.keys() & other.keys()
    assert {name: str(versions) for name, versions in allowed.items() if constraints[name] not in versions} == {}


def test_versions_of_the_cuda_image_are_those_of_the_package(project: dict[str, list[Requirement]]) -> None:
    constraints = merged()
    assert argument("EXTRAS") == "[sglang,gpu]"
    assert [str(one) for one in project["sglang"]] == [f"sglang=={SGLANG_VERSION}"]
    (engine,) = [one for one in project["gpu"] if one.name == "transformer-engine"]
    assert argument("TE_VERSION") in TRANSFORMER_ENGINE.specifier
    assert argument("TE_VERSION") in engine.specifier
    assert megatron_core.series_of(constraints["megatron-core"]) is not None
    of_megatron = [Requirement(text) for text in importlib.metadata.requires("megatron-core") or ()]
    if constraints["megatron-core"] == importlib.metadata.version("megatron-core"):
        bounds = [one.specifier for one in of_megatron if canonicalize_name(one.name) == "transformer-engine"]
        assert bounds
        assert all(argument("TE_VERSION") in bound for bound in bounds)
    text = TEXTS["Dockerfile"] + TEXTS["Dockerfile.cpu"]
    assert not re.search(r"(?<![\w-])(torch|sglang|megatron-core)==", text), (
        "these pins have one place, and it is not here"
    )


def test_constraints_are_the_pins_of_sglang() -> None:
    """As far as its metadata say: `make sglang` has them here."""
    (*_, metadata) = [None, *(ROOT / ".venv" / "sglang").glob("sglang-*.dist-info/METADATA")]
    if metadata is None:
        pytest.skip("make sglang has not been run")
    required = Parser().parsestr(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist", [])
    exact = [one for one in map(Requirement, required) if "extra" not in str(one.marker) and str(one.specifier)]
    constraints = merged()
    named = {one.name: one.specifier for one in exact if canonicalize_name(one.name) in constraints}
    assert {"torch", "transformers", "tokenizers"} <= named.keys()
    assert [str(one) for name, one in named.items() if constraints[canonicalize_name(name)] not in one] == []


@images
def test_a_build_gets_what_it_copies_and_nothing_else(image: str) -> None:
    ignore = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line]
    assert ignore[1] == "*"
    sent = {line[1:] for line in ignore if line.startswith("!")}
    copied = [source for line in instructions(image, "COPY") if "--from=" not in line for source in line.split()[:-1]]
    bound = re.findall(r"type=bind,source=([\w/.-]+)", TEXTS[image])
    assert {source.split("/")[0] for source in copied} <= {path.split("/")[0] for path in sent}
    assert [source for source in (*copied, *bound) if not (ROOT / source).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml", "mega_rl"} <= set(copied)


@images
def test_no_variable_is_set_that_a_run_sets(image: str) -> None:
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    by_runs = set(re.findall(r"^\| `([A-Z_]+)` \|", page, re.M))
    assert {"NCCL_CUMEM_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"} <= by_runs
    given = {name for line in instructions(image, "ENV") for name in re.findall(r"([A-Z_]+)=", line)}
    assert given & by_runs == set()
    assert not {name for name in given if name.startswith(("NCCL_", "CUDA_", "PYTORCH_", "CUBLAS_", "NVTE_"))}


@images
def test_secrets_are_mounts(image: str) -> None:
    """Build arguments and variables are kept with an image, for whoever has it."""
    names = re.findall(r"^(?:ARG|ENV) (\w+)", TEXTS[image], re.M)
    assert not [name for name in names if re.search(r"INDEX|TOKEN|SECRET|PASSWORD|KEY|PROXY", name)]
    runs = [line for line in instructions(image, "RUN") if re.search(r"\bpip (install|wheel)", line)]
    assert len(runs) >= 2
    needs_no_index = "apex_setup.py"
    without = [line for line in runs if "id=pip,target=/etc/pip.conf" not in line and needs_no_index not in line]
    assert without == []
    hosts = re.findall(
        r"https?://[^/\s]+", "".join(file.read_text("utf-8") for file in DOCKER.glob("*.*") if file.is_file())
    )
    assert set(hosts) <= {"https://github.com"}


@images
def test_an_image_starts_as_a_user_with_the_check(image: str) -> None:
    assert instructions(image, "USER") == ["1000:1000"], "Kubernetes must see that it is not root"
    assert instructions(image, "ENTRYPOINT") == ['["/usr/bin/tini", "-s", "--", "mega-rl-start"]']
    required = re.findall(r"(?:--require |MEGA_RL_REQUIRE=)([\w,-]+)", "\n".join(instructions(image, "(?:RUN|ENV)")))
    assert required
    assert {name for names in required for name in names.split(",")} <= doctor.REQUIREMENTS.keys()


@pytest.mark.parametrize(
    ("require", "arguments", "code", "output", "error"),
    [
        ("", ["train", "a b"], 0, "ran train|a b|\n", ""),
        ("te", ["train"], 0, "ran train|\n", ""),
        ("cuda", ["train"], 1, "", "cuda MISSING: no device\n"),
        ("nope", ["train"], 2, "", "error: --require: nope"),
        ("cuda", ["doctor"], 0, "ran doctor|\n", ""),
    ],
)
def test_a_container_starts_only_with_what_it_requires(
    require: str, arguments: list[str], code: int, output: str, error: str, tmp_path: Path
) -> None:
    program = tmp_path / "mega-rl"
    program.write_text(
        """#!/bin/sh
        case "$*" in
            "doctor --require cuda") echo "cuda MISSING: no device"; exit 1 ;;
            "doctor --require nope") echo "error: --require: nope" >&2; exit 2 ;;
            "doctor --require te") echo "all there: te" ;;
            *) printf "ran "; printf "%s|" "$@"; echo ;;
        esac
        """
    )
    program.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGA_RL_REQUIRE": require}
    command = ["/bin/sh", DOCKER / "start.sh", *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (code, output)
    assert done.stderr.startswith(error)
    assert ("MEGA_RL_REQUIRE=" in done.stderr) == bool(error)


@pytest.mark.parametrize(
    ("linter", "files"), [("hadolint", ["Dockerfile", "Dockerfile.cpu"]), ("shellcheck", ["start.sh"])]
)
def test_linters_find_nothing(linter: str, files: list[str]) -> None:
    program = shutil.which(linter, path=LINTERS)
    if program is None:
        pytest.skip(f"{linter} is not installed: make linters")
    done = subprocess.run([program, *files], cwd=DOCKER, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
