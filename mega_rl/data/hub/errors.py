"""Reasons of failed downloads in plain words, with the fix."""

from __future__ import annotations

from typing import Literal

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    IncompleteSnapshotError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx  # the client's: httpx, from its release 2 on httpx2

Kind = Literal["model", "dataset"]

# Errors that a download may end with; an assertion or a TypeError would be our own bug.
FAILURES = (HfHubHTTPError, httpx.HTTPError, OSError, ValueError)
_UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError)
_NOT_HERE = "there is no such file or folder here"
# Error, or any of several -> its reason. The first row that matches an error or one of its causes counts.
_REASONS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    (IncompleteSnapshotError, "the cache holds only a part of it: {line}"),
    (RevisionNotFoundError, "the {kind} has no revision {revision!r} at {hub}; name a branch, a tag or a commit of it"),
    (GatedRepoError, "access to it is restricted: accept its terms at {hub}/{page}, then {log_in}"),
    (
        RepositoryNotFoundError,
        f"{_NOT_HERE}, and {{hub}} shows no {{kind}} of that name; or {{log_in}} if it is private",
    ),
    (
        OfflineModeIsEnabled,
        f"{_NOT_HERE}, and no {{kind}} of that name and revision in the cache {{cache}}; download it once without "
        "HF_HUB_OFFLINE",
    ),
    (_UNREACHED, f"{_NOT_HERE}, it is not in the cache, and {{hub}} cannot be reached ({{line}})"),
    (FAILURES, "the download failed: {line}; start again: files that are complete are kept"),
)


def reason(error: BaseException, *, repo: str, revision: str, kind: Kind) -> str:
    """Return why a repository could not be downloaded, and what to do."""
    for kinds, text in _REASONS:
        is_offline = kinds is OfflineModeIsEnabled and constants.HF_HUB_OFFLINE
        matching = [cause for cause in chain(error) if is_offline or isinstance(cause, kinds)]
        if matching:
            return text.format(
                line=_line(matching[0]),
                kind=kind,
                revision=revision,
                hub=constants.ENDPOINT,
                page=f"datasets/{repo}" if kind == "dataset" else repo,
                log_in="check that HF_TOKEN may read it" if get_token() else "set HF_TOKEN or run 'hf auth login'",
                cache=constants.HF_HUB_CACHE,
            )
    return f"the download failed: {_line(error)}"


def is_unreachable(error: BaseException) -> bool:
    """Return whether the Hub gave no answer, so that only the cache is left."""
    silent = (httpx.ConnectError, httpx.TimeoutException, OfflineModeIsEnabled)
    return constants.HF_HUB_OFFLINE or any(isinstance(cause, silent) for cause in chain(error))


def chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return causes


def why_unreadable(error: Exception, *, repo: str, revision: str) -> str:
    """Return why the datasets library failed; ask the Hub again, since the library hides its answer."""
    is_hubs = constants.HF_HUB_OFFLINE or any(isinstance(one, httpx.HTTPError) for one in chain(error))
    cause = error if is_hubs else None
    try:
        if not constants.HF_HUB_OFFLINE:
            HfApi().auth_check(repo, repo_type="dataset")
    except FAILURES as refusal:
        cause = refusal
    return by_library(error) if cause is None else reason(cause, repo=repo, revision=revision, kind="dataset")


def by_library(error: Exception) -> str:
    """Return an error of the datasets library in one line."""
    return f"the datasets library cannot read it: {type(error).__name__}: {_line(error)[:500]}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
