"""What a release holds: every file of the repository as source, the package and its data as a wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from typing import NamedTuple

import pytest

import mega_rl
from mega_rl.config import packaged
from tests.release.sources import ROOT, copy_sources, repository_files

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
GENERATED = {"PKG-INFO", "setup.cfg"}  # by setuptools


class Release(NamedTuple):
    """What one build gave."""

    sdist: set[str]  # its files, without the folder around them and what setuptools generates
    wheel: set[str]  # its files
    metadata: Message  # of the wheel


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Sdist and wheel of this tree, by the setuptools that is here: no network."""
    folder = tmp_path_factory.mktemp("release")
    sources = copy_sources(folder / "sources")
    for kind in ("sdist", "wheel"):
        command = [sys.executable, "-c", BUILD.format(kind), str(folder)]
        subprocess.run(command, cwd=sources, stdout=subprocess.DEVNULL, check=True, timeout=120)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    assert wheel.name == f"mega_rl-{mega_rl.__version__}-py3-none-any.whl"
    with tarfile.open(sdist) as archive:
        members = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        parsed = Parser().parsestr(archive.read(metadata).decode())
    sources_kept = {name for name in members if name not in GENERATED and ".egg-info/" not in name}
    return Release(sources_kept, names, parsed)


def test_the_sdist_is_the_repository(release: Release) -> None:
    files = repository_files()
    if files is None:
        pytest.skip("no git repository to compare with")
    assert release.sdist == {file.as_posix() for file in files}


def test_the_wheel_is_the_package_with_its_recipes_and_licence(release: Release) -> None:
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mega_rl").rglob("*.py")}
    data = {"mega_rl/py.typed", "mega_rl/rollout/sglang/requirements-cpu.txt"}
    tables = (path for kind in ("md", "toml", "tsv") for path in (ROOT / "mega_rl").rglob(f"*.{kind}"))
    data |= {path.relative_to(ROOT).as_posix() for path in tables}
    schedulers = ROOT / "mega_rl" / "operations" / "schedulers"
    data |= {path.relative_to(ROOT).as_posix() for path in (schedulers / "jobset.yaml", schedulers / "job.sh")}
    data |= {f"mega_rl/config/recipes/{name}.yaml" for name in packaged.names()}
    data |= {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "mega_rl" / "tracking" / "report" / "assets").iterdir()
    }
    folder = f"mega_rl-{mega_rl.__version__}.dist-info"
    about = {f"{folder}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt")}
    assert release.wheel == code | data | about | {f"{folder}/licenses/LICENSE"}


def test_the_description_leads_nowhere_that_a_package_page_has_not(release: Release) -> None:
    description = release.metadata.get_payload()
    assert isinstance(description, str)
    assert "mega-rl quickstart" in description
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert [target for target in targets if not target.startswith("https://")] == []
