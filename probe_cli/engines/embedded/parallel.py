"""Where a model sits among its ranks, and the few collectives that its forward needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from probe_cli.topology import Rank

__all__ = ["Collectives", "LocalGroup", "ParallelContext", "SingleRank", "shard"]


class Collectives(Protocol):
    """What ranks do together. A model is built without any; only `forward` calls them."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, on every rank."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors joined along the last dimension, on every rank."""


class SingleRank:
    """Collectives of a group of one."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class LocalGroup:
    """All ranks of a group as threads of one process, in step: for running a sharded model without any network."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size

    def member(self, index: int) -> Collectives:
        """The collectives as rank `index` sees them."""
        return _Member(self, index)

    def exchange(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Hand in one rank's tensor; returns those of all ranks."""
        self._slots[index] = tensor
        self._barrier.wait()
        tensors = list(self._slots)
        self._barrier.wait()
        return tensors

    def run(self, functions: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Run one function per rank at once and return what they return."""
        results: list[Any] = [None] * self._size
        errors: list[BaseException] = []

        def work(index: int) -> None:
            try:
                results[index] = functions[index]()
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(self._size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


@dataclass(frozen=True)
class _Member:
    group: LocalGroup
    index: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.group.exchange(self.index, tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.group.exchange(self.index, tensor), dim=-1)


@dataclass(frozen=True)
class ParallelContext:
    """A rank, and its collectives over the tensor parallel group of its stage."""

    rank: Rank = field(default_factory=Rank)
    collectives: Collectives = field(default_factory=SingleRank)

    @property
    def tp(self) -> int:
        return self.rank.tp

    @property
    def tp_size(self) -> int:
        return self.rank.tp_size


def shard(tensor: torch.Tensor, dim: int, index: int, size: int) -> torch.Tensor:
    """Part `index` of `size` equal parts of a tensor along `dim`, as a view; one part is the tensor itself."""
    if size == 1:
        return tensor
    length = tensor.shape[dim] // size
    return tensor.narrow(dim, index * length, length)
