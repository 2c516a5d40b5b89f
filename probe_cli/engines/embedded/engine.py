"""The embedded family as an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from probe_cli._version import __version__
from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.embedded.model import CausalLM, check_config, default_weight_loader
from probe_cli.engines.embedded.parallel import ParallelContext
from probe_cli.errors import UsageError
from probe_cli.manifest.schema import EngineIdentity
from probe_cli.probe.live import LiveEngine, torch_version
from probe_cli.probe.materialize import MetaMaterializer
from probe_cli.topology import Rank, Topology

__all__ = ["EmbeddedEngine", "model_dtype"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class EmbeddedEngine(LiveEngine):
    """Builds `CausalLM` for any rank of a TP x EP x PP topology."""

    def __init__(self, options: EngineOptions) -> None:
        if options.target not in ("auto", "cpu"):
            raise UsageError(
                f"the embedded models have the same layout everywhere; --target {options.target} means nothing"
            )
        if options.arguments:
            raise UsageError(f"the embedded engine takes no arguments, got {', '.join(sorted(options.arguments))}")
        super().__init__(EngineIdentity(name="embedded", version=__version__, torch=torch_version(), target="cpu"))

    def ranks(self, checkpoint: Checkpoint, topology: Topology) -> Sequence[Rank]:
        config = checkpoint.config
        if config is None:
            raise UsageError("the embedded engine needs a config.json beside the checkpoint")
        ranks = topology.ranks()
        check_config(config, ParallelContext(ranks[0]))
        return ranks

    def materialize(self, checkpoint: Checkpoint, rank: Rank) -> nn.Module:
        config = checkpoint.config or {}
        before = torch.get_default_dtype()
        torch.set_default_dtype(model_dtype(config))
        try:
            with MetaMaterializer():
                return CausalLM(config, ParallelContext(rank))
        finally:
            torch.set_default_dtype(before)

    def default_loaders(self) -> Sequence[Callable[..., object]]:
        return (default_weight_loader,)


def model_dtype(config: object) -> torch.dtype:
    """The dtype that config.json names (`dtype`, or `torch_dtype` in older files); float32 without one."""
    get = getattr(config, "get", lambda key: None)
    name = get("dtype") or get("torch_dtype") or "float32"
    dtype = _DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise UsageError(f"config.json: dtype {name!r} is none of {', '.join(_DTYPES)}")
    return dtype
