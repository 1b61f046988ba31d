"""Faults of disks and files."""

from __future__ import annotations

import errno
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.fault_campaign.control_groups import kill
from tests.fault_campaign.faults import Fault
from tests.fault_campaign.runs import Run, run_tool

FAILING_WRITES = Path(__file__).with_name("failing_writes.c")
FOR_EVER_S = 10.0  # which a run of the campaign does not last


@dataclass
class FullDisk(Fault):
    """The run's folder is on a small disk, which fills up, and has room again after `seconds`."""

    seconds: float = 0.0
    size_mib: int = 24

    def prepare(self, run: Run) -> None:
        mount(run, f"size={self.size_mib}m")

    def fire(self, run: Run) -> str:
        if not run.steps():
            return ""
        filler = run.folder / "run" / "filler"
        try:
            with filler.open("wb") as file:
                for _ in range(2 * self.size_mib):
                    file.write(bytes(1 << 19))
                    file.flush()
        except OSError:
            pass
        if self.seconds:
            run.wait_for(lambda: False, deadline_s=self.seconds)
            filler.unlink()
        return "the disk is full" + (f" for {self.seconds:g} s" if self.seconds else "")

    def heal(self, run: Run) -> None:
        (run.folder / "run" / "filler").unlink(missing_ok=True)


@dataclass
class FailingWrites(Fault):
    """Writes and syncs of checkpoints fail for `seconds`, by a preloaded library; see failing_writes.c.

    error: EIO, ENOSPC or EROFS, of which the last refuses new files and names as well.
    """

    error: int = errno.EIO
    seconds: float = 1.0

    def prepare(self, run: Run) -> None:
        run.environment["FAILING_WRITES"] = str(run.folder / "fail")

    def fire(self, run: Run) -> str:
        if not run.ranks():
            return ""
        replacement = run.folder / "fail.new"
        replacement.write_text(str(self.error))
        replacement.rename(run.folder / "fail")
        run.wait_for(lambda: False, deadline_s=self.seconds)
        if self.seconds < FOR_EVER_S:
            (run.folder / "fail").unlink()
        name = errno.errorcode[self.error]
        return f"writes of checkpoints fail with {name} " + (
            f"for {self.seconds:g} s" if self.seconds < FOR_EVER_S else "from now on"
        )

    def heal(self, run: Run) -> None:
        (run.folder / "fail").unlink(missing_ok=True)
        run.environment.pop("FAILING_WRITES", None)


@dataclass
class LostFolder(Fault):
    """The run's folder, or its checkpoints, are deleted while it runs."""

    part: str = "checkpoints"

    def fire(self, run: Run) -> str:
        folder = run.folder / "run" / self.part
        if not run.wait_for(folder.exists, deadline_s=60.0):
            return ""
        for _ in range(20):  # files may come while it is removed
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
        return f"run/{self.part} is deleted"


@dataclass
class DamagedFile(Fault):
    """A run is killed and a file of it is damaged before it goes on: a byte flipped, the end cut off, emptied."""

    pattern: str = "run/checkpoints/step_*/*.safetensors"
    how: str = "flip"
    names_cause: bool = False

    def fire(self, run: Run) -> str:
        if not run.wait_for(lambda: len(list(run.folder.glob("run/checkpoints/step_*"))) > 1, deadline_s=120.0):
            return ""
        for pid in run.members():
            kill(pid)
        run.wait(deadline_s=60.0)
        files = sorted(path for path in run.folder.glob(self.pattern) if path.is_file())
        if not files or all(launcher.exit_code == 0 for launcher in run.launchers):  # had ended before it was killed
            return ""
        return damage(files[-1], self.how, run)


def damage(file: Path, how: str, run: Run) -> str:
    """Damage a file; returns words for it."""
    content = bytearray(file.read_bytes())
    if how == "flip" and content:
        content[run.random.randrange(len(content))] ^= 1 << run.random.randrange(8)
    elif how == "cut":
        del content[run.random.randrange(max(1, len(content))) :]
    elif how == "empty":
        content.clear()
    elif how == "noise":
        content = bytearray(run.random.randbytes(len(content)))
    file.write_bytes(bytes(content))
    return f"{file.relative_to(run.folder)}: {how}"


def mount(run: Run, options: str) -> None:
    """Mount a file system in memory at the run's folder; see `unmount_below`."""
    folder = run.folder / "run"
    folder.mkdir(exist_ok=True)
    run_tool("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))


def unmount_below(root: Path) -> None:
    """Unmount every file system below a folder, what `mount` has mounted among them."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        place = Path(line.split()[1])
        if root in place.parents:
            subprocess.run(["umount", "-l", str(place)], check=False)
