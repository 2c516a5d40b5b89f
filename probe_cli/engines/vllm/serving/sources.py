"""The checkpoint as a load sees it: noted while it streams by, or read from headers where nothing streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from probe_cli.checkpoint import Checkpoint, Source
from probe_cli.errors import CheckpointError
from probe_cli.model.dtypes import dtype_name

__all__ = ["NotedSources", "headers_of"]


class NotedSources:
    """Name, dtype and shape of everything that a first load was given, in order."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}

    def __len__(self) -> int:
        return len(self._sources)

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same stream, noted."""
        for name, tensor in weights:
            shape = tuple(tensor.shape)
            self._sources[name] = Source(name, dtype_name(tensor.dtype), shape, tensor.numel() * tensor.element_size())
            yield name, tensor

    def checkpoint(self, model_path: str) -> Checkpoint:
        """What was noted. Where the model's own files hold the very same tensors, they stand behind it, so that small
        values can be read."""
        wire = Checkpoint(sources=tuple(self._sources.values()), kind="wire")
        try:
            files = Checkpoint.open(model_path) if Path(model_path).is_dir() else None
        except CheckpointError:
            files = None
        if files is None:
            return wire
        if files.digest != wire.digest:
            return Checkpoint(sources=wire.sources, kind="wire", config=files.config)
        return files.reordered([source.name for source in wire.sources])


def headers_of(model_path: str, revision: str | None) -> Checkpoint:
    """A model's checkpoint by its headers alone. Raises CheckpointError if there is none at that path."""
    return Checkpoint.open(model_path, revision=None if Path(model_path).exists() else revision)
