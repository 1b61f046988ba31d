"""Lock on a run's folder of checkpoints, held by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import weakref
from pathlib import Path
from types import TracebackType

from mega_rl import disk
from mega_rl.checkpoint.folders import entries, recover
from mega_rl.checkpoint.format.manifest import now
from mega_rl.errors import UserError
from mega_rl.untrusted import decode_json, read_file, shorten

LOCK_FILE = ".lock"


class RunLock:
    """Lock on writing under `root`, which is made if missing; a context manager.

    The kernel frees it with the process, however that ends; a lock file left behind does no harm. Raises UserError
    when another process holds it: "`what`: another run (host, pid, since) writes checkpoints there; `fix`".
    """

    def __init__(self, root: Path, *, what: str = "", fix: str = "choose another trainer.run_dir") -> None:
        self.path = root / LOCK_FILE
        self._what, self._fix = what or f"trainer.run_dir={root.parent}", fix
        self._fd: int | None = None
        self._made: list[Path] = []  # folders that did not exist before
        # A forked child would hold the lock for as long as it lives, so it closes its descriptor.
        own = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda: (close := own()) and close())

    def __enter__(self) -> RunLock:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def take(self) -> None:
        """Take the lock, and complete renames that a kill interrupted. Raises UserError."""
        assert self._fd is None, f"{self.path} is taken twice"
        root = self.path.parent
        self._made = [folder for folder in (root, root.parent) if not folder.exists()]
        try:
            while self._fd is None:
                disk.make_folder(root)
                with contextlib.suppress(FileNotFoundError):  # the previous holder removed the folder as well
                    self._fd = disk.lock_file(self.path)
            os.ftruncate(self._fd, 0)
        except BlockingIOError as error:
            raise UserError(
                f"{self._what}: another run{self._holder()} writes checkpoints there; {self._fix}"
            ) from error
        except OSError as error:
            self._close()
            reason = "not a regular file" if error.errno in (errno.EINVAL, errno.ELOOP) else error.strerror
            raise UserError(f"{self._what}: {self.path} cannot be locked ({reason}); {self._fix}") from error
        record = {"host": socket.gethostname(), "pid": os.getpid(), "since": now()}
        disk.write_at(self._fd, 0, [memoryview(json.dumps(record).encode())])
        recover(root)

    def release(self) -> None:
        """Free the lock, and remove folders that `take` made and that are empty.

        Ignores a disk that fails: the error of an earlier write is the cause of the run's end.
        """
        with contextlib.suppress(OSError, UserError):
            if self._fd is not None:
                os.ftruncate(self._fd, 0)
            if self._made and [entry.name for entry in entries(self.path.parent)] == [LOCK_FILE]:
                self.path.unlink()
                for folder in self._made:
                    folder.rmdir()  # raises OSError for a folder that is not empty, which stays
        self._made = []
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # close reports writes that failed, and closes the file anyway
            if self._fd is not None:
                os.close(self._fd)
        self._fd = None

    def _holder(self) -> str:
        """Return the holder's host, process and start, as far as the file says."""
        try:
            raw = decode_json(read_file(self.path, 4096), self.path)
        except UserError:
            return ""
        host, pid, since = (shorten(str(raw.get(key, "unknown"))) for key in ("host", "pid", "since"))
        return f" (host {host}, pid {pid}, since {since})"
