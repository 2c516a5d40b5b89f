"""The dry run: materialize, replay, suppress writes, bind selectors, trace regions."""

from __future__ import annotations

from probe_cli.probe.build import RankResult, build_rank, probe
from probe_cli.probe.materialize import MetaMaterializer
from probe_cli.probe.replay import replay

__all__ = ["MetaMaterializer", "RankResult", "build_rank", "probe", "replay"]
