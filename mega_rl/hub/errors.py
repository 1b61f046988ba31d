"""Reasons of failed downloads in plain words, with the fix."""

from __future__ import annotations

import errno
from functools import partial
from typing import Literal

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx  # the client's own: httpx, from its release 2 on httpx2

Kind = Literal["model", "dataset"]

# Everything that a download may end with; an assertion or a TypeError would be our own bug.
FAILURES = (HfHubHTTPError, httpx.HTTPError, OSError, ValueError)


def reason(error: BaseException, *, repo: str, revision: str, kind: Kind) -> str:
    """Return why `repo` could not be had and what to do about it."""
    causes = chain(error)
    for cause in causes:
        if isinstance(cause, IncompleteSnapshotError):
            return f"the cache holds only a part of it: {_line(cause)}"
    for cause in causes:
        if isinstance(cause, RevisionNotFoundError):
            return f"the {kind} has no revision {revision!r} at {_endpoint()}; name a branch, a tag or a commit of it"
        if isinstance(cause, GatedRepoError):
            page = f"{_endpoint()}/{'datasets/' if kind == 'dataset' else ''}{repo}"
            return f"access to it is restricted: accept its terms at {page}, then {_log_in()}"
        if isinstance(cause, DisabledRepoError):
            return f"{_endpoint()} has disabled it; name another {kind}"
        if isinstance(cause, RepositoryNotFoundError):
            return (
                f"there is no such file or folder here, and {_endpoint()} shows no {kind} of that name: correct the "
                f"path or the name, or {_log_in()} if it is private"
            )
    if constants.HF_HUB_OFFLINE or any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return (
            f"there is no such file or folder here, and no {kind} of that name and revision in the cache "
            f"{constants.HF_HUB_CACHE}, while HF_HUB_OFFLINE forbids downloads; download it once without HF_HUB_OFFLINE"
        )
    return _transport(causes)


def _transport(causes: list[BaseException]) -> str:
    """Return the reason of a failure below the Hub's own answers."""
    for cause in causes:
        if isinstance(cause, HfHubHTTPError) and not isinstance(cause, LocalEntryNotFoundError):
            return f"{_endpoint()} answered {cause.response.status_code}; try again later"
        if isinstance(cause, (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)):
            return (
                f"there is no such file or folder here, it is not in the cache, and {_endpoint()} cannot be reached "
                f"({_line(cause)}); correct the path, or the network, HF_ENDPOINT or the proxy settings"
            )
        if isinstance(cause, httpx.HTTPError):
            return f"the download broke off ({_line(cause)}); start again: files that are complete are kept"
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            return f"no space is left in {constants.HF_HOME}; set HF_HOME to a larger disk"
    return f"the download failed: {_line(causes[0])}"


def is_unreachable(error: BaseException) -> bool:
    """Return whether the Hub gave no answer at all, so that a copy in the cache is the best there is."""
    return constants.HF_HUB_OFFLINE or any(
        isinstance(cause, (httpx.ConnectError, httpx.TimeoutException, OfflineModeIsEnabled)) for cause in chain(error)
    )


def chain(error: BaseException) -> list[BaseException]:
    """Return the error and what it was raised from."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _log_in() -> str:
    return "check that HF_TOKEN may read it" if get_token() else "set HF_TOKEN or run 'hf auth login'"


def _endpoint() -> str:
    return constants.ENDPOINT


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def why_unreadable(error: Exception, *, repo: str, revision: str) -> str:
    """Return why the library failed; it hides what the Hub answered, so the Hub is asked once more for access."""
    said = partial(reason, repo=repo, revision=revision, kind="dataset")
    if not constants.HF_HUB_OFFLINE:
        try:
            HfApi().auth_check(repo, repo_type="dataset")
        except FAILURES as refusal:
            return said(refusal)
    if constants.HF_HUB_OFFLINE or any(isinstance(cause, httpx.HTTPError) for cause in chain(error)):
        return said(error)
    return by_library(error)


def by_library(error: Exception) -> str:
    """Return an error of the datasets library in one line."""
    return f"the datasets library cannot read it: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
