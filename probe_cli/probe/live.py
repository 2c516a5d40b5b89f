"""The engine of a model that is already there: it loads with its own `load_weights` and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from probe_cli.checkpoint import Checkpoint
from probe_cli.errors import EngineError
from probe_cli.manifest.schema import EngineIdentity
from probe_cli.model.selectors import DEFAULT_CONTROL_FLAGS
from probe_cli.topology import Rank, Topology

__all__ = ["LiveEngine"]


class LiveEngine:
    """Implements the `Engine` protocol around `model.load_weights(iterable of (name, tensor))`."""

    def __init__(self, identity: EngineIdentity | None = None) -> None:
        self._identity = identity or EngineIdentity(name="live", version="1", torch=torch_version())

    @property
    def identity(self) -> EngineIdentity:
        return self._identity

    @property
    def control_flags(self) -> frozenset[str]:
        return DEFAULT_CONTROL_FLAGS

    def ranks(self, checkpoint: Checkpoint, topology: Topology) -> Sequence[Rank]:
        return topology.ranks()

    def warm_up(self) -> None:
        """Nothing to import: the model is there."""

    def ordered(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint

    def materialize(self, checkpoint: Checkpoint, rank: Rank) -> nn.Module:
        raise EngineError("a live model is probed where it is; it cannot be built for another rank")

    @contextmanager
    def loading(self, model: nn.Module) -> Iterator[None]:
        with torch.no_grad():
            yield

    def load_weights(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        load = getattr(model, "load_weights", None)
        if not callable(load):
            raise EngineError(
                f"{type(model).__name__} has no load_weights(iterable of (name, tensor))",
                hint="a model must know how to load itself to be probed",
            )
        return load(weights)

    def declined(self, result: object) -> bool:
        return result is False

    def default_loaders(self) -> Sequence[Callable[..., object]]:
        return ()


def torch_version() -> str:
    """torch's release without the build's local part (`+cpu`), which does not shape a contract."""
    return torch.__version__.split("+")[0]
