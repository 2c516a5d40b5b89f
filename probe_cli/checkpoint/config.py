"""config.json: the model's own description, carried along and digested."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probe_cli.checkpoint.local import read_text
from probe_cli.errors import CheckpointError

__all__ = ["CONFIG_NAME", "MAX_CONFIG", "config_digest", "parse_config", "read_config"]

CONFIG_NAME = "config.json"
MAX_CONFIG = 10_000_000
_MAX_VALUES = 200_000


def read_config(path: Path, *, file: str = CONFIG_NAME) -> Mapping[str, Any]:
    """The object in a config.json. Raises CheckpointError."""
    return parse_config(read_text(path, file=file, limit=MAX_CONFIG), file=file)


def parse_config(text: str, *, file: str = CONFIG_NAME) -> Mapping[str, Any]:
    """The object in a config.json. Infinity passes here: transformers writes it (`time_step_limit` of Mamba)."""
    # Millions of empty lists would cost far more memory than their bytes.
    if text.count("[") + text.count("{") > _MAX_VALUES:
        raise CheckpointError(f"{file}: has more than {_MAX_VALUES:,} lists and objects, expected a model's config")
    try:
        config = json.loads(text)
    except RecursionError:
        raise CheckpointError(f"{file}: nested too deeply, expected a model's config") from None
    except ValueError as error:
        raise CheckpointError(f"{file}: malformed JSON ({error})") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: is not an object, expected a model's config")
    return config


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config in canonical form: keys sorted, no spaces."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
