"""The endpoints of one server that steer it: pausing, weights, memory. Synchronous, every call with a deadline.

Endpoints, bodies and answers are those of SGLang 0.5.20 (srt/entrypoints/http_server.py, srt/managers/io_struct.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mega_rl.rollout.sglang.http.endpoint import Endpoint
from mega_rl.rollout.sglang.http.request import Caller, ServerError, shortened

__all__ = ["Control", "ServerError"]

_FLUSH_PAUSE_S = 0.02  # between two tries; the scheduler needs a few milliseconds to find itself idle
_PROMPTLY_S = 5.0  # in which a healthy server says that it is
_SOON_S = 30.0  # in which a scheduler ends the step that it is in


class Control:
    """Steers one server. Methods return once it has done what they ask and raise ServerError else.

    May be used from several threads.
    """

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        """timeout_s: deadline of one call, from the connection to the last byte of the answer, in seconds."""
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._caller = Caller()

    @property
    def requests(self) -> int:
        """Requests made so far, those that failed among them."""
        return self._caller.requests

    def move(self, endpoint: Endpoint) -> None:
        """Steer the server's successor: a restart gives it another port and other keys."""
        assert endpoint.index == self.endpoint.index, f"server {endpoint.index} in place of {self.endpoint.index}"
        self.endpoint = endpoint

    def close(self) -> None:
        """Give back what the client holds."""
        self._caller.close()

    # -- what it is ------------------------------------------------------------------------------------------------

    def model_info(self) -> dict[str, Any]:
        """The model that it serves; "weight_version" is a text."""
        return self._object("GET", "/model_info")

    def server_info(self) -> dict[str, Any]:
        """All its settings, its SGLang's "version", sizes and the state of its scheduler."""
        return self._object("GET", "/server_info")

    def weight_version(self) -> str:
        """The version that its weights were last stamped with; "default" at its start."""
        version = self.model_info().get("weight_version")
        if not isinstance(version, str):
            raise ServerError(self.endpoint, "/model_info", f"no weight_version in the answer: {version!r}")
        return version

    def healthy(self) -> bool:
        """Whether it answers /health with 200 within a few seconds."""
        try:
            self._call("GET", "/health", timeout_s=min(self.timeout_s, _PROMPTLY_S))
        except ServerError:
            return False
        return True

    def responsive(self) -> bool:
        """Whether its scheduler answers in time; a server whose scheduler has died answers /health for a minute."""
        try:
            self._call("GET", "/server_info", timeout_s=min(self.timeout_s, _SOON_S))
        except ServerError:
            return False
        return True

    def generate(self, body: Mapping[str, Any]) -> Any:
        """The answer of /generate, as it came."""
        return self._json("POST", "/generate", body)

    # -- the bracket of an update ----------------------------------------------------------------------------------

    def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        """Stop generating; "abort" ends what is in flight (about a second when something is)."""
        self._call("POST", "/pause_generation", {"mode": mode})

    def flush(self, deadline_s: float | None = None) -> None:
        """Empty the cache of prefixes, which old weights filled; again until the server finds itself idle.

        deadline_s: seconds, `timeout_s` when None.
        """
        deadline_s = self.timeout_s if deadline_s is None else deadline_s
        deadline = time.monotonic() + deadline_s
        tries, refusal = 0, ""
        while (left := deadline - time.monotonic()) > 0:
            tries += 1
            try:
                self._call("GET", "/flush_cache", timeout_s=left)
                return
            except ServerError as error:
                if error.status == 400:  # the answer of a server that still has requests
                    refusal = str(error)
                elif not refusal or time.monotonic() < deadline:
                    raise
            time.sleep(min(_FLUSH_PAUSE_S * tries, 1.0, max(0.0, deadline - time.monotonic())))
        raise ServerError(
            self.endpoint,
            "/flush_cache",
            f"waited {deadline_s:g} s for the server to be idle so that its cache can be emptied, {tries} tries; "
            f"last answer: {refusal or 'none'}",
        )

    def continue_(self) -> None:
        """Resume generation after `pause`."""
        self._call("POST", "/continue_generation", {})

    def abort_all(self) -> None:
        """End every request in flight; each is answered with what it has."""
        self._call("POST", "/abort_request", {"rid": "", "abort_all": True})

    # -- weights ---------------------------------------------------------------------------------------------------

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
        self._succeed("/init_weights_update_group", body)

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
        self._succeed("/destroy_weights_update_group", {"group_name": group})

    def update_from_disk(self, model_path: str, *, load_format: str | None = None, version: int | None = None) -> None:
        """Load a checkpoint that the server can read."""
        self._update("/update_weights_from_disk", {"model_path": model_path, "load_format": load_format}, version)

    def set_version(self, version: int) -> None:
        """Stamp the weights that it holds; what is in flight goes on."""
        self._succeed("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def checksums(self) -> list[dict[str, Any]] | None:
        """For each of its ranks "checksums" ({its own parameter's name: hash}), "per_gpu_checksum", "parallelism_info".

        None where it has no checksums, as on a CPU, where SGLang's own code asks for CUDA.
        """
        try:
            ranks = self._object("POST", "/weights_checker", {"action": "checksum"}).get("ranks")
        except ServerError as error:
            if error.status is not None and 400 <= error.status < 500 and error.status not in (401, 403):
                return None
            raise
        if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
            raise ServerError(self.endpoint, "/weights_checker", f"no list of ranks in the answer: {ranks!r:.80}")
        return ranks

    # -- memory ----------------------------------------------------------------------------------------------------

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Give back memory; tags "weights", "kv_cache", "cuda_graph", None for all. The server must be idle."""
        self._call("POST", "/release_memory_occupation", {"tags": None if tags is None else list(tags)})

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again; weights are then undefined until the next update."""
        self._call("POST", "/resume_memory_occupation", {"tags": None if tags is None else list(tags)})

    # -- requests --------------------------------------------------------------------------------------------------

    def _update(self, path: str, body: dict[str, Any], version: int | None) -> None:
        # Flushing belongs before the update: SGLang asserts that it succeeds, and a server with work left would die.
        body |= {"flush_cache": False, "abort_all_requests": False}
        if version is not None:
            body["weight_version"] = str(version)
        self._succeed(path, body)

    def _succeed(self, path: str, body: Mapping[str, Any]) -> None:
        """POST to an endpoint that answers {"success", "message"}."""
        answer = self._object("POST", path, body)
        if answer.get("success") is not True:
            raise ServerError(self.endpoint, path, f"no success: {shortened(str(answer.get('message')))}", status=200)

    def _object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = self._json(method, path, body)
        if not isinstance(answer, dict):
            raise ServerError(self.endpoint, path, f"answered no object but {answer!r:.80}", status=200)
        return answer

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        content = self._call(method, path, body)
        try:
            return json.loads(content)
        except ValueError as error:
            what = f"answered no JSON ({error}): {shortened(content.decode(errors='replace'))!r}"
            raise ServerError(self.endpoint, path, what, status=200) from None

    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> bytes:
        """Send a request and return the body of its 200 answer."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return self._caller.call(self.endpoint, method, path, body, timeout_s=timeout_s)
