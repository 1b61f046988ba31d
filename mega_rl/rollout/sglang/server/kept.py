"""Servers that outlive their ranks, for the next ranks to adopt. Imports no torch.

A launcher that may start its ranks again has a private folder, and its ranks' servers have their private folders in it.
A server that got ready has a record there. From then on it ends when neither its launcher nor the rank that owns it
runs: ranks whose launcher was killed still need it for the step that they save. Without a record it ends with its
parent, so that no server is left that nobody can find.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mega_rl.errors import UserError
from mega_rl.rollout.sglang.http.keys import Endpoint, Keys
from mega_rl.rollout.sglang.server.group import ProcessIdentity
from mega_rl.untrusted import parse_object

if TYPE_CHECKING:
    from mega_rl.rollout.sglang.server.settings import ServerSettings

log = logging.getLogger(__name__)

VARIABLE = "MEGA_RL_KEPT_SERVERS"
SCRATCH_PREFIX = "mega-rl-sglang-"  # servers' private folders
KEPT_PREFIX = "s-"  # the same below a launcher's folder: short, since the path of a socket has at most 107 bytes
KEYS_FILE = "keys.json"
UNKNOWN_EXIT = 255  # an adopted process: the kernel tells an exit code only to the parent
_RECORD = "kept.json"
_END_S = 20.0


@dataclass(frozen=True)
class KeptServer:
    """Record of a server that got ready. Its keys are next to it."""

    scratch: Path  # its private folder
    index: int
    url: str
    settings: str  # `fingerprint` of its settings
    main: ProcessIdentity  # leader of its process group
    owner: ProcessIdentity  # the rank that may use it
    launcher: ProcessIdentity

    @classmethod
    def read(cls, scratch: Path) -> KeptServer | None:
        """Return the record in a private folder, None where there is none yet."""
        try:
            own = parse_object((scratch / _RECORD).read_bytes())
        except (OSError, ValueError):
            return None
        processes = {name: ProcessIdentity(**own[name]) for name in ("main", "owner", "launcher")}
        return cls(**{**own, **processes, "scratch": scratch})

    def write(self) -> None:
        """Write the record: from now on the server is kept."""
        new = self.scratch / f"{_RECORD}.new"
        new.write_text(json.dumps(asdict(self), default=str), "utf-8")
        new.replace(self.scratch / _RECORD)

    @property
    def is_anothers(self) -> bool:
        """Return whether another living process owns it, so that this one may not use it."""
        return self.owner.pid != os.getpid() and self.owner.runs

    def end(self) -> None:
        """End the rest of the server."""
        shutil.rmtree(self.scratch, ignore_errors=True)  # before, since this process may be killed meanwhile
        if left := self.main.end_group(deadline_s=_END_S):
            log.error("SGLang server %d: processes %s are still there after SIGKILL", self.index, left)
        shutil.rmtree(self.scratch, ignore_errors=True)


@contextmanager
def keeping_servers(*, possible: bool) -> Iterator[dict[str, str]]:
    """Yield the environment of ranks whose servers survive a restart of the ranks.

    Else none is, and not by a launcher further up: this one's ranks have no right to that one's servers. SGLang needs
    Linux. At the end all servers that ranks have left end; the ranks have ended.
    """
    if not possible or sys.platform != "linux":
        yield {VARIABLE: ""}
        return
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))  # 0700
    me = ProcessIdentity.of_own(os.getpid())
    try:
        yield {VARIABLE: f"{me.pid}:{me.ticks}:{folder}"}
    finally:
        for server in KeptServers(me, folder).records().values():
            server.end()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class KeptServers:
    """Kept servers of one launcher, on one host."""

    launcher: ProcessIdentity
    folder: Path

    @classmethod
    def of_launcher(cls) -> KeptServers | None:
        """Return the kept servers of this process's launcher; None if it keeps none or ended."""
        pid, _, rest = os.environ.get(VARIABLE, "").partition(":")
        ticks, _, folder = rest.partition(":")
        if not (pid.isdecimal() and ticks.isdecimal() and Path(folder).is_dir()):
            return None
        return cls(ProcessIdentity(int(pid), int(ticks)), Path(folder))

    def records(self) -> dict[int, KeptServer]:
        """Return the record of each kept server by number; a running one is preferred."""
        servers = [server for path in self.folder.glob(f"{KEPT_PREFIX}*") if (server := KeptServer.read(path))]
        return {server.index: server for server in sorted(servers, key=lambda server: server.main.runs)}

    def keep(self, main: ProcessIdentity, endpoint: Endpoint, scratch: Path, settings: ServerSettings) -> None:
        """Record that a server is ready and that this process owns it."""
        me, text = ProcessIdentity.of_own(os.getpid()), fingerprint(settings)
        KeptServer(scratch, endpoint.index, endpoint.url, text, main, me, self.launcher).write()

    def candidate(self, index: int, settings: ServerSettings) -> tuple[KeptServer, Endpoint] | None:
        """Return the server that an earlier rank has left, if it may be adopted.

        One that may not be is ended, and the log says why.
        """
        server = self.records().get(index)
        if server is None:
            return None
        try:
            if not server.main.runs:
                raise UserError("its process has ended")
            if server.settings != fingerprint(settings):
                raise UserError("it runs with other settings")
            return server, Endpoint(index, server.url, Keys.read(server.scratch / KEYS_FILE))
        except UserError as error:
            log.warning("SGLang server %d is not kept: %s; starting another one", index, error)
        server.end()
        return None

    def end_others(self, indices: set[int]) -> None:
        """End the servers that earlier ranks have left here and whose numbers are not in `indices`."""
        for index, server in self.records().items():
            if index not in indices and not server.is_anothers:
                log.warning("SGLang server %d is not kept: it is started on another host now", index)
                server.end()


def fingerprint(settings: ServerSettings) -> str:
    """Return a text that is equal for equal settings."""
    return hashlib.sha256(json.dumps(asdict(settings), sort_keys=True, default=str).encode()).hexdigest()
