"""Functions under `torch.compile`, run as they are written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from probe_cli.model.patched import patched

__all__ = ["run_eagerly"]


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Inside, functions under `torch.compile` run as they are written: its tracer would trace the recorder with them."""

    def compiled(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    with ExitStack() as stack:
        stack.enter_context(patched(torch, compile=compiled))
        # What was compiled before brought the tracer with it; importing it for nothing takes seconds.
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
