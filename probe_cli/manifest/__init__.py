"""The contract: manifests and bundles, their text form and their digests. No torch, no engine."""

from __future__ import annotations

from probe_cli.manifest.bundle import Bundle
from probe_cli.manifest.canonical import canonical_bytes, digest
from probe_cli.manifest.document import Manifest
from probe_cli.manifest.identity import checkpoint_identity
from probe_cli.manifest.keys import ContractKey

__all__ = ["Bundle", "ContractKey", "Manifest", "canonical_bytes", "checkpoint_identity", "digest"]
