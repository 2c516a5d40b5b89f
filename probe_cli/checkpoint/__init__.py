"""Checkpoints by their headers alone: local files, sharded folders, the Hub, wire files. No torch, no weights."""

from __future__ import annotations

from probe_cli.checkpoint.checkpoint import Checkpoint
from probe_cli.checkpoint.types import CheckpointFile, Source

__all__ = ["Checkpoint", "CheckpointFile", "Source"]
