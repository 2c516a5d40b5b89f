"""What the user asked for, from the environment. Every process of an engine sees the same variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from probe_cli.errors import UsageError

__all__ = ["RECORD", "Settings"]

RECORD = "record"

_CHOICES = {
    "PROBE_MANIFEST_ON_MISMATCH": ("refuse", "warn"),
    "PROBE_MANIFEST_COMMIT": ("layer", "model"),
    "PROBE_MANIFEST_ON_UNDEFINED": ("refuse", "serve"),
    "PROBE_MANIFEST_ONLINE_QUANTIZATION": ("refuse", "track"),
}


@dataclass(frozen=True)
class Settings:
    """`manifest` and `draft` are a path, "record" or None. `on_mismatch`: "refuse" or "warn". `commit`: "layer" publishes each
    layer when it is complete, "model" all at the end or none. `on_undefined`: "refuse" requests while the weights are a mixture of
    two updates, or "serve" them. `online`: "refuse" online quantization, or "track" it for memory at the start. `receipts`: a folder.
    """

    manifest: str | None = None
    draft: str | None = None
    on_mismatch: str = "refuse"
    commit: str = "layer"
    receipts: Path | None = None
    staging_bytes: int | None = None
    audit: bool = True
    timeout: float = 60.0
    on_undefined: str = "refuse"
    online: str = "refuse"

    @property
    def active(self) -> bool:
        """Whether anything is asked for."""
        return self.manifest is not None

    @property
    def refuses(self) -> bool:
        """Whether what cannot be tracked stops the start."""
        return self.on_mismatch == "refuse"

    def source(self, role: str) -> str:
        """Where the manifest of a model comes from: a path or "record". `role`: "main" or "draft"."""
        if role == "main":
            return self.manifest or RECORD
        return self.draft or RECORD

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """From environment variables. Raises UsageError for a value that is none of the choices."""
        env = os.environ if environment is None else environment
        receipts = env.get("PROBE_MANIFEST_RECEIPTS")
        return cls(
            manifest=env.get("PROBE_MANIFEST") or None,
            draft=env.get("PROBE_MANIFEST_DRAFT") or None,
            on_mismatch=_choice(env, "PROBE_MANIFEST_ON_MISMATCH"),
            commit=_choice(env, "PROBE_MANIFEST_COMMIT"),
            receipts=Path(receipts) if receipts else None,
            staging_bytes=_number(env, "PROBE_MANIFEST_STAGING_BYTES", int),
            audit=env.get("PROBE_MANIFEST_AUDIT", "1") not in ("0", "false", "no"),
            timeout=_number(env, "PROBE_MANIFEST_VOTE_TIMEOUT", float) or 60.0,
            on_undefined=_choice(env, "PROBE_MANIFEST_ON_UNDEFINED"),
            online=_choice(env, "PROBE_MANIFEST_ONLINE_QUANTIZATION"),
        )


def _choice(env: Mapping[str, str], name: str) -> str:
    choices = _CHOICES[name]
    value = env.get(name) or choices[0]
    if value not in choices:
        raise UsageError(f"{name}={value!r}, expected one of {', '.join(choices)}")
    return value


def _number(env: Mapping[str, str], name: str, kind: type) -> int | None:
    value = env.get(name)
    if not value:
        return None
    try:
        number: int = kind(value)
    except ValueError:
        raise UsageError(f"{name}={value!r} is not a number") from None
    if number <= 0:
        raise UsageError(f"{name}={value!r}, expected more than 0")
    return number
