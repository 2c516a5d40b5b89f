"""A build's settings from a TOML file (`build --config FILE`): what the flags say, written down.

```toml
checkpoint = "deepseek-ai/DeepSeek-V3"
engine = "vllm"
target = "h200"
output = "manifests/"

[topology]
tp = 8
ep = true        # all ranks, or a number

[arguments]      # --arg / --engine-arg
dtype = "bfloat16"
```
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from probe_cli.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["BuildConfig", "TopologyConfig", "read_config"]


class TopologyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Group sizes. `ep = true` means all tensor and data parallel ranks."""

    tp: int | None = None
    pp: int | None = None
    ep: int | bool | None = None
    dp: int | None = None


class BuildConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a configuration file may say. A flag on the command line wins over it."""

    checkpoint: str | None = None
    revision: str | None = None
    engine: str | None = None
    target: str | None = None
    role: str | None = None
    wire: str | None = None
    order: str | None = None
    ranks: str | None = None
    output: str | None = None
    jobs: int | None = None
    strict: bool | None = None
    verify: bool | None = None
    value_limit: int | None = None
    topology: TopologyConfig = TopologyConfig()
    arguments: dict[str, Any] = {}


def read_config(path: str | Path) -> BuildConfig:
    """Read a configuration file. Raises InputError that names the file and the key."""
    file = Path(path)
    try:
        with file.open("rb") as stream:
            data = tomllib.load(stream)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file}: not TOML: {error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{file}: not UTF-8") from None
    except RecursionError:
        raise InputError(f"{file}: nested too deeply for a configuration") from None
    try:
        return msgspec.convert(data, BuildConfig, strict=True)
    except msgspec.ValidationError as error:
        known = ", ".join(BuildConfig.__struct_fields__)
        raise InputError(f"{file}: {error}", hint=f"keys: {known}") from None
