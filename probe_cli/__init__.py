"""probe-manifest: what loading a checkpoint into a model really does, found out without GPU and without weights.

Everything here is imported on first use, so that `import probe_cli` stays cheap and torch is only loaded where needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from probe_cli._version import __version__

if TYPE_CHECKING:
    from probe_cli.checkpoint import Checkpoint as Checkpoint
    from probe_cli.errors import IncompleteUpdate as IncompleteUpdate
    from probe_cli.manifest import Bundle as Bundle
    from probe_cli.manifest import Manifest as Manifest
    from probe_cli.probe import probe as probe
    from probe_cli.reload import ReloadSession as ReloadSession
    from probe_cli.reload import Scope as Scope
    from probe_cli.reload import record as record
    from probe_cli.topology import Rank as Rank
    from probe_cli.topology import Topology as Topology

__all__ = [
    "Bundle",
    "Checkpoint",
    "IncompleteUpdate",
    "Manifest",
    "Rank",
    "ReloadSession",
    "Scope",
    "Topology",
    "__version__",
    "probe",
    "record",
]

_HOMES = {
    "Bundle": "probe_cli.manifest",
    "Checkpoint": "probe_cli.checkpoint",
    "IncompleteUpdate": "probe_cli.errors",
    "Manifest": "probe_cli.manifest",
    "Rank": "probe_cli.topology",
    "ReloadSession": "probe_cli.reload",
    "Scope": "probe_cli.reload",
    "Topology": "probe_cli.topology",
    "probe": "probe_cli.probe",
    "record": "probe_cli.reload",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(home)
    # `probe_cli.probe` is the package and the function at once: the package is callable.
    value = module if name == "probe" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
