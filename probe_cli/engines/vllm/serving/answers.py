"""After a call that failed on one worker, the answers of the workers behind it.

`MultiprocExecutor.collective_rpc` (vLLM 0.32 and 0.33) raises at the first worker that failed and leaves the answers of those behind
it in their queues. Each later call then reads an answer that is one call old: after a failed update on two workers, the repair seems
to fail too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["read_all_answers"]

_TIMEOUT = 120.0


def read_all_answers(original: Callable[..., Any]) -> Callable[..., Any]:
    """`collective_rpc` that reads what every worker answers, also when one of them failed."""

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("non_block") or kwargs.get("unique_reply_rank") is not None:
            return original(self, method, *args, **kwargs)
        last: list[Any] = []
        queues = list(self.response_mqs)
        for queue in queues:
            queue.dequeue = _noting(queue.dequeue, queue, last)
        try:
            return original(self, method, *args, **kwargs)
        except RuntimeError:
            _drain(queues, last)
            raise
        finally:
            for queue in queues:
                queue.__dict__.pop("dequeue", None)

    return collective_rpc


def _noting(dequeue: Callable[..., Any], queue: Any, last: list[Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        answer = dequeue(*args, **kwargs)
        last[:] = [queue]
        return answer

    return noted


def _drain(queues: list[Any], last: list[Any]) -> None:
    """Read on behind the queue whose answer was a failure."""
    if not last:
        return
    for queue in queues[queues.index(last[0]) + 1 :]:
        try:
            queue.dequeue(timeout=_TIMEOUT)
        except TimeoutError:
            return
