"""Servers that outlive the ranks which started them, to be adopted by the next ones. Imports no torch.

A launcher that may start its ranks again holds, for as long as it lives, a pipe and an anonymous file
(memfd_create(2)), which its ranks open through /proc. Neither has a name on a disk, and the kernel frees both whatever
ends the launcher.

- The pipe is the line of life of servers: their standard input, which ends with the launcher. Ranks hold no end of it.
- The file has a line of JSON for each server that got ready. Lines are appended whole; the last one of a server counts,
  and a line that a killed rank left half written counts for nothing.
- A server's private folder names its owner, the rank that may use it: from then on the server is kept. Before, it ends
  with its parent, so that no server is left that no record names. Afterwards it ends when neither launcher nor owner
  runs; ranks whose launcher was killed still want it for the step that they save.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mega_rl.errors import UserError
from mega_rl.rollout.sglang.http.keys import Endpoint, Keys
from mega_rl.rollout.sglang.server import group
from mega_rl.storage.strict_json import parse_object

if TYPE_CHECKING:
    from mega_rl.rollout.sglang.server.settings import ServerSettings

log = logging.getLogger(__name__)

VARIABLE = "MEGA_RL_KEPT_SERVERS"
SCRATCH_PREFIX = "mega-rl-sglang-"  # of servers' private folders
KEYS_FILE = "keys.json"

_RECORDS = "mega_rl-servers"
_OWNER_FILE = "owner"
_END_S = 20.0
_MAX_RECORDS = 1 << 20  # bytes


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, and not another one that gets its number later."""

    pid: int
    ticks: int  # of the kernel's clock, from boot to its start

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a process that runs; None for none, or a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        state, *fields = stat.rpartition(b")")[2].split()  # a program's name may hold anything
        return None if state in (b"Z", b"X") else cls(pid, int(fields[18]))

    @property
    def runs(self) -> bool:
        """Return whether it still runs."""
        return self.of(self.pid) == self

    @property
    def is_replaced(self) -> bool:
        """Return whether its number is another process's now."""
        return self.of(self.pid) not in (None, self)


@dataclass(frozen=True)
class ServerRecord:
    """Record of a server that got ready. Its keys are in its private folder."""

    index: int
    main: ProcessIdentity  # leader of its process group
    url: str
    scratch: Path  # its private folder
    settings: str  # `fingerprint` of its settings

    def line(self) -> bytes:
        """Return it as a line of the launcher's file."""
        own = {"index": self.index, **asdict(self.main), "url": self.url, "scratch": str(self.scratch)}
        return json.dumps(own | {"settings": self.settings}).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> ServerRecord | None:
        """Return the record of a line, None for anything else."""
        try:
            own = parse_object(line)
        except ValueError:
            return None
        numbers = [own.pop(name, None) for name in ("index", "pid", "ticks")]
        url, scratch, settings = (own.pop(name, None) for name in ("url", "scratch", "settings"))
        if own or not all(type(number) is int and number >= 0 for number in numbers):
            return None
        if not (isinstance(url, str) and isinstance(scratch, str) and isinstance(settings, str)):
            return None
        if not Path(scratch).name.startswith(SCRATCH_PREFIX):  # it will be removed
            return None
        index, pid, ticks = numbers
        return cls(index, ProcessIdentity(pid, ticks), url, Path(scratch), settings)

    def adoptable(self, settings: ServerSettings) -> LeftServer:
        """Return the server as it may be adopted. Raises UserError with the reason why it may not be."""
        if not self.main.runs:
            raise UserError("its process has ended")
        if owner_of(self.scratch) is None:
            raise UserError("it was not ready")
        if self.settings != fingerprint(settings):
            raise UserError("it runs with other settings")
        return LeftServer(self.main, self.scratch, Endpoint(self.index, self.url, Keys.read(self.scratch / KEYS_FILE)))

    def end(self) -> list[int]:
        """End what is left of the server; returns processes that are still there after SIGKILL."""
        shutil.rmtree(self.scratch, ignore_errors=True)  # before, since this process may be killed meanwhile
        left = [] if self.main.is_replaced else group.end(self.main.pid, deadline_s=_END_S)
        shutil.rmtree(self.scratch, ignore_errors=True)
        return left


@dataclass(frozen=True)
class LeftServer:
    """Server that earlier ranks have left."""

    main: ProcessIdentity
    scratch: Path
    endpoint: Endpoint


