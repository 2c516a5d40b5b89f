"""An engine whose weights are undefined does not generate: requests are refused until a full update has repaired them.

Pausing the scheduler instead (`EngineCore.pause_scheduler`) would leave requests waiting without a word, and `/resume` would end it
early; an error in `execute_model` would end the engine (vLLM 0.32 and 0.33, `v1/engine/core.py`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from probe_cli.errors import ReloadError

__all__ = ["ask_after_call", "ask_after_wake", "refuse_callers", "refuse_requests"]

_log = logging.getLogger("probe_cli.vllm")

_ATTRIBUTE = "_probe_manifest_undefined"
_QUESTION = "probe_manifest_undefined"
_TIMEOUT = 60.0
#: Methods of workers that only read.
_READERS = frozenset({"probe_manifest_receipt", "probe_manifest_digests", _QUESTION})
_HINT = "send a full update; PROBE_MANIFEST_ON_UNDEFINED=serve answers requests all the same"


def ask_after_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineCore.collective_rpc`, through which all updates come: afterwards the workers are asked what their weights are."""

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method in _READERS:
            return original(self, method, *args, **kwargs)
        try:
            return original(self, method, *args, **kwargs)
        finally:
            _ask(self)

    return collective_rpc


def ask_after_wake(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineCore.wake_up`: an engine that slept at level 2 has no weights until it is given some."""

    @functools.wraps(original)
    def wake_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _ask(self)
        return result

    return wake_up


def refuse_requests(original: Callable[..., Any]) -> Callable[..., Any]:
    """`EngineCore.add_request` in a process of its own: the request ends with the reason "error" (over HTTP with status 500)."""

    @functools.wraps(original)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        reason = getattr(self, _ATTRIBUTE, "")
        if not reason or not hasattr(self, "_send_error_outputs_to_client"):
            return original(self, request, *args, **kwargs)
        _log.error("request %s is refused: the weights are undefined: %s", request.request_id, reason.splitlines()[0])
        self._send_error_outputs_to_client([request.request_id], request.client_index)
        return None

    return add_request


def refuse_callers(original: Callable[..., Any]) -> Callable[..., Any]:
    """`LLMEngine.add_request` with the engine in the caller's own process. Raises ReloadError, before vLLM has noted the request."""

    @functools.wraps(original)
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        reason = getattr(getattr(self.engine_core, "engine_core", None), _ATTRIBUTE, "")
        if reason:
            raise ReloadError(f"the weights are undefined, requests are refused: {reason}", hint=_HINT)
        return original(self, *args, **kwargs)

    return add_request


def _ask(core: Any) -> None:
    try:
        answers = core.model_executor.collective_rpc(_QUESTION, timeout=_TIMEOUT)
    except Exception as error:  # whatever an executor raises when a worker is gone
        _log.warning("the workers cannot be asked for the state of their weights: %s", error)
        return
    reason = next((answer for answer in answers if answer), "")
    before = getattr(core, _ATTRIBUTE, "")
    setattr(core, _ATTRIBUTE, reason)
    if reason and not before:
        _log.error("REQUESTS ARE REFUSED until a full update has succeeded: %s", reason)
        _end_requests(core)
    elif before and not reason:
        _log.warning("the weights are complete again: requests are accepted")


def _end_requests(core: Any) -> None:
    """End the requests that are under way with an error: half of their tokens would be of one model, half of another."""
    from vllm.v1.request import RequestStatus

    by_client: dict[int, list[str]] = {}
    for request in core.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR):
        by_client.setdefault(request.client_index, []).append(request.request_id)
    send = getattr(core, "_send_error_outputs_to_client", None)
    for client, requests in by_client.items():
        if send is not None:
            send(requests, client)
        else:
            _answer_next_step(core, requests)


def _answer_next_step(core: Any, requests: list[str]) -> None:
    """In the caller's own process outputs are what a step returns."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    step = core.step_fn

    def answer() -> tuple[dict[int, Any], bool]:
        core.step_fn = step
        outputs = [EngineCoreOutput(request, [], finish_reason=FinishReason.ERROR) for request in requests]
        return {0: EngineCoreOutputs(outputs=outputs, finished_requests=set(requests))}, False

    core.step_fn = answer
