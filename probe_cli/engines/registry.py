"""Engines by name: the ones that come with this package, and those that others add by entry point."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import ENTRY_POINT_GROUP, Engine, EngineFactory, EngineOptions
from probe_cli.errors import EngineError, UsageError

__all__ = ["BUILT_IN", "create_engine", "default_engine", "engine_names", "split_engine"]

#: Found without an installed distribution too, e.g. from a source tree on PYTHONPATH.
BUILT_IN: Mapping[str, str] = {
    "embedded": "probe_cli.engines.embedded:create",
    "python": "probe_cli.engines.python:create",
    "vllm": "probe_cli.engines.vllm:create",
}


def engine_names() -> tuple[str, ...]:
    """The names that `--engine` takes."""
    return tuple(sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def split_engine(text: str) -> tuple[str, str]:
    """`name:reference` as its parts; the reference is what the engine itself makes of it."""
    name, _, reference = text.partition(":")
    return name, reference


def create_engine(name: str, options: EngineOptions) -> Engine:
    """The engine of this name. Raises UsageError if there is none, EngineError if it cannot be imported."""
    return _factory(name)(options)


def _factory(name: str) -> EngineFactory:
    found: Any
    try:
        if name in BUILT_IN:
            found = EntryPoint(name, BUILT_IN[name], ENTRY_POINT_GROUP).load()
        else:
            points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
            if not points:
                raise UsageError(f"no engine {name!r}", hint=f"there are {', '.join(engine_names())}")
            found = points[0].load()
    except (ImportError, AttributeError) as error:
        raise EngineError(f"engine {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise EngineError(f"engine {name!r}: its entry point {found!r} is not callable")
    factory: EngineFactory = found
    return factory


def default_engine(checkpoint: Checkpoint) -> str:
    """The engine for a checkpoint when none is named: an installed serving engine, else the embedded models.

    Raises UsageError if neither can do it.
    """
    if importlib.util.find_spec("vllm") is not None:
        return "vllm"
    from probe_cli.engines.embedded.model import SUPPORTED_MODEL_TYPES

    kind = (checkpoint.config or {}).get("model_type")
    if kind in SUPPORTED_MODEL_TYPES:
        return "embedded"
    what = "no config.json says what model this is" if kind is None else f"the embedded models do not know {kind!r}"
    raise UsageError(
        f"no engine is installed, and {what}",
        hint="pip install 'probe-manifest[vllm]' (on a machine without a GPU too), or name one with --engine",
    )
