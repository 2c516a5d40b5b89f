"""The dry run: materialize, replay, suppress writes, bind selectors, trace regions.

The package is callable: `from probe_cli import probe; probe(model, checkpoint)` is `probe_cli.probe.build.probe`.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from probe_cli.probe.build import RankResult, build_rank, probe
from probe_cli.probe.materialize import MetaMaterializer
from probe_cli.probe.replay import replay

__all__ = ["MetaMaterializer", "RankResult", "build_rank", "probe", "replay"]

__signature__ = inspect.signature(probe)


class _CallablePackage(ModuleType):
    """A package that can be called like the function it is named after."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return probe(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
