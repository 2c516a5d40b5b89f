"""What `load_weights` is consuming: the name behind every tensor that a loader is given.

A name is known by the storage of the tensor it came with, through any views; where `load_weights` has computed a new
tensor, by what it was consuming. A sender may reuse one buffer for all it sends: a storage belongs to the name that
came with it last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from probe_cli.errors import ReloadError
from probe_cli.manifest.schema import SourceEntry
from probe_cli.model.dtypes import dtype_name
from probe_cli.reload.contract import Contract

__all__ = ["SourceStream"]


class SourceStream:
    """The sources of one update, over all its chunks."""

    def __init__(self, contract: Contract, check: Callable[[], None]) -> None:
        self.contract = contract
        self.current: str | None = None
        self.count = 0
        self.nbytes = 0
        #: Names that the contract does not know, in order of arrival.
        self.unknown: dict[str, tuple[int, ...]] = {}
        self.arrived: set[str] = set()
        self._check = check
        #: Set from another thread; the next source raises.
        self.aborted = False
        #: Storage of the source that is being consumed.
        self.current_key = 0
        self._names: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        #: Sources that wait for the others they are joined with, which may come in a later chunk.
        self._waiting: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}

    def track(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream as `load_weights` is to see it. Raises ReloadError for a source of another shape than the
        contract's."""
        joined, sources = self.contract.joined, self.contract.sources
        arrived, names, check = self.arrived, self._names, self._check
        try:
            for name, tensor in weights:
                if self.aborted:
                    check()
                self.count += 1
                self.nbytes += tensor.nbytes
                entry = sources.get(name)
                if entry is None:
                    self.unknown[name] = tuple(tensor.shape)
                elif tensor.shape != entry.shape:
                    raise self._misshapen(name, tensor, entry)
                else:
                    arrived.add(name)
                if name not in joined:
                    self.current = name
                    self.current_key = key = tensor.untyped_storage()._cdata
                    names[key] = (name, weakref.ref(tensor))
                    yield name, tensor
                    continue
                group = joined[name]
                waiting = self._waiting.setdefault(group, {})
                waiting[name] = tensor.clone()
                if len(waiting) == len(group):
                    del self._waiting[group]
                    for member in group:
                        yield self._hand_out(member, waiting[member])
        finally:
            self.current, self.current_key = None, 0
            self._names.clear()

    def names_of(self, tensor: torch.Tensor) -> str | None:
        """The source that a tensor is, or is a view of; None where its storage does not tell."""
        key = tensor.untyped_storage()._cdata
        if key == self.current_key:
            return self.current
        known = self._names.get(key)
        # A freed storage's identity may be used again, by a tensor that is none of the sources.
        return known[0] if known is not None and known[1]() is not None else None

    def _hand_out(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        key = tensor.untyped_storage()._cdata
        self.current, self.current_key = name, key
        self._names[key] = (name, weakref.ref(tensor))
        return name, tensor

    def _misshapen(self, name: str, tensor: torch.Tensor, entry: SourceEntry) -> ReloadError:
        return ReloadError(
            f"source {name}: arrived as {dtype_name(tensor.dtype)}{list(tensor.shape)}, the contract was built for "
            f"{entry.dtype}{list(entry.shape)}",
            hint="send the tensor whole, or build the manifest for what is sent (--wire)",
        )
