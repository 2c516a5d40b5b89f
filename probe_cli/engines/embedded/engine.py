"""The embedded family as an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from probe_cli._version import __version__
from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.base import EngineOptions
from probe_cli.engines.embedded.config import ModelConfig
from probe_cli.engines.embedded.model import CausalLM, default_weight_loader
from probe_cli.engines.embedded.parallel import ParallelContext
from probe_cli.errors import UsageError
from probe_cli.manifest.schema import EngineIdentity
from probe_cli.probe.live import LiveEngine, torch_version
from probe_cli.probe.materialize import MetaMaterializer
from probe_cli.topology import Rank, Topology

__all__ = ["EmbeddedEngine"]


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
        ModelConfig.read(config).check_topology(topology)
        return topology.ranks()

    def materialize(self, checkpoint: Checkpoint, rank: Rank) -> nn.Module:
        with MetaMaterializer():
            return CausalLM(checkpoint.config or {}, ParallelContext(rank))

    def default_loaders(self) -> Sequence[Callable[..., object]]:
        return (default_weight_loader,)
