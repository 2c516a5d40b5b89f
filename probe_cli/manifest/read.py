"""Open a path that may be a bundle or the manifest of one rank."""

from __future__ import annotations

from pathlib import Path

from probe_cli.errors import ManifestError
from probe_cli.manifest.bundle import Bundle
from probe_cli.manifest.decode import sniff
from probe_cli.manifest.document import Manifest
from probe_cli.manifest.files import read_text
from probe_cli.manifest.schema import BUNDLE_FORMAT

__all__ = ["read_any"]


def read_any(path: str | Path, rank: int | None = None) -> Bundle | Manifest:
    """The bundle at a path (directory or index file), or the manifest in a rank's file; with `rank`, that rank of a
    bundle.

    Raises ManifestError, and UsageError if there is no such rank.
    """
    path = Path(path)
    if rank is not None:
        return Manifest.read(path, rank)
    if path.is_dir():
        return Bundle.read(path)
    if not path.exists():
        raise ManifestError(f"{path}: no such file or directory, expected a manifest or a bundle")
    text = read_text(path)
    return Bundle.read(path) if sniff(text, str(path)) == BUNDLE_FORMAT else Manifest.from_bytes(text, str(path))
