"""Loading code that uses threads. A dispatch mode sees one thread: what another one writes would be missing from the
contract, so none may go by unseen.

Work that is given to a pool of `concurrent.futures` runs at once, in the thread that gives it: the result is the same,
and every write is recorded. A thread of any other kind is let run, and an operator in it that the contract would have to
know of fails the build.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch._ops import OpOverload

from probe_cli.model.dispatch import DispatchMode, tensors_in
from probe_cli.model.patched import patched
from probe_cli.model.storage import storage_key
from probe_cli.probe.ops import Kind, op_info
from probe_cli.probe.recorder import Recorder
from probe_cli.probe.writes import code_line

__all__ = ["watch_threads"]


@contextmanager
def watch_threads(recorder: Recorder) -> Iterator[None]:
    """Inside: nothing that this thread starts can load behind the recorder's back."""
    watch = _Watch(recorder)
    submit = watch.submit(ThreadPoolExecutor.submit)
    start = watch.start(threading.Thread.start)
    try:
        with patched(ThreadPoolExecutor, submit=submit), patched(threading.Thread, start=start):
            yield
    finally:
        watch.active = False


class _Watch:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.active = True
        self._owner = threading.get_ident()
        self._started = threading.local()

    def submit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def submit(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            # An initializer prepares the pool's own threads, and a pool that is shut down must say so.
            if threading.get_ident() != self._owner or pool._initializer is not None or pool._shutdown:
                return original(pool, function, *args, **kwargs)
            future: Future[Any] = Future()
            future.set_running_or_notify_cancel()
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)
            return future

        return submit

    def start(self, original: Callable[..., None]) -> Callable[..., None]:
        def start(thread: threading.Thread) -> None:
            if threading.get_ident() == self._owner or getattr(self._started, "by_the_load", False):
                run = thread.run

                def watched() -> None:
                    vars(thread).pop("run", None)
                    self._started.by_the_load = True
                    with _OtherThread(self, thread):
                        run()

                thread.run = watched  # type: ignore[method-assign]
            original(thread)

        return start


class _OtherThread(DispatchMode):
    """In a thread that the load started: refuses what belongs into the contract, lets everything else through."""

    def __init__(self, watch: _Watch, thread: threading.Thread) -> None:
        super().__init__()
        self._watch = watch
        self._name = thread.name

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        if self._watch.active and info.kind is not Kind.VIEW:
            recorder = self._watch.recorder
            for tensor in tensors_in(args, kwargs):
                key = storage_key(tensor)
                if recorder.inventory.on_storage(key) or (key in recorder.origins and recorder.sources_of(tensor)):
                    raise recorder.fail(
                        f"{info.name} takes {recorder.describe(tensor)} in another thread ({self._name}), "
                        f"at {code_line()}",
                        hint="a dry run follows one thread: load in it, or through concurrent.futures.ThreadPoolExecutor, "
                        "whose work is then done in turn",
                    )
        return func(*args, **kwargs)
