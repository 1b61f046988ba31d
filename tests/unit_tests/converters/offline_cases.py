"""Work of test_offline.py in separate processes."""

from __future__ import annotations

from pathlib import Path

from mega_rl.converters.offline import writing
from mega_rl.converters.offline.convert import ExportOptions, ImportOptions, export_checkpoint, import_hf
from mega_rl.errors import UserError


def convert_all(rank: int, root: str) -> list[int]:
    """Do the conversions of test_two_processes_write_what_one_writes; return numbers of tensors and files."""
    folder = Path(root)
    reports = [
        import_hf(folder / "hf", folder / "two-dist", options=ImportOptions(mtp="load")),
        export_checkpoint(folder / "two-dist", folder / "two-hf", options=ExportOptions(shard_bytes=60_000)),
    ]
    return [number for report in reports for number in (report.num_tensors, report.num_files)]


def fail_on_rank_1(rank: int, source: str, target: str) -> str:
    """Return the message with which a conversion ends whose second rank cannot write."""
    write = writing._write_files

    def unlucky(*arguments: object) -> object:
        if rank == 1:
            raise UserError("out of luck")
        return write(*arguments)  # type: ignore[arg-type]

    writing._write_files = unlucky  # type: ignore[assignment]
    try:
        import_hf(source, target)
    except UserError as error:
        return str(error)
    return "no error"


def peak_growth(rank: int, verb: str, source: str, target: str) -> int:
    """Return the bytes by which a conversion raises the peak of this process's memory."""
    # What getrusage calls the peak is inherited from the parent process; this one starts anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    if verb == "export":
        export_checkpoint(source, target)
    else:
        import_hf(source, target)
    return _peak() - before


def _peak() -> int:
    """Return the bytes of memory at its largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
