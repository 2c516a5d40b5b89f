"""Run cases on a real vLLM: imported once, a forked process for each case, since a process can be only one rank."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.vllm.engine import VllmEngine
from probe_cli.manifest import Manifest
from probe_cli.probe.build import build_rank
from probe_cli.topology import Rank, Topology
from tests.oracle import check

__all__ = ["engine_for", "hold_against_real_load", "in_child", "manifest_and_real_loads", "probe_rank"]


def engine_for(target: str, **arguments: Any) -> VllmEngine:
    """An engine with vLLM imported."""
    engine = VllmEngine(EngineOptions(target=target, arguments=arguments))
    engine.warm_up()
    return engine


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that runs in a forked process; its exception, with the traceback as text."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            payload = pickle.dumps((True, function(*args)))
        except BaseException as error:
            payload = pickle.dumps((False, (type(error).__name__, str(error), traceback.format_exc())))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(payload)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not data:
        raise AssertionError(f"the child died: {os.waitstatus_to_exitcode(status)}")
    fine, result = pickle.loads(data)
    if not fine:
        name, message, text = result
        raise ChildFailed(name, message, text)
    return result


class ChildFailed(AssertionError):
    """A case failed in its process. `kind` and `message` are those of its exception."""

    def __init__(self, kind: str, message: str, text: str) -> None:
        super().__init__(f"{kind}: {message}\n{text}")
        self.kind = kind
        self.message = message


def probe_rank(
    folder: Path, rank: Rank, engine: VllmEngine, *, verify: bool = False
) -> tuple[Manifest, dict[str, str]]:
    """The manifest of one rank, and its unused sources with their reasons."""
    checkpoint = Checkpoint.open(folder)
    engine.ranks(checkpoint, rank.topology)
    result = build_rank(engine, checkpoint, rank, verify=verify)
    return result.manifest, result.unused


def manifest_and_real_loads(
    folder: Path, topology: Topology, index: int, engine: VllmEngine
) -> tuple[Manifest, Callable[[Mapping[str, torch.Tensor]], nn.Module]]:
    """The manifest of a rank, and a function that really loads sources into a fresh model of it, on the host, over
    sentinels. To be called in a child."""
    rank = topology.rank(index)
    manifest, _ = probe_rank(folder, rank, engine)

    def load(sources: Mapping[str, torch.Tensor]) -> nn.Module:
        model = real_model(engine)
        with torch.no_grad():
            for parameter in model.parameters():
                fill_with_sentinel(parameter)
        with engine.loading(model):
            engine.load_weights(model, iter([(name, value.clone()) for name, value in sources.items()]))
        return model

    return manifest, load


def hold_against_real_load(engine: VllmEngine, folder: Path, topology: Topology, index: int) -> None:
    """What the manifest of a rank says, held against real loads of the checkpoint, byte by byte. To be called in a
    child."""
    manifest, load = manifest_and_real_loads(folder, topology, index, engine)
    sources: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        sources.update(load_file(file))
    if manifest.document.summary.applications < 10:
        raise AssertionError("the model loads next to nothing: the case proves nothing")
    check(manifest, load, {source.name: sources[source.name] for source in Checkpoint.open(folder).sources})


def real_model(engine: VllmEngine) -> nn.Module:
    """A second model of the rank that this process is, with real memory."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = engine._config
    config.compilation_config.static_forward_context.clear()
    config.compilation_config.static_all_moe_layers.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        return initialize_model(vllm_config=config, model_config=config.model_config)


def fill_with_sentinel(parameter: torch.Tensor) -> None:
    """Bytes that no checkpoint of the tests holds."""
    parameter.view(-1).view(torch.uint8).fill_(0xAB) if parameter.is_contiguous() else parameter.fill_(-77)
