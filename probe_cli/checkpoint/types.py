"""A checkpoint as its headers tell it: ordered sources, files, config. No torch, no weights."""

from __future__ import annotations

import msgspec

from probe_cli.dtypes import numel

__all__ = ["CheckpointFile", "Source"]


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
