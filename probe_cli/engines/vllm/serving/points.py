"""The places in vLLM that the plugin holds on to, with the releases they were read in. Nothing else knows vLLM's private names."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from probe_cli.engines.vllm.versions import SUPPORTED
from probe_cli.errors import EngineError

__all__ = ["OWN_PLANS", "POINTS", "Point", "check_version", "resolve"]

#: Engines of `vllm.distributed.weight_transfer` that write by a plan of their own, made in the live process: what they do is not
#: loading, so their updates are left alone.
OWN_PLANS = ("sharded_rdt_engine", "m2n_engine", "sparse_nccl_engine", "modelexpress_engine")


@dataclass(frozen=True)
class Point:
    """`name` is a function of a module, or `Class.method`. `everywhere`: replaced under every name it was imported to."""

    module: str
    name: str
    why: str
    everywhere: bool = False


_LOADER = "vllm.model_executor.model_loader"

#: Equal in 0.32.0 and 0.33.0.
POINTS: dict[str, Point] = {
    "create": Point(f"{_LOADER}.base_loader", "BaseModelLoader.create_model", "a model exists; its weights do not"),
    "process": Point(
        f"{_LOADER}.utils", "process_weights_after_loading", "loaded, about to be post-processed", everywhere=True
    ),
    "begin": Point(f"{_LOADER}.reload.layerwise", "initialize_layerwise_reload", "an update begins", everywhere=True),
    "finish": Point(f"{_LOADER}.reload.layerwise", "finalize_layerwise_reload", "an update ends", everywhere=True),
    "loaded": Point(
        "vllm.v1.worker.gpu_worker", "Worker.load_model", "a draft model has been given the model's own layers"
    ),
    "worker_finish": Point(
        "vllm.v1.worker.gpu_worker", "Worker.finish_weight_update", "a failed end must not leave the update open"
    ),
    "sleep": Point("vllm.v1.worker.gpu_worker", "Worker.sleep", "level 2 discards the weights"),
    "call": Point("vllm.v1.engine.core", "EngineCore.collective_rpc", "an update may have left the weights undefined"),
    "wake": Point("vllm.v1.engine.core", "EngineCore.wake_up", "an engine that slept at level 2 has no weights"),
    "request": Point("vllm.v1.engine.core", "EngineCore.add_request", "undefined weights do not generate"),
    "caller": Point(
        "vllm.v1.engine.llm_engine",
        "LLMEngine.add_request",
        "the same, before a request is noted in the caller's process",
    ),
    "executor": Point(
        "vllm.v1.executor.multiproc_executor",
        "MultiprocExecutor.collective_rpc",
        "a failed call must not leave answers unread",
    ),
    "worker": Point("vllm.v1.worker.worker_base", "WorkerBase", "answers `collective_rpc`"),
    "dummy": Point(f"{_LOADER}.dummy_loader", "DummyModelLoader.__init__", "takes no extra config of its own"),
}


def check_version(version: str) -> str | None:
    """None for a supported release, else the line that refuses it."""
    release = ".".join(version.split("+")[0].split(".")[:2])
    if release in SUPPORTED:
        return None
    return f"vLLM {version} is not supported; tested with {', '.join(f'{v}.x' for v in SUPPORTED)}"


def resolve(point: Point) -> tuple[Any, str, Any]:
    """(owner, attribute, value) of a point. Raises EngineError if this vLLM has no such thing."""
    owner: Any = importlib.import_module(point.module)
    *path, attribute = point.name.split(".")
    try:
        for step in path:
            owner = getattr(owner, step)
        return owner, attribute, getattr(owner, attribute)
    except AttributeError:
        raise EngineError(
            f"this vLLM has no {point.module}.{point.name}", hint=f"supported: {', '.join(SUPPORTED)}"
        ) from None