class ServerLife:
    """Line of life and records of this host's servers, as the launcher holds them. A context manager."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()  # no program that the launcher starts inherits them
        self._records = os.memfd_create(_RECORDS, os.MFD_CLOEXEC)

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment of ranks that may leave servers to the next ones."""
        return {VARIABLE: f"{os.getpid()}:{self._read}:{self._records}"}

    def __enter__(self) -> ServerLife:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all servers that ranks have left, and wait for that; the ranks have ended."""
        if self._write < 0:
            return
        os.close(self._write)
        for index, record in _parse(os.pread(self._records, _MAX_RECORDS, 0)).items():
            if left := record.end():
                log.error("SGLang server %d: processes %s are still there after SIGKILL", index, left)
        os.close(self._read)
        os.close(self._records)
        self._write = -1


@contextmanager
def keeping_servers(*, possible: bool) -> Iterator[dict[str, str]]:
    """Yield the environment of ranks whose servers are kept from one start of theirs to the next, if that is possible.

    Else none is, and not by a launcher further up: this one's ranks have no right to that one's servers. SGLang needs
    Linux, as memfd_create(2) does.
    """
    if possible and sys.platform == "linux":
        with ServerLife() as life:
            yield life.variables
    else:
        yield {VARIABLE: ""}


class KeptServers:
    """Line of life and records of this host's servers, as ranks see them."""

    def __init__(self, launcher: int, life: int, records: int) -> None:
        """launcher: its process; the others: its descriptors."""
        self._life, self._records = (f"/proc/{launcher}/fd/{descriptor}" for descriptor in (life, records))

    @classmethod
    def of_launcher(cls) -> KeptServers | None:
        """Return those of the launcher that started this process, None where it keeps none."""
        parts = os.environ.get(VARIABLE, "").split(":")
        return cls(*map(int, parts)) if len(parts) == 3 and all(part.isdecimal() for part in parts) else None

    def is_taken(self, index: int) -> bool:
        """Return whether a server is another living process's: this one has its environment, and no right to it."""
        record = self.records().get(index)
        return record is not None and _is_owned(record)

    @contextmanager
    def life(self) -> Iterator[int]:
        """Yield a server's standard input: the line of life, or a pipe of its own if the launcher is gone."""
        try:
            descriptor = os.open(self._life, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # else it waits for a writer
        except OSError:
            yield subprocess.PIPE
            return
        try:
            os.set_blocking(descriptor, True)
            yield descriptor
        finally:
            os.close(descriptor)

    def records(self) -> dict[int, ServerRecord]:
        """Return the last record of each server, none when the launcher is gone."""
        try:
            descriptor = self._open_records(os.O_RDONLY)
        except OSError:
            return {}
        try:
            return _parse(os.pread(descriptor, _MAX_RECORDS, 0))
        finally:
            os.close(descriptor)

    def keep(self, pid: int, endpoint: Endpoint, scratch: Path, settings: ServerSettings) -> None:
        """Note that a server is ready and this process's, to be left to another when this one ends."""
        main, me = ProcessIdentity.of(pid), ProcessIdentity.of(os.getpid())
        if main is None or me is None:  # a server that has just died: whoever uses it will see
            return
        record = ServerRecord(endpoint.index, main, endpoint.url, scratch, fingerprint(settings))
        try:
            descriptor = self._open_records(os.O_WRONLY | os.O_APPEND)
        except OSError:  # the launcher is gone, and nobody will start ranks again
            return
        try:
            os.write(descriptor, b"\n" + record.line())  # after a line that may have been cut
        finally:
            os.close(descriptor)
        new = scratch / f"{_OWNER_FILE}.new"
        new.write_text(json.dumps(asdict(me)), "utf-8")
        new.replace(scratch / _OWNER_FILE)

    def _open_records(self, flags: int) -> int:
        """Return a descriptor of the launcher's file. Raises OSError, also where its number is another process's."""
        descriptor = os.open(self._records, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{_RECORDS} (deleted)":
            os.close(descriptor)
            raise FileNotFoundError(errno.ENOENT, "the launcher is gone", self._records)
        return descriptor

    def candidate(self, index: int, settings: ServerSettings, name: str) -> LeftServer | None:
        """Return the server that an earlier rank has left, if it may be adopted.

        One that may not be is ended, and the log says why.
        """
        record = self.records().get(index)
        if record is None:
            return None
        try:
            return record.adoptable(settings)
        except UserError as error:
            log.warning("%s is not kept: %s; starting another one", name, error)
        record.end()
        return None

    def end_others(self, indices: set[int]) -> None:
        """End the servers that earlier ranks have left here and that are none of `indices`."""
        for index, record in self.records().items():
            if index not in indices and record.main.runs and not _is_owned(record):
                log.warning("SGLang server %d is not kept: it is started on another host now", index)
                record.end()


def owner_of(scratch: Path) -> ProcessIdentity | None:
    """Return the owner that a server's private folder names, None before it is kept."""
    try:
        own = parse_object((scratch / _OWNER_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return ProcessIdentity(own["pid"], own["ticks"])


def fingerprint(settings: ServerSettings) -> str:
    """Return a text that is equal for equal settings."""
    return hashlib.sha256(json.dumps(asdict(settings), sort_keys=True, default=str).encode()).hexdigest()


def _is_owned(record: ServerRecord) -> bool:
    owner = owner_of(record.scratch)
    return owner is not None and owner.runs and owner.pid != os.getpid()


def _parse(content: bytes) -> dict[int, ServerRecord]:
    """Return the last record of each server in the launcher's file."""
    records = [record for line in content.splitlines() if (record := ServerRecord.parse(line)) is not None]
    return {record.index: record for record in records}
