"""Where this worker stands among its peers, and what engine this is."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.version import __version__ as vllm_version

from probe_cli.engines.vllm.targets import TARGETS
from probe_cli.engines.vllm.versions import installed_vllm
from probe_cli.manifest.schema import EngineIdentity
from probe_cli.probe.live import torch_version
from probe_cli.topology import Rank, Topology

__all__ = ["engine_identity", "peers", "rank_of"]


def rank_of(config: Any) -> Rank:
    """This worker's rank. Reads vLLM's groups, which exist once a worker has begun to load.

    Data parallel ranks share one contract unless experts are spread over them, so `dp` counts only then.
    """
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    expert_parallel = bool(parallel.enable_expert_parallel)
    dp = parallel.data_parallel_size if expert_parallel else 1
    topology = Topology(tp=tp, pp=pp, dp=dp, ep=tp * dp if expert_parallel else 1)
    place = parallel_state.get_pp_group().rank_in_group * tp + parallel_state.get_tp_group().rank_in_group
    return topology.rank((parallel.data_parallel_rank if dp > 1 else 0) * tp * pp + place)


def peers(config: Any) -> Any:
    """The process group (on the host) of all workers that take one update together, None where there is one worker."""
    parallel = config.parallel_config
    size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if size == 1:
        return None
    world, tp = parallel_state.get_world_group(), parallel_state.get_tp_group()
    if world.world_size == size:
        return world.cpu_group
    return tp.cpu_group if tp.world_size == size else None


def engine_identity(config: Any, like: str | None = None) -> EngineIdentity:
    """The engine as a manifest names it. `like`: the target of a manifest that may have been built for this device under
    another name (`h200` and `sm90` are one)."""
    installed = installed_vllm()
    return EngineIdentity(
        name="vllm",
        version=installed.version if installed is not None else vllm_version.split("+")[0],
        torch=torch_version(),
        target=_target(config, like),
    )


def _target(config: Any, like: str | None) -> str:
    kind: str = config.device_config.device_type
    if kind != "cuda":
        return kind
    capability = torch.cuda.get_device_capability()
    named = TARGETS.get(like or "")
    if like is not None and named is not None and named.capability == capability:
        return like
    return f"sm{capability[0]}{capability[1]}"
