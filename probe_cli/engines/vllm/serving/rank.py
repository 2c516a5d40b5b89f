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

__all__ = ["engine_identity", "peers", "rank_of", "rank_within", "replica_of"]


def rank_of(config: Any) -> Rank:
    """This worker's rank. Reads vLLM's groups, which exist once a worker has begun to load.

    Data parallel replicas of a mixture of experts are ranks of one topology: experts are spread over all of them, whole with
    expert parallelism and in slices without (`FusedMoEParallelConfig.make`, vLLM 0.32 and 0.33). To a dense model vLLM shows no
    replicas at all (`ParallelConfig.reconfigure_for_independent_dp_rank`).
    """
    parallel = config.parallel_config
    tp, pp, dp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size
    topology = Topology(tp=tp, pp=pp, dp=dp, ep=tp * dp if parallel.enable_expert_parallel else 1)
    place = parallel_state.get_pp_group().rank_in_group * tp + parallel_state.get_tp_group().rank_in_group
    return topology.rank((parallel.data_parallel_rank if dp > 1 else 0) * tp * pp + place)


def rank_within(topology: Topology, config: Any, model_config: Any) -> Rank:
    """This worker's rank in the topology of a manifest that is offered to it.

    A dense model's replica is an engine of its own, with one contract for all: a manifest built with `--dp` fits each of them.
    """
    rank = rank_of(config)
    own = rank.topology
    alone = own.dp == 1 and not model_config.is_moe
    if alone and topology.dp > 1 and (topology.tp, topology.pp, topology.ep) == (own.tp, own.pp, own.ep):
        return topology.rank(replica_of(config) % topology.dp * own.tp * own.pp + rank.index)
    return rank


def replica_of(config: Any) -> int:
    """The number of this engine among the data parallel replicas; 0 where there is one."""
    return int(getattr(config.parallel_config, "data_parallel_index", 0) or 0)


def peers(config: Any) -> Any:
    """The process group (on the host) of all workers that take one update together, None where there is one worker.

    Replicas answer each for itself: while one waits for a vote, others may wait for it in a collective of their model.
    """
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if tp * pp == 1:
        return None
    world = parallel_state.get_world_group()
    if world.world_size == tp * pp:
        return world.cpu_group
    if pp == 1:
        return parallel_state.get_tp_group().cpu_group
    if tp == 1:
        return parallel_state.get_pp_group().cpu_group
    first = world.rank - world.rank % (tp * pp)  # ranks of a replica follow each other (vLLM's order)
    return torch.distributed.new_group(
        list(range(first, first + tp * pp)), backend="gloo", use_local_synchronization=True
    )


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
