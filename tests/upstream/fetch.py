"""Put releases of Megatron-Core into folders of their own: `python -m tests.upstream.fetch VERSION...`.

Prints one folder a line, to be put first on PYTHONPATH; what is there already is not fetched again. A release whose
wheel is for newer Pythons is unpacked all the same: Megatron-Core is Python source, and its one compiled module is for
data sets that nothing here uses. The environment that runs this is left as it is.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from mega_rl.parallel.accelerator.megatron_core import RELEASES, installed_series, series_of

FOLDER = Path(__file__).parents[2] / ".megatron"


def fetch(version: str) -> Path:
    """The folder of a version, fetched from the package index unless it is there."""
    folder = FOLDER / version
    if folder.is_dir():
        return folder
    python = max((3, 12), sys.version_info[:2])
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    options = ["--quiet", "--no-deps", "--target", str(partial), "--python-version", ".".join(map(str, python))]
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "install", "--ignore-requires-python", "--only-binary=:all:"]
        pip += ["--no-compile", "--platform", f"manylinux_2_28_{platform.machine()}"]
    else:  # an environment that uv has made
        pip = ["uv", "pip", "install", "--python", sys.executable, "--only-binary", ":all:"]
    subprocess.run([*pip, *options, f"megatron-core=={version}"], check=True)
    partial.rename(folder)
    return folder


def named(word: str) -> str:
    """Return the version that "newest", "other" (than the installed one) or a version means."""
    oldest, newest = RELEASES["0.16"][-1], list(RELEASES.values())[-1][-1]
    other = oldest if installed_series() == series_of(newest) else newest
    return {"newest": newest, "other": other}.get(word, word)


def main() -> None:
    """Print the folders of the versions given."""
    for word in sys.argv[1:]:
        print(fetch(named(word)))


if __name__ == "__main__":
    main()
