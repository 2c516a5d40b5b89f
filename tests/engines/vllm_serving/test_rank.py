"""Which rank a worker is: among replicas of experts, which share one model, and among replicas of a dense model, which do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from probe_cli.engines.vllm.serving import rank as ranks
from probe_cli.topology import Topology

pytestmark = pytest.mark.vllm


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts this process at a place of vLLM's groups: (tp rank, pp rank, global rank, size of the world)."""

    def put(tp: int = 0, pp: int = 0, rank: int = 0, world: int = 1, tp_size: int = 1) -> None:
        groups = {
            "get_tp_group": SimpleNamespace(rank_in_group=tp, world_size=tp_size, cpu_group="tp group"),
            "get_pp_group": SimpleNamespace(rank_in_group=pp, cpu_group="pp group"),
            "get_world_group": SimpleNamespace(rank=rank, world_size=world, cpu_group="world group"),
        }
        for name, group in groups.items():
            monkeypatch.setattr(ranks.parallel_state, name, lambda group=group: group)

    return put


def config(tp: int = 1, pp: int = 1, dp: int = 1, rank: int = 0, index: int = 0, experts: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            data_parallel_size=dp,
            data_parallel_rank=rank,
            data_parallel_index=index,
            enable_expert_parallel=experts,
        )
    )


DENSE, MOE = SimpleNamespace(is_moe=False), SimpleNamespace(is_moe=True)


def test_replicas_of_experts_are_ranks_of_one_topology(place: Any) -> None:
    place(tp=1, tp_size=2)
    found = ranks.rank_of(config(tp=2, dp=2, rank=1, index=1, experts=True))
    assert (found.index, found.dp, found.ep, str(found.topology)) == (3, 1, 3, "tp=2 pp=1 ep=4 dp=2")
    # Without expert parallelism each expert is sliced over tp x dp: the contracts of two replicas differ all the same.
    found = ranks.rank_of(config(tp=2, dp=2, rank=1, index=1))
    assert (found.index, found.dp, str(found.topology)) == (3, 1, "tp=2 pp=1 ep=1 dp=2")


def test_a_dense_models_replica_takes_a_manifest_built_with_dp(place: Any) -> None:
    place(tp=1, tp_size=2)
    served = config(tp=2, index=1)  # vLLM has told the replica that it is alone
    assert ranks.rank_of(served).topology == Topology(tp=2)
    found = ranks.rank_within(Topology(tp=2, dp=2), served, DENSE)
    assert (found.index, found.tp, found.dp) == (3, 1, 1)
    assert (
        ranks.rank_within(Topology(tp=2, dp=2), config(tp=2, index=5), DENSE).index == 3
    )  # more replicas than were built


@pytest.mark.parametrize(
    ("offered", "model"),
    [
        (Topology(tp=2, dp=2), MOE),  # the experts of two replicas are not those of one
        (Topology(tp=4, dp=2), DENSE),
        (Topology(tp=2, dp=2, ep=4), DENSE),
        (Topology(tp=2), DENSE),
    ],
)
def test_other_manifests_are_judged_by_this_workers_own_rank(place: Any, offered: Topology, model: Any) -> None:
    place(tp=1, tp_size=2)
    assert ranks.rank_within(offered, config(tp=2, index=1), model) == Topology(tp=2).rank(1)


def test_the_workers_of_one_replica_vote(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place()
    assert ranks.peers(config()) is None
    place(world=4, tp_size=2)
    assert ranks.peers(config(tp=2, pp=2)) == "world group"
    assert ranks.peers(config(tp=2, dp=2)) == "tp group"
    assert ranks.peers(config(pp=2, dp=2)) == "pp group"
    made: list[Any] = []
    monkeypatch.setattr(ranks.torch.distributed, "new_group", lambda members, **kwargs: made.append(members) or "made")
    place(rank=6, world=8, tp_size=2)
    assert ranks.peers(config(tp=2, pp=2, dp=2)) == "made" and made == [[4, 5, 6, 7]]


def test_receipts_of_replicas_have_files_of_their_own(tmp_path: Any) -> None:
    from probe_cli.engines.vllm.serving.receipts import ReceiptLog

    assert ranks.replica_of(config(index=2)) == 2
    prefixes = [
        ReceiptLog(tmp_path, role, replica)._prefix for role, replica in (("main", 0), ("main", 2), ("draft", 2))
    ]
    assert prefixes == ["receipt-", "receipt-dp2-", "receipt-dp2-draft-"]
