"""The identity of a checkpoint and its sources, as a manifest records them: no paths, no byte positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from probe_cli.manifest.schema import CheckpointIdentity, FileIdentity, SourceEntry

if TYPE_CHECKING:
    from probe_cli.checkpoint import Checkpoint
    from probe_cli.checkpoint.types import Source

__all__ = ["checkpoint_identity", "source_entry"]


def checkpoint_identity(checkpoint: Checkpoint) -> CheckpointIdentity:
    """What a manifest says about the checkpoint that it was built from."""
    return CheckpointIdentity(
        digest=checkpoint.digest,
        sources=len(checkpoint.sources),
        nbytes=checkpoint.nbytes,
        kind="wire" if checkpoint.kind == "wire" else "files",
        revision=checkpoint.revision,
        repo_id=checkpoint.repo_id,
        files=tuple(FileIdentity(file.name, file.size, file.header_digest) for file in checkpoint.files),
    )


def source_entry(source: Source) -> SourceEntry:
    """A source as a manifest lists it."""
    return SourceEntry(name=source.name, dtype=source.dtype, shape=source.shape, file=source.file)
