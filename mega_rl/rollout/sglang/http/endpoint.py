"""Address and keys of a server. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.rollout.sglang.http.keys import Keys


@dataclass(frozen=True)
class Endpoint:
    """Address and key of one server."""

    index: int  # number of the server in the run
    url: str  # "http://127.0.0.1:31001"
    keys: Keys
