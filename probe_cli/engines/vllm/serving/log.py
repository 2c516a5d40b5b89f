"""Our log lines go where vLLM's go."""

from __future__ import annotations

import logging

__all__ = ["use_logger_of_vllm"]


def use_logger_of_vllm() -> None:
    """Give our logger the handlers and the level of vLLM's, unless the application has set it up itself."""
    ours, theirs = logging.getLogger("probe_cli"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
