"""Servers that run already, joined by URL: those of a list, or of a registry that is read again and again.

A registry is a file or an HTTP address with one URL a line, or a JSON list of them. Servers come and go with it.
"""

from __future__ import annotations

import json
import logging
import stat
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from math import inf
from pathlib import Path

import httpx

from mega_rl.config.rules.rollout import is_registry, is_server
from mega_rl.errors import RunError, UserError
from mega_rl.parallel.agreement import run_on_one
from mega_rl.protocols import Ranks
from mega_rl.rollout.sglang.control import Control, Endpoint, Keys, ServerError, each, read_answer
from mega_rl.rollout.sglang.server.addresses import check_urls
from mega_rl.tracking import progress

log = logging.getLogger(__name__)

_POLL_S = 0.5
_ANSWER_S = 10.0
_HEALTH_S = 5.0  # a healthy server answers /health faster
_FAST_S = 1.0  # failures within it, as refused connections, do not hold an update up
_MOST_SKIPPED = 63  # looks in a row at which a slow address is not asked
_NO_NUMBER = -1  # stands for a server that has not joined
_MAX_REGISTRY = 1 << 20  # bytes
Fits = Callable[[Control], Sequence[str]]  # returns the reasons why a server cannot join


class JoinedServers:
    """Servers that run already (`rollout.sglang.urls`); this run neither starts nor ends them.

    A server's number is the place of its endpoint, also after it has left; one that comes back gets a new number.
    """

    ranks_per_host, colocated = 1, False

    def __init__(self, ranks: Ranks, urls: Sequence[str], keys_file: Path, *, timeout_s: float, hosts: int = 1) -> None:
        """Send nothing; `wait_ready` does.

        urls: of servers, or of one registry. timeout_s: deadline until the run has a server. hosts: of the run.
        Raises UserError.
        """
        self._ranks, self._timeout_s, self._hosts, self._keys = ranks, timeout_s, hosts, Keys.read(keys_file)
        self._registry = urls[0] if is_registry(urls[0]) else ""
        self._urls: list[str] = [] if self._registry else self._checked(urls)  # the list as last read
        self._name = self._registry or ", ".join(self._urls)
        self._said: dict[str, str] = {}  # URL of a server or the registry -> what is wrong with it, on rank 0
        self._looks = 0
        self._slow: dict[str, tuple[int, int]] = {}  # URL -> looks to skip, and the first look that asks again
        self.tp: list[int] = []
        self.hosts: list[tuple[int, ...]] = []
        self.endpoints: list[Endpoint] = []
        self.members: dict[str, int] = {}  # numbers of present servers by URL

    def wait_ready(self) -> None:
        """Wait until all answer, or one of a registry; collective. Raises RunError on all ranks."""
        self.bring_back(())

    def bring_back(self, lost: Collection[int], fits: Fits = lambda _: ()) -> tuple[list[int], dict[int, str]]:
        """Return the servers that need weights and, with reasons, those that have left; collective.

        lost: have to answer again, or leave. Servers of the list or registry that answer and fit join.

        Waits until there is a server. Raises RunError on all ranks.
        """
        with progress.phase(f"waiting for SGLang servers {self._name}", deadline_s=self._timeout_s):
            left, joined = run_on_one(lambda: self._look(lost, fits), self._ranks)
        gone = {int(index): why for index, why in left}
        for index, why in gone.items():
            url = self.endpoints[index].url
            del self.members[url]
            if self._ranks.rank == 0:
                log.warning("SGLang server %d at %s leaves: %s", index, url, why)
        back = sorted(set(lost) & set(self.members.values()))
        for url, tp in joined:
            back.append(len(self.endpoints))
            self.members[url] = back[-1]
            self.endpoints.append(Endpoint(back[-1], url, self._keys))
            self.tp.append(tp)
            self.hosts.append(())
            if self._ranks.rank == 0:
                log.info("SGLang server %d at %s joins, with %d rank(s)", back[-1], url, tp)
        return back, gone

    def stop(self, servers: Sequence[int]) -> None:
        """End none."""

    def _look(self, lost: Collection[int], fits: Fits) -> tuple[list[tuple[int, str]], list[tuple[str, int]]]:
        """Return (number, reason) of servers that leave, and (URL, tensor-parallel ranks) of those that join."""
        deadline, known, now = time.monotonic() + self._timeout_s, self.members, self._looks + 1.0
        self._looks += 1
        while True:
            self._read()
            out = [url for url in self._urls if known.get(url, -1) in (-1, *lost)]
            tp, failed = self._ask([url for url in out if self._slow.get(url, (0, 0))[1] <= now], fits)
            now = inf  # too few have answered, so ask every address
            left = []
            for url, index in known.items():
                if url not in self._urls:
                    left.append((index, f"it is no longer in {self._registry}"))
                elif index in lost and tp.get(url) != self.tp[index]:
                    left.append((index, failed.get(url, "it was started again with other ranks")))
            gone = [index for index, _ in left]
            joined = [(url, size) for url, size in tp.items() if known.get(url) in (None, *gone)]
            all_at_once = not (self._registry or self.endpoints)
            if len(known) - len(left) + len(joined) >= (len(self._urls) if all_at_once else 1):
                return left, joined
            if time.monotonic() > deadline:
                wrong = "; ".join(filter(None, [self._said.get(self._registry), *failed.values()]))
                raise RunError(
                    f"waited {self._timeout_s:g} s (rollout.sglang.start_timeout_s) for an answer of SGLang servers in "
                    f"rollout.sglang.urls={self._name}: {wrong or 'it lists none'}"
                )
            time.sleep(_POLL_S)

    def _ask(self, urls: Sequence[str], fits: Fits) -> tuple[dict[str, int], dict[str, str]]:
        """Return by URL the tensor-parallel ranks of servers that answer and fit, and why others do not.

        An address that fails slowly is skipped at the next look, then at 3, 7, ..., `_MOST_SKIPPED` in a row.
        """
        took: dict[int, float] = {}

        def ask(place: int) -> int:
            begin = time.monotonic()
            try:
                return self._size(Endpoint(_NO_NUMBER, urls[place], self._keys), fits)
            finally:
                took[place] = time.monotonic() - begin

        sizes, failed = each(range(len(urls)), ask)
        reasons = {urls[i]: why.replace(f"SGLang server {_NO_NUMBER} at ", "") for i, why in failed.items()}
        for place, url in enumerate(urls):
            self._say(url, reasons.get(url, ""), is_news=url not in self.members)
            skips = min(2 * self._slow.pop(url, (0, 0))[0] + 1, _MOST_SKIPPED)
            if url in reasons and took[place] >= _FAST_S:
                self._slow[url] = skips, self._looks + skips + 1
        return {urls[i]: size for i, size in sizes.items()}, reasons

    def _size(self, endpoint: Endpoint, fits: Fits) -> int:
        """Return a server's tensor-parallel ranks. Raises ServerError if it does not answer or fit."""
        with closing(Control(endpoint, timeout_s=_ANSWER_S)) as control:
            if not control.answers("/health", timeout_s=_HEALTH_S):
                raise ServerError(endpoint, "/health", "it does not answer")
            size = control.object("GET", "/server_info").get("tp_size")
            if not isinstance(size, int) or size < 1:
                raise ServerError(endpoint, "/server_info", f"tp_size={size!r} is not a number of ranks")
            if self._registry and (problems := fits(control)):
                what = "; ".join(problems).replace(f"SGLang server {_NO_NUMBER} at {endpoint.url}: ", "")
                raise ServerError(endpoint, "/model_info", what)
        return size

    def _read(self) -> None:
        """Read the registry; one that cannot be read leaves the servers as they were."""
        if self._registry:
            try:
                self._urls = self._checked(read_registry(self._registry))
                self._say(self._registry, "")
            except (UserError, OSError, ValueError, RecursionError, httpx.HTTPError, httpx.InvalidURL) as error:
                why = f"{self._registry} cannot be read, and the servers stay: {str(error) or type(error).__name__}"
                self._say(self._registry, why)

    def _checked(self, urls: Sequence[str]) -> list[str]:
        check_urls(urls, hosts=self._hosts)
        return list(dict.fromkeys(url.rstrip("/") for url in urls))

    def _say(self, url: str, why: str, *, is_news: bool = True) -> None:
        """Log what is wrong with the registry, or with a server that would join, where that is news."""
        if why and is_news and self._said.get(url) != why:
            log.warning("%s", why)
        self._said[url] = why


