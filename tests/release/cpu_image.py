"""Build the image of docker/Dockerfile.cpu on this machine and use it, without a registry and without a daemon.

`make image-cpu` builds it, `make test-image` uses it; docker/README.md has the options. It takes root on a Debian or
Ubuntu with buildah and debootstrap. The base is made by debootstrap from the packages of this machine's own apt, unless
--base names another image. Exit code 0 if all is well, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.release.sources import ROOT
from tests.release.wheel_check import ACCURACY

LOCAL_BASE = "localhost/mega_rl_base"
TAG = "localhost/mega_rl:cpu"
CA = "/run/ca.pem"  # where Dockerfile.cpu mounts the secret `ca`
DEADLINE_S = 3600  # of one command inside
PLACES = ("index-url", "extra-index-url", "find-links", "proxy")
PASSED_ON = (*PLACES, "no-index", "trusted-host", "timeout", "default-timeout", "retries")
NO_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+@")


class ImageError(Exception):
    """A command that failed, or an image that is not as it should be."""


def pip_settings(listing: str) -> dict[str, str]:
    """Return the settings of an installation that `pip config list` shows, by name; those of the environment win."""
    settings: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        lines = (line.removeprefix(section) for line in listing.splitlines() if line.startswith(section))
        settings |= {name: value.strip("'\"") for name, _, value in (line.partition("=") for line in lines)}
    return settings


def pip_conf(settings: Mapping[str, str]) -> str:
    """Return a pip.conf with what an image's build needs of a machine's settings, its folders left out."""
    lines = ["[global]"]
    for name in PASSED_ON:
        values = settings.get(name, "").replace("\\n", " ").split()
        values = [value for value in values if not value.startswith(("file:", "/", "."))]
        if values:
            lines.append(f"{name} = {' '.join(values)}")
    if "cert" in settings:
        lines.append(f"cert = {CA}")
    return "\n".join(lines) + "\n"


def package_sources(targets: str) -> list[str]:
    """Return lines of a sources.list from `apt-get indextargets` of lines "URI release component origin".

    Of the distribution itself: other sources of this machine have no place in a base.
    """
    lines = []
    for target in targets.splitlines():
        uri, release, component, *origin = target.split()
        if origin in (["Debian"], ["Ubuntu"]):
            lines.append(f"deb {uri} {release} {component}")
    return sorted(set(lines))


def sensitive(settings: Mapping[str, str], sources: Sequence[str]) -> set[str]:
    """Return texts that tell where this machine gets its packages, which no layer may hold.

    The places that pip and the distribution have by themselves tell nothing.
    """
    public = ("//pypi.org/", "//deb.debian.org/", "//security.debian.org/", "//archive.ubuntu.com/")
    places = [place for name in PLACES for place in settings.get(name, "").replace("\\n", " ").split()]
    places += [line.split()[1] for line in sources]
    return {place for place in places if len(place) > 8 and not any(one in place for one in public)}


@dataclass(frozen=True)
class Storage:
    """Images and containers in a folder of their own."""

    folder: Path

    def command(self, *arguments: str | Path) -> list[str | Path]:
        """Return a command of buildah that uses this storage."""
        where = ("--root", self.folder / "root", "--runroot", self.folder / "run", "--storage-driver", "vfs")
        return ["buildah", *where, *arguments]

    def has(self, image: str) -> bool:
        """Return whether it holds an image of this name."""
        return bool(run(*self.command("images", "--quiet", "--filter", f"reference={image}"), quiet=True).strip())

    def buildah(self, *arguments: str | Path, quiet: bool = False) -> str:
        """Run buildah, its output shown unless `quiet`; returns its standard output. Raises ImageError."""
        return run(*self.command(*arguments), quiet=quiet)


def run(*command: str | Path, quiet: bool = False) -> str:
    """Run a command; returns its standard output, which is shown as well unless `quiet`. Raises ImageError."""
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, errors="replace")
    assert done.stdout is not None
    lines = []
    for line in done.stdout:
        lines.append(line)
        if not quiet:
            print(line, end="", flush=True)
    if done.wait():
        raise ImageError(f"{command[0]} ended with exit code {done.returncode}: {' '.join(map(str, command))}")
    return "".join(lines)


def make_base(storage: Storage, folder: Path, sources: Sequence[str]) -> None:
    """Make LOCAL_BASE by debootstrap, with the release of this machine and nothing that tells of its mirror."""
    mirror, release = next(line.split()[1:3] for line in sources if "-" not in line.split()[2])  # no updates alone
    root = folder / "base"
    run("debootstrap", "--variant=minbase", release, root, mirror, quiet=True)
    for left in ("etc/apt/sources.list", "var/log/bootstrap.log", "var/log/dpkg.log", "var/log/alternatives.log"):
        (root / left).unlink(missing_ok=True)
    for emptied in ("var/lib/apt/lists", "var/cache/apt", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        for entry in (root / emptied).iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    archive = folder / "base.tar"
    run("tar", "--numeric-owner", "-C", root, "-cf", archive, ".", quiet=True)
    container = storage.buildah("from", "scratch", quiet=True).strip()
    storage.buildah("add", "--quiet", container, archive, "/", quiet=True)
    storage.buildah("config", "--cmd", "/bin/sh", container, quiet=True)
    storage.buildah("commit", "--quiet", "--rm", container, LOCAL_BASE, quiet=True)
    shutil.rmtree(root)
    archive.unlink()


def fetch_torch(wheels: Path) -> None:
    """Put this machine's build of the pinned torch into docker/wheels, unless one is there: often one for CPUs."""
    pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    if not any(wheels.glob("torch-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        run(*pip, "--dest", wheels, pin)


def build(options: argparse.Namespace, storage: Storage) -> None:
    """Build the image, say how large it is, and see that no layer tells where the packages came from."""
    settings = pip_settings(run(sys.executable, "-m", "pip", "config", "list", quiet=True))
    shown = "$(REPO_URI) $(RELEASE) $(COMPONENT) $(ORIGIN)"
    sources = package_sources(run("apt-get", "indextargets", "--format", shown, "Created-By: Packages", quiet=True))
    if not options.no_torch:
        fetch_torch(ROOT / "docker" / "wheels")
    with tempfile.TemporaryDirectory(prefix="cpu_image_") as name:
        folder = Path(name)
        if not (options.base or storage.has(LOCAL_BASE)):
            start = time.perf_counter()
            make_base(storage, folder, sources)
            print(f"base: {time.perf_counter() - start:.0f} s", flush=True)
        (folder / "pip.conf").write_text(pip_conf(settings))
        secrets = {"pip": folder / "pip.conf"}
        if "cert" in settings:
            secrets["ca"] = Path(settings["cert"])
        if not options.base:
            (folder / "build.list").write_text("\n".join(sources) + "\n")
            secrets["apt"] = folder / "build.list"
        start = time.perf_counter()
        arguments = [f"BASE={options.base or LOCAL_BASE}", f"EXTRAS={options.extras}", *options.build_arg]
        pull = [] if options.base else ["--pull-never"]
        storage.buildah(
            "build", "--isolation", "chroot", "--format", "docker", "--layers", *pull,
            *(text for id_, path in secrets.items() for text in ("--secret", f"id={id_},src={path}")),
            *(text for one in arguments for text in ("--build-arg", one)),
            *(["--target", options.target] if options.target else []),
            "--file", ROOT / options.file, "--tag", options.tag, ROOT,
        )  # fmt: skip
        print(f"image: {time.perf_counter() - start:.0f} s", flush=True)
    look_into_layers(storage, options.tag, sensitive(settings, sources))


def look_into_layers(storage: Storage, tag: str, texts: set[str]) -> None:
    """Print the size of each layer. Raises ImageError if one of the `texts` is in a file of any layer."""
    with tempfile.TemporaryDirectory(prefix="layers_", dir=storage.folder) as name:
        archive, patterns = Path(name) / "image.tar", Path(name) / "texts"
        storage.buildah("push", "--quiet", tag, f"docker-archive:{archive}", quiet=True)  # layers as plain tar files
        with tarfile.open(archive) as image:
            sizes = [member.size for member in image if member.name.endswith(".tar") and member.isfile()]
        print(f"layers of {' + '.join(f'{size / 2**20:.0f}' for size in sizes)} MiB: {sum(sizes) / 2**20:.0f} MiB")
        if not texts:
            return
        patterns.write_text("\n".join(sorted(texts)) + "\n")
        search = ["grep", "-a", "-o", "-F", "-f", patterns, archive]
        matches = subprocess.run(search, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()
        if matches:
            shown = ", ".join(sorted({NO_CREDENTIALS.sub("***@", match) for match in matches}))
            raise ImageError(f"a layer tells where this machine gets its packages: {shown}")
        print(f"no layer holds one of {len(texts)} places that packages came from", flush=True)


def use(options: argparse.Namespace, storage: Storage) -> None:
    """Use the image as its user would: doctor, the check at the start, the quickstart. Raises ImageError."""
    container = storage.buildah("from", "--pull-never", options.tag, quiet=True).strip()
    try:
        config = json.loads(storage.buildah("inspect", container, quiet=True))["Docker"]["config"]
        expect(config["User"] == "1000:1000", f"the image's user is {config['User']!r}")
        inside = Inside(storage, container, tuple(config["Entrypoint"]))
        expect(inside.plain("id", "-u")[1].strip() == "1000", "the user is another than 1000")
        expect(inside.plain("touch", "/opt/mega_rl/new")[0] != 0, "the user may change the installation")
        code, text = inside.start()
        expect(code == 0 and "Usage: mega-rl" in text, f"without arguments: exit code {code}\n{text}")
        code, text = inside.start("doctor", "--require", "core,megatron")
        expect((code, text.strip()) == (0, "all there: core,megatron"), f"doctor: exit code {code}\n{text}")
        code, text = inside.start("doctor", "--require", "cuda,te")
        lines = [line.split()[:2] for line in text.splitlines() if "MISSING:" in line]
        expect((code, lines) == (1, [["cuda", "MISSING:"], ["te", "MISSING:"]]), f"doctor: exit code {code}\n{text}")
        code, text = inside.start("recipes", "list", require="cuda")
        expect(code == 1 and "cuda" in text and "quickstart" not in text, f"start check: exit code {code}\n{text}")
        code, text = inside.plain("mega-rl", "doctor", "--require", "core,megatron", user="4321:4321")
        expect(code == 0, f"as a user that the image does not know: exit code {code}\n{text}")
        print("doctor, the check at the start, users: as they should be", flush=True)
        for engine in options.engines:
            quickstart(inside, engine)
    finally:
        storage.buildah("rm", container, quiet=True)


def quickstart(inside: Inside, engine: str) -> None:
    """Train the quickstart's model in the container, and read what it reached. Raises ImageError."""
    start = time.perf_counter()
    code, text = inside.start("quickstart", "--engine", engine, "--run-dir", f"runs/{engine}")
    expect(code == 0, f"quickstart --engine {engine}: exit code {code}; it ends with\n{text[-3000:]}")
    summary = json.loads(inside.plain("cat", f"runs/{engine}/summary.json")[1])
    reached = f"held-out accuracy {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%}"
    print(f"quickstart --engine {engine}: {time.perf_counter() - start:.0f} s, {reached}", flush=True)
    expect(summary["accuracy_after"] >= ACCURACY, f"the quickstart reached {summary['accuracy_after']:.1%} only")


@dataclass(frozen=True)
class Inside:
    """A container of the image. buildah knows the image's user, folder and variables, and not its entry point."""

    storage: Storage
    container: str
    entry_point: tuple[str, ...]

    def start(self, *arguments: str, require: str = "") -> tuple[int, str]:
        """Run the image's entry point with arguments, with MEGA_RL_REQUIRE; returns exit code and all output."""
        return self.plain(*self.entry_point, *arguments, variables=[f"MEGA_RL_REQUIRE={require}"])

    def plain(self, *command: str, variables: Sequence[str] = (), user: str = "") -> tuple[int, str]:
        """Run a command as the image's user, or another; returns exit code and all output."""
        options = [text for variable in variables for text in ("--env", variable)]
        options += ["--user", user] if user else []
        program = self.storage.command("run", "--isolation", "chroot", *options, self.container, "--", *command)
        done = subprocess.run(
            program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout


def expect(condition: bool, otherwise: str) -> None:
    """Raise ImageError with the message `otherwise` unless `condition` holds."""
    if not condition:
        raise ImageError(otherwise)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with command-line arguments; returns the exit code."""
    parser = argparse.ArgumentParser(prog="cpu_image", description=__doc__, allow_abbrev=False)
    parser.add_argument("action", choices=("build", "use", "clean"))
    parser.add_argument("--storage", type=Path, default=ROOT / "build" / "images", help="folder of buildah's storage")
    parser.add_argument("--tag", default=TAG)
    parser.add_argument("--base", default="", help="an image to build on, instead of one that debootstrap makes")
    parser.add_argument("--extras", default="", help="of mega_rl, as [dev]")
    parser.add_argument("--file", default="docker/Dockerfile.cpu", help="below the root of the sources")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--target", default="", help="the last stage to build")
    parser.add_argument("--no-torch", action="store_true", help="fetch no torch into docker/wheels")
    parser.add_argument("--engines", nargs="*", default=["megatron"], help="that the quickstart trains with")
    options = parser.parse_args(arguments)
    storage = Storage(options.storage.resolve())
    try:
        if options.action == "clean":
            shutil.rmtree(storage.folder, ignore_errors=True)
            return 0
        absent = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
        expect(
            not absent and os.geteuid() == 0, f"needs root and the packages buildah and debootstrap; absent: {absent}"
        )
        storage.folder.mkdir(parents=True, exist_ok=True)
        build(options, storage) if options.action == "build" else use(options, storage)
    except ImageError as error:
        print(f"image: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
