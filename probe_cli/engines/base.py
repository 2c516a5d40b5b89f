"""What an engine is to the probe: something that builds one rank's model on meta and knows how to load it.

An engine is found by the entry point group `probe_manifest.engines`; each entry is a callable that takes
`EngineOptions` and returns an `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from probe_cli.checkpoint import Checkpoint
from probe_cli.manifest.schema import EngineIdentity
from probe_cli.topology import Rank, Topology

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["ENTRY_POINT_GROUP", "Engine", "EngineFactory", "EngineOptions"]

ENTRY_POINT_GROUP = "probe_manifest.engines"


@dataclass(frozen=True)
class EngineOptions:
    """What the user asked for, before the engine has looked at it.

    `reference` is what follows the colon in `--engine name:reference`; `arguments` are the `key=value` pairs of
    `--arg`/`--engine-arg`, values parsed as JSON where they are JSON.
    """

    reference: str = ""
    target: str = "auto"
    role: str = "main"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    allow_untested_version: bool = False
    trust_remote_code: bool = False


class Engine(Protocol):
    """One engine with its options. Methods run in the order in which they stand here; all but the first three run in
    a worker process of the rank's own, forked after `warm_up`."""

    @property
    def identity(self) -> EngineIdentity:
        """Name, version, target and the arguments that shape the contract. Reproducible: no paths, no clock."""

    def ranks(self, checkpoint: Checkpoint, topology: Topology) -> Sequence[Rank]:
        """The ranks of `topology`. Raises UsageError if this engine cannot run this checkpoint that way."""

    def warm_up(self) -> None:
        """Import what is heavy, once, before workers are forked. Must not start threads or touch a device."""

    def ordered(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with its sources in the order in which this engine loads them."""

    def materialize(self, checkpoint: Checkpoint, rank: Rank) -> nn.Module:
        """Build this rank's model with its weights on the meta device. Reads no weights, runs no collective."""

    def loading(self, model: nn.Module) -> AbstractContextManager[None]:
        """What a load runs inside of (grad mode, the engine's config context)."""

    def load_weights(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Run the model's own loading code on the stream of (canonical name, tensor)."""

    @property
    def control_flags(self) -> frozenset[str]:
        """Loader arguments that steer the call but select no part of the tensor, e.g. `return_success`."""

    def declined(self, result: object) -> bool:
        """Whether a loader that returned `result` says that it did not take the tensor."""

    def default_loaders(self) -> Sequence[Callable[..., object]]:
        """Module-level functions that load parameters which carry no `weight_loader` of their own. Their calls are
        applications, wherever they were imported to by name."""


EngineFactory = Callable[[EngineOptions], Engine]
