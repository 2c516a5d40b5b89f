"""An error that vLLM only logs fails the build: an emulated platform must fail loudly."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from probe_cli.errors import EngineError

__all__ = ["errors_fail"]


class _Keeper(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(f"{record.name}: {' '.join(record.getMessage().split())}")


@contextmanager
def errors_fail(what: str) -> Iterator[None]:
    """Raise EngineError at the end if anything logged an error under `vllm` meanwhile. An error that is raised says what was
    logged before it: vLLM's own often refer to the log."""
    keeper = _Keeper()
    logger = logging.getLogger("vllm")
    logger.addHandler(keeper)
    try:
        yield
    except EngineError as error:
        if not keeper.messages:
            raise
        raise EngineError(f"{error} (vLLM logged: {keeper.messages[-1][-400:]})", hint=error.hint) from error
    finally:
        logger.removeHandler(keeper)
    if keeper.messages:
        raise EngineError(f"vLLM logged an error while {what}: {keeper.messages[0]}")
