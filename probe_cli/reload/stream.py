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
from probe_cli.model.dtypes import dtype_name
from probe_cli.model.storage import storage_key
from probe_cli.reload.contract import Contract
from probe_cli.reload.recall import Incoming, Recall

__all__ = ["SourceStream"]


class SourceStream:
    """The sources of one update, over all its chunks."""

    def __init__(self, contract: Contract, recall: Recall, check: Callable[[], None]) -> None:
        self.contract = contract
        self.count = 0
        self.nbytes = 0
        #: The source that is being consumed, its name and its tensor; None between sources.
        self.source: Incoming | None = None
        self.current: str | None = None
        self.tensor: torch.Tensor | None = None
        #: Names that the contract does not know, in order of arrival.
        self.unknown: dict[str, tuple[int, ...]] = {}
        #: Names that it knows, in order of arrival; a name that came twice is here twice.
        self.arrived: list[str] = []
        self._recall = recall
        self._check = check
        #: Set from another thread; the next source raises.
        self.aborted = False
        #: Storage of the current tensor; 0 until it is asked for.
        self._key = 0
        #: Storage -> the source that came with it last.
        self._names: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        #: What has arrived and is not in `_names` yet: few loads ask for anything but the current source.
        self._recent: list[str] = []
        self._recent_tensors: list[weakref.ref[torch.Tensor]] = []
        #: Sources that wait for the others they are joined with, which may come in a later chunk.
        self._waiting: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}

    def track(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream as `load_weights` is to see it. Raises ReloadError for a source of another shape than the
        contract's."""
        sources, stranger = self._recall.sources, self._recall.stranger
        arrived, recent, tensors, reference = self.arrived, self._recent, self._recent_tensors, weakref.ref
        try:
            for name, tensor in weights:
                if self.aborted:
                    self._check()
                self.count += 1
                self.nbytes += tensor.nbytes
                source = sources.get(name) or stranger(name)
                if tensor.shape == source.shape:
                    arrived.append(name)
                elif source.shape is None:
                    self.unknown[name] = tuple(tensor.shape)
                else:
                    raise self._misshapen(name, tensor)
                if source.group is None:
                    source.position = 0
                    self.source, self.current, self.tensor, self._key = source, name, tensor, 0
                    recent.append(name)
                    tensors.append(reference(tensor))
                    yield name, tensor
                    continue
                waiting = self._waiting.setdefault(source.group, {})
                waiting[name] = tensor.clone()
                if len(waiting) == len(source.group):
                    del self._waiting[source.group]
                    for member in source.group:
                        yield self._hand_out(member, waiting[member])
        finally:
            self.source = self.current = self.tensor = None
            self._key = 0

    def end_chunk(self) -> None:
        """Loading code has returned: it may collect all sources before it loads them, but not over chunks."""
        self._recent.clear()
        self._recent_tensors.clear()
        self._names.clear()

    def is_current(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the current source's, or a view of it."""
        if tensor is self.tensor:
            return True
        if self.tensor is None:
            return False
        if not self._key:
            self._key = storage_key(self.tensor)
        return storage_key(tensor) == self._key

    def names_of(self, tensor: torch.Tensor) -> str | None:
        """The source that a tensor is, or is a view of; None where its storage does not tell."""
        if self.is_current(tensor):
            return self.current
        for name, reference in zip(self._recent, self._recent_tensors):
            arrived = reference()
            if arrived is not None:
                self._names[storage_key(arrived)] = (name, reference)
        self._recent.clear()
        self._recent_tensors.clear()
        known = self._names.get(storage_key(tensor))
        # A freed storage's identity may be used again, by a tensor that is none of the sources.
        return known[0] if known is not None and known[1]() is not None else None

    def _hand_out(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        source = self._recall.sources[name]
        source.position = 0
        self.source, self.current, self.tensor, self._key = source, name, tensor, 0
        self._recent.append(name)
        self._recent_tensors.append(weakref.ref(tensor))
        return name, tensor

    def _misshapen(self, name: str, tensor: torch.Tensor) -> ReloadError:
        entry = self.contract.sources[name]
        return ReloadError(
            f"source {name}: arrived as {dtype_name(tensor.dtype)}{list(tensor.shape)}, the contract was built for "
            f"{entry.dtype}{list(entry.shape)}",
            hint="send the tensor whole, or build the manifest for what is sent (--wire)",
        )
