"""Real values for code that insists on them.

A replay has no data. A loader that reads a value (`.item()`, a comparison, `tolist`) gets the real one: from the file if
the source is small and at hand, through the operations that were applied to it since. Otherwise the build stops; a value is
never made up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from probe_cli.checkpoint import Checkpoint, Source
from probe_cli.errors import CheckpointError, ProbeError
from probe_cli.model.dispatch import tensors_in
from probe_cli.model.dtypes import torch_dtype
from probe_cli.model.storage import storage_key

__all__ = ["Recipe", "ValueStore"]

_SUPPRESSED = "the value was written during this load, and a dry run writes nothing"
_UNKNOWN = "the value cannot be derived from the checkpoint"


@dataclass(frozen=True)
class Recipe:
    """How a storage was made: call this to make it for real. `base` is the geometry that the result has."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Which of the results (for operators with several).
    output: int
    #: Real tensors among the arguments, and how often each had been written to.
    seen: tuple[tuple[int, int], ...] = ()


class ValueStore:
    """Real contents of storages that stand on meta. `limit`: bytes up to which a source is read."""

    def __init__(self, checkpoint: Checkpoint, limit: int) -> None:
        self._checkpoint = checkpoint
        self._limit = limit
        #: Storage -> the source that it holds unchanged; set by the recorder.
        self.source_of: Callable[[int], Source | None] = lambda key: None
        self._recipes: dict[int, Recipe] = {}
        self._contents: dict[int, torch.Tensor] = {}
        #: Storages whose real contents are not what the load would have left there, and why they are not known.
        self.stale: dict[int, str] = {}
        #: How often the load wrote to a storage of its own.
        self._written: dict[int, int] = {}

    def add_recipe(self, key: int, recipe: Recipe) -> None:
        """Know how a storage on meta was made."""
        inputs = {storage_key(tensor) for tensor in tensors_in(recipe.args, recipe.kwargs)}
        self._recipes[key] = replace(recipe, seen=tuple((k, self._written.get(k, 0)) for k in inputs))

    def touch(self, key: int) -> None:
        """The load writes to a storage of its own: what was derived from it before can no longer be had."""
        self._written[key] = self._written.get(key, 0) + 1

    def spoil(self, key: int, why: str = _SUPPRESSED) -> None:
        """A write to this storage was suppressed, or cannot be followed: its contents are unknown from now on."""
        self.stale[key] = why
        self._recipes.pop(key, None)
        self._contents.pop(key, None)

    def forget(self, key: int) -> None:
        """The storage is gone; another one may get its key."""
        self.stale.pop(key, None)
        self._recipes.pop(key, None)
        self._contents.pop(key, None)

    def can_follow(self, key: int, tensor: torch.Tensor) -> bool:
        """Whether a value made of this tensor could still be had: it is real and current, or small and known."""
        return self.obstacle(key, tensor) is None

    def obstacle(self, key: int, tensor: torch.Tensor) -> str | None:
        """Why a value made of this tensor cannot be had."""
        if key in self.stale:
            return self.stale[key]
        source = self.source_of(key)
        if source is not None:
            return None if source.nbytes <= self._limit else self._over_limit(source)
        if tensor.device.type != "meta" or key in self._recipes:
            return None
        return _UNKNOWN

    def _over_limit(self, source: Source) -> str:
        return f"it has {source.nbytes} bytes, more than the limit of {self._limit} for values that are read for real"

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its real values. Raises ProbeError (without source and line: the caller adds them)."""
        key = storage_key(tensor)
        if key in self.stale:
            raise ProbeError(self.stale[key])
        if tensor.device.type != "meta":
            return tensor
        contents = self._contents.get(key)
        if contents is None:
            contents = self._contents[key] = self._make(key)
        return contents.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _make(self, key: int) -> torch.Tensor:
        source = self.source_of(key)
        if source is not None:
            return self._read(source)
        recipe = self._recipes.get(key)
        if recipe is None:
            raise ProbeError(_UNKNOWN)
        if any(self._written.get(used, 0) != count for used, count in recipe.seen):
            raise ProbeError("something that it was computed from has changed since")
        result = recipe.func(*self._real(recipe.args), **self._real(recipe.kwargs))
        tensor: torch.Tensor = result[recipe.output] if isinstance(result, (tuple, list)) else result
        return torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.dtype.itemsize,), (1,), 0)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.of(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._real(item) for item in value)
        if isinstance(value, dict):
            return {k: "cpu" if k == "device" else self._real(v) for k, v in value.items()}
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def _read(self, source: Source) -> torch.Tensor:
        if source.nbytes > self._limit:
            raise ProbeError(self._over_limit(source))
        if not self._checkpoint.has_data(source):
            raise ProbeError("its data is not at hand (headers only)")
        try:
            data = bytearray(self._checkpoint.read(source))
        except CheckpointError as error:
            raise ProbeError(f"its data cannot be read: {error}") from None
        dtype = torch_dtype(source.dtype, what=source.name)
        if not data:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype)
