"""Checkpoints on the Hub: only headers, index and config.json travel. `huggingface_hub` is imported on first use."""

from __future__ import annotations

from probe_cli.checkpoint.hub.open import HubCheckpoint, open_hub
from probe_cli.checkpoint.hub.reference import Reference, looks_like_repo, parse_reference

__all__ = ["HubCheckpoint", "Reference", "looks_like_repo", "open_hub", "parse_reference"]
