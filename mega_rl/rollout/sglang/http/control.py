"""Client of the endpoints that steer one server: generation, weights, memory. Synchronous, each call with a deadline.

Endpoints, bodies and answers are those of SGLang 0.5.20 (srt/entrypoints/http_server.py, srt/managers/io_struct.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mega_rl.rollout.sglang.http.api import ServerApi
from mega_rl.rollout.sglang.http.keys import Endpoint
from mega_rl.rollout.sglang.http.request import ServerError

__all__ = ["Control", "ServerError"]

_FLUSH_PAUSE_S = 0.02  # between two tries; the scheduler needs a few milliseconds to find itself idle
_HEALTH_S = 5.0  # in which a healthy server answers /health
_SCHEDULER_S = 30.0  # in which a scheduler ends its step and answers


class Control:
    """Steers one server through `generation`, `weights` and `memory`; usable from several threads.

    A method returns once the server has done what it asks, and raises ServerError otherwise.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        """timeout_s: deadline of one call, from the connection to the last byte of the answer, in seconds."""
        self._api = ServerApi(endpoint, timeout_s)
        self.generation = GenerationControl(self._api)
        self.weights = WeightControl(self._api)
        self.memory = MemoryControl(self._api)

    @property
    def endpoint(self) -> Endpoint:
        """Return the server's address and keys."""
        return self._api.endpoint

    @property
    def requests(self) -> int:
        """Return the number of requests so far, failed ones included."""
        return self._api.requests

    def move(self, endpoint: Endpoint) -> None:
        """Steer the server at `endpoint` from now on: a restart gives it another port and other keys."""
        assert endpoint.index == self.endpoint.index, f"server {endpoint.index} in place of {self.endpoint.index}"
        self._api.endpoint = endpoint

    def close(self) -> None:
        """Close the HTTP client."""
        self._api.close()

    def model_info(self) -> dict[str, Any]:
        """Return /model_info: the model that it serves; "weight_version" is a string."""
        return self._api.object("GET", "/model_info")

    def server_info(self) -> dict[str, Any]:
        """Return /server_info: all its settings, SGLang's "version", sizes and the state of its scheduler."""
        return self._api.object("GET", "/server_info")

    def healthy(self) -> bool:
        """Return whether it answers /health with 200 within a few seconds."""
        return self._answers("/health", _HEALTH_S)

    def responsive(self) -> bool:
        """Return whether its scheduler answers in time; /health goes on for a minute after a scheduler's death."""
        return self._answers("/server_info", _SCHEDULER_S)

    def _answers(self, path: str, timeout_s: float) -> bool:
        try:
            self._api.call("GET", path, timeout_s=min(self._api.timeout_s, timeout_s))
        except ServerError:
            return False
        return True


class GenerationControl:
    """Generation of one server: one request, and pausing around an update."""

    def __init__(self, api: ServerApi) -> None:
        self._api = api

    def generate(self, body: Mapping[str, Any]) -> Any:
        """Return the answer of /generate, decoded and not checked."""
        return self._api.json("POST", "/generate", body)

    def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        """Stop generating; "abort" ends the requests in flight, which takes about a second."""
        self._api.call("POST", "/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Resume generation after `pause`."""
        self._api.call("POST", "/continue_generation", {})

    def flush(self, deadline_s: float | None = None) -> None:
        """Empty the prefix cache, which old weights filled; retry until the server is idle.

        deadline_s: seconds, the api's `timeout_s` when None.
        """
        deadline_s = self._api.timeout_s if deadline_s is None else deadline_s
        deadline = time.monotonic() + deadline_s
        tries, refusal = 0, ""
        while (left := deadline - time.monotonic()) > 0:
            tries += 1
            try:
                self._api.call("GET", "/flush_cache", timeout_s=left)
                return
            except ServerError as error:
                if error.status == 400:  # the answer of a server that still has requests
                    refusal = str(error)
                elif not refusal or time.monotonic() < deadline:
                    raise
            time.sleep(min(_FLUSH_PAUSE_S * tries, 1.0, max(0.0, deadline - time.monotonic())))
        raise ServerError(
            self._api.endpoint,
            "/flush_cache",
            f"waited {deadline_s:g} s for the server to be idle so that its cache can be emptied, {tries} tries; "
            f"last answer: {refusal or 'none'}",
        )


class WeightControl:
    """Weights of one server: updates by each transport, their version and checksums."""

    def __init__(self, api: ServerApi) -> None:
        self._api = api

    @property
    def endpoint(self) -> Endpoint:
        """Return the server's address and keys."""
        return self._api.endpoint

    def update_from_tensor(
        self, payloads: Sequence[str], *, load_format: str | None = None, version: int | None = None
    ) -> None:
        """Load one bucket; payloads: one text per tensor-parallel rank of the server."""
        body = {"serialized_named_tensors": list(payloads), "load_format": load_format}
        self._update("/update_weights_from_tensor", body, version)

    def init_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None:
        """Join a process group in which the trainer is rank 0; returns when all its ranks are there."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        self._api.succeed("/init_weights_update_group", body)

    def update_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        load_format: str | None = None,
        version: int | None = None,
    ) -> None:
        """Receive one bucket over a group made by `init_group`; dtypes as "bfloat16"."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group,
            "load_format": load_format,
        }
        self._update("/update_weights_from_distributed", body, version)

    def destroy_group(self, group: str) -> None:
        """Leave a group made by `init_group`."""
        self._api.succeed("/destroy_weights_update_group", {"group_name": group})

    def version(self) -> str:
        """Return the version stamped on its weights; "default" before the first update."""
        version = self._api.object("GET", "/model_info").get("weight_version")
        if not isinstance(version, str):
            raise ServerError(self.endpoint, "/model_info", f"no weight_version in the answer: {version!r}")
        return version

    def forget_version(self) -> None:
        """Stamp weights of no known version with "default", as before the first update."""
        self._api.succeed("/update_weight_version", {"new_version": "default", "abort_all_requests": False})

    def checksums(self) -> list[dict[str, Any]] | None:
        """Return for each of its ranks "checksums" (parameter name: hash), "per_gpu_checksum" and "parallelism_info".

        None from a server without checksums, as on a CPU, where SGLang's own code asks for CUDA.
        """
        try:
            ranks = self._api.object("POST", "/weights_checker", {"action": "checksum"}).get("ranks")
        except ServerError as error:
            if error.status is not None and 400 <= error.status < 500 and error.status not in (401, 403):
                return None
            raise
        if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
            raise ServerError(self.endpoint, "/weights_checker", f"no list of ranks in the answer: {ranks!r:.80}")
        return ranks

    def _update(self, path: str, body: dict[str, Any], version: int | None) -> None:
        # Flush before the update, not with it: SGLang asserts that it succeeds, and a server with requests would die.
        body |= {"flush_cache": False, "abort_all_requests": False}
        if version is not None:
            body["weight_version"] = str(version)
        self._api.succeed(path, body)


class MemoryControl:
    """Device memory of one server that shares its GPU with the trainer."""

    def __init__(self, api: ServerApi) -> None:
        self._api = api

    def release(self, tags: Sequence[str] | None = None) -> None:
        """Release memory; tags "weights", "kv_cache", "cuda_graph", None for all. The server must be idle."""
        self._api.call("POST", "/release_memory_occupation", {"tags": None if tags is None else list(tags)})

    def resume(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory again; weights are undefined until the next update."""
        self._api.call("POST", "/resume_memory_occupation", {"tags": None if tags is None else list(tags)})
