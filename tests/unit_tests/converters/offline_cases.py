"""What test_offline.py does in processes of its own."""

from __future__ import annotations

from pathlib import Path

from mega_rl.converters.offline import conversion
from mega_rl.converters.offline.convert import ExportOptions, ImportOptions, export_checkpoint, import_hf
from mega_rl.errors import UserError
from mega_rl.parallel.layout import ParallelLayout


def convert_all(rank: int, root: str) -> list[int]:
    """The conversions of test_two_processes_write_what_one_writes; numbers of tensors and files."""
    folder = Path(root)
    layout = ParallelLayout(world_size=4, tp=2, ep=2, etp=2)
    reports = [
        import_hf(
            folder / "hf", folder / "two-ranks", layout=layout, format="ranks", options=ImportOptions(mtp="load")
        ),
        import_hf(
            folder / "hf", folder / "two-dist", layout=layout, format="torch_dist", options=ImportOptions(mtp="load")
        ),
        export_checkpoint(folder / "two-ranks", folder / "two-hf", options=ExportOptions(shard_bytes=60_000)),
    ]
    return [number for report in reports for number in (report.num_tensors, report.num_files)]


def fail_on_rank_1(rank: int, source: str, target: str) -> str:
    """The message with which a conversion ends whose second rank cannot write."""
    write = conversion.write_files

    def unlucky(*arguments: object, **options: object) -> object:
        if rank == 1:
            raise UserError("out of luck")
        return write(*arguments, **options)  # type: ignore[arg-type]

    conversion.write_files = unlucky  # type: ignore[assignment]
    try:
        import_hf(source, target, layout=ParallelLayout(world_size=2, tp=2), format="ranks")
    except UserError as error:
        return str(error)
    return "no error"


def peak_growth(rank: int, verb: str, source: str, target: str) -> int:
    """Bytes by which a conversion raises the peak of this process's memory."""
    layout = ParallelLayout(world_size=2, tp=2)
    # What getrusage calls the peak is inherited from the parent process; this one starts anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    if verb == "export":
        export_checkpoint(source, target)
    else:
        import_hf(source, target, layout=layout, format=verb)  # type: ignore[arg-type]
    return _peak() - before


def _peak() -> int:
    """Bytes of memory at its largest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
