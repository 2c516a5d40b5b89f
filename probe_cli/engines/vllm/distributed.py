"""Any rank of any topology in one process: torch's `fake` process group, vLLM's groups on top, no socket, no queue.

A fake group answers every collective at once and with garbage. Building a model and loading it need none; one that is made
all the same is refused, so that no garbage can reach a contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from probe_cli.errors import EngineError
from probe_cli.topology import Rank

__all__ = ["start_groups"]

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


def start_groups(rank: Rank) -> None:
    """Make this process rank `rank` of its topology. Once per process; vLLM's configuration must be the current one.

    Mirrors `vllm.v1.worker.gpu_worker.init_worker_distributed_environment` (0.32, 0.33) without its communicators.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state as state

    topology = rank.topology
    dist.init_process_group("fake", store=FakeStore(), rank=rank.index, world_size=topology.world_size)
    new_group = dist.new_group

    def fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        options.pop("pg_options", None)
        options.pop("device_id", None)
        return new_group(ranks, timeout, "fake", **options)

    dist.new_group = fake_group  # type: ignore[assignment]
    make = state.init_model_parallel_group

    def quiet_group(
        group_ranks: Any,
        local_rank: int,
        backend: str,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        use_device_communicator: bool = True,
        **options: Any,
    ) -> Any:
        return make(group_ranks, local_rank, backend, False, group_name, False, **options)

    state.init_model_parallel_group = quiet_group
    state.init_distributed_environment(
        world_size=topology.world_size,
        rank=rank.index,
        distributed_init_method="env://",
        local_rank=0,
        backend="fake",
    )
    state.initialize_model_parallel(topology.tp, topology.pp)
    _refuse_collectives()


def _refuse_collectives() -> None:
    def refuse(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def collective(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            if group is not None and dist.get_world_size(group) == 1:
                return original(*args, **kwargs)
            if dist.get_world_size() == 1:
                return original(*args, **kwargs)
            raise EngineError(
                f"the model needs the result of a collective ({name}) to be built or loaded; no other rank is there to "
                "answer, and none is made up"
            )

        return collective

    for name in _COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, refuse(name))
