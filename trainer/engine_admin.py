"""The admin routes of one vLLM server, for the trainer: synchronous, and every call with a time limit."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping

from common.errors import RollmillError

ADMIN_TIMEOUT_S = 15.0
"""Of pause, resume and the like, which wait for a decoding step."""
UPDATE_TIMEOUT_S = 300.0
"""Of taking weights in."""
_DETAIL_CHARS = 300


class TransferFailed(RollmillError):
    """An engine did not take weights over. The message names it and what it said."""


class EngineAdmin:
    """Has, among others, the four methods that vLLM's trainer-side classes want of a client."""

    def __init__(self, url: str, *, timeout_s: float = ADMIN_TIMEOUT_S, update_timeout_s: float = UPDATE_TIMEOUT_S):
        self.url = url
        self._timeout_s = timeout_s
        self._update_timeout_s = update_timeout_s

    def pause(self) -> None:
        """Freeze all requests; after `resume` they go on with keys and values computed anew."""
        self._expect(self._send("POST", "/pause?mode=keep&clear_cache=true"), "status", "paused")

    def resume(self) -> None:
        """Let requests go on. Without a pause it is no error."""
        self._expect(self._send("POST", "/resume"), "status", "resumed")

    def update_weight_version(self, name: str) -> None:
        """Make it report this name for tokens that it samples from now on."""
        self._expect(self._send("POST", "/update_weight_version", {"new_version": name}), "success", True)

    def num_ranks(self) -> int:
        """Processes that hold a part of the model each, in all its replicas."""
        found = self._send("GET", "/get_world_size").get("world_size")
        if not isinstance(found, int):
            raise TransferFailed(f"engine {self.url} /get_world_size answers world_size={found!r}, expected a number")
        return found

    def init_weight_transfer_engine(self, init_info: Mapping[str, object]) -> None:
        self._send("POST", "/init_weight_transfer_engine", {"init_info": init_info}, timeout_s=self._update_timeout_s)

    def start_weight_update(self) -> None:
        self._send("POST", "/start_weight_update")

    def update_weights(self, update_info: Mapping[str, object]) -> None:
        """Returns when the engine has all weights, and so only after they were sent."""
        self._send("POST", "/update_weights", {"update_info": update_info}, timeout_s=self._update_timeout_s)

    def finish_weight_update(self) -> None:
        self._send("POST", "/finish_weight_update")

    def _send(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float | None = None
    ) -> Mapping[str, object]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s or self._timeout_s) as response:
                reply = json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")[:_DETAIL_CHARS]
            raise TransferFailed(f"engine {self.url} {path} answers {error.code}: {said}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TransferFailed(f"engine {self.url} {path}: {type(error).__name__}: {error}") from error
        return reply if isinstance(reply, dict) else {}

    def _expect(self, reply: Mapping[str, object], name: str, wanted: object) -> None:
        if reply.get(name) != wanted:
            raise TransferFailed(f"engine {self.url} answers {name}={reply.get(name)!r}, expected {wanted!r}")