def read_registry(where: str) -> list[str]:
    """Return the URLs of servers in a registry. Raises OSError, ValueError or httpx.HTTPError."""
    if "://" in where:
        # Nobody but the registry answers for it: no proxy, no other address.
        with httpx.Client(trust_env=False) as client, client.stream("GET", where, timeout=_ANSWER_S) as response:
            if response.status_code != 200:
                raise ValueError(f"HTTP {response.status_code}")
            content = read_answer(response, time.monotonic() + _ANSWER_S, most=_MAX_REGISTRY)
    else:
        mode = Path(where).stat().st_mode
        if not stat.S_ISREG(mode) or mode & stat.S_IWOTH:
            raise ValueError("it is no file, or others may write it, and whoever does gets the servers' keys")
        with Path(where).open("rb") as file:
            content = file.read(_MAX_REGISTRY + 1)
    if len(content) > _MAX_REGISTRY:
        raise ValueError(f"it has more than {_MAX_REGISTRY} bytes")
    text = content.decode()
    lines = json.loads(text) if text.lstrip().startswith("[") else [line.strip() for line in text.splitlines()]
    urls = [line for line in lines if not (isinstance(line, str) and (not line or line.startswith("#")))]
    if wrong := [url for url in urls if not (isinstance(url, str) and is_server(url))]:
        raise ValueError(f"{wrong[0]!r:.80} is not a server's address, such as http://host:port")
    return urls
