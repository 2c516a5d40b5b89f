"""`--load-format dummy --model-loader-extra-config '{"enable_load_probe": true}'`: tracking for a model whose first weights come from
a trainer. The manifest is probed in process from headers, or read (`{"load_manifest": "path"}`)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from probe_cli.engines.vllm.serving.settings import RECORD, Settings
from probe_cli.errors import UsageError

__all__ = ["ExtraConfig", "take_extra_config"]

_PROBE, _MANIFEST = "enable_load_probe", "load_manifest"


@dataclass(frozen=True)
class ExtraConfig:
    """Where the manifest is; None: probe."""

    manifest: str | None

    def settings(self, settings: Settings) -> Settings:
        """The settings with this model's own source of the manifest."""
        return replace(settings, manifest=self.manifest or settings.manifest or RECORD)


def take_extra_config(load_config: Any) -> tuple[ExtraConfig | None, Any]:
    """(what is asked for, the load config without it). Raises UsageError for values of another type."""
    extra = load_config.model_loader_extra_config
    if not isinstance(extra, dict) or not extra.keys() & {_PROBE, _MANIFEST}:
        return None, load_config
    wanted, manifest = extra.get(_PROBE, False), extra.get(_MANIFEST)
    if not isinstance(wanted, bool):
        raise UsageError(f"{_PROBE} is {wanted!r}, expected true or false")
    if manifest is not None and not isinstance(manifest, str):
        raise UsageError(f"{_MANIFEST} is {manifest!r}, expected a path")
    if wanted and manifest is not None:
        raise UsageError(f"give {_PROBE} or {_MANIFEST}, not both")
    rest = copy.copy(load_config)
    rest.model_loader_extra_config = {key: value for key, value in extra.items() if key not in (_PROBE, _MANIFEST)}
    return (ExtraConfig(manifest) if wanted or manifest is not None else None), rest
