"""A checkpoint as its headers tell it: ordered sources, files, config. No torch, no weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

import msgspec

from probe_cli.dtypes import numel

__all__ = ["CheckpointFile", "Described", "Source", "sources_digest"]


class Described(Protocol):
    """What tells one source from another: here, and as a manifest records it."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def sources_digest(sources: Iterable[Described]) -> str:
    """SHA-256 over the sorted (name, dtype, shape): equal for any order and sharding of the same tensors."""
    rows = sorted((source.name, source.dtype, source.shape) for source in sources)
    return "sha256:" + hashlib.sha256(msgspec.json.encode(rows)).hexdigest()


class Source(msgspec.Struct, frozen=True):
    """One checkpoint tensor. `start` and `end` are absolute byte positions in its file; `file` is an index into
    `Checkpoint.files`, None if the bytes are not at hand (a wire file)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: int | None = None
    start: int = 0
    end: int = 0

    @property
    def numel(self) -> int:
        return numel(self.shape)


class CheckpointFile(msgspec.Struct, frozen=True):
    """A safetensors file: its name relative to the checkpoint, its size in bytes, the SHA-256 of its header (the
    8-byte length and the JSON)."""

    name: str
    size: int
    header_digest: str
