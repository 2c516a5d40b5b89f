"""Ranks and topologies: one worker's coordinates among tensor, pipeline, expert and data parallel groups."""

from __future__ import annotations

import msgspec

from probe_cli.errors import UsageError

__all__ = ["MAX_RANKS", "Rank", "Topology"]

#: No serving engine runs a model over more; a topology is listed rank by rank.
MAX_RANKS = 100_000


class Topology(msgspec.Struct, frozen=True, order=True):
    """Sizes of the parallel groups. `ep` overlays the tp x dp ranks of a pipeline stage, as serving engines do it."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "ep", "dp"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.world_size > MAX_RANKS:
            raise UsageError(f"{self}: more than {MAX_RANKS:,} ranks")
        if (self.tp * self.dp) % self.ep:
            raise UsageError(
                f"ep={self.ep} does not divide tp x dp = {self.tp * self.dp}",
                hint="expert parallelism spreads experts over the tensor and data parallel ranks of a stage; "
                "give --ep alone to use all of them",
            )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def rank(self, index: int) -> Rank:
        """The coordinates of global rank `index`; tp varies fastest, then pp, then dp (vLLM's order of ranks)."""
        if not 0 <= index < self.world_size:
            raise UsageError(f"rank {index} is not in this topology of {self.world_size} ranks ({self})")
        tp = index % self.tp
        pp = index // self.tp % self.pp
        dp = index // (self.tp * self.pp)
        ep = (dp * self.tp + tp) // (self.tp * self.dp // self.ep)
        return Rank(index=index, tp=tp, pp=pp, ep=ep, dp=dp, topology=self)

    def ranks(self) -> tuple[Rank, ...]:
        return tuple(self.rank(index) for index in range(self.world_size))

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp} ep={self.ep} dp={self.dp}"


class Rank(msgspec.Struct, frozen=True, order=True):
    """One worker: its global index, its place in each group, and the sizes of the groups (`topology`)."""

    index: int = 0
    tp: int = 0
    pp: int = 0
    ep: int = 0
    dp: int = 0
    topology: Topology = Topology()

    @property
    def tp_size(self) -> int:
        return self.topology.tp

    @property
    def pp_size(self) -> int:
        return self.topology.pp

    @property
    def ep_size(self) -> int:
        return self.topology.ep

    @property
    def dp_size(self) -> int:
        return self.topology.dp

    def __str__(self) -> str:
        parts = [
            f"{name} {getattr(self, name)}/{getattr(self.topology, name)}"
            for name in ("tp", "pp", "ep", "dp")
            if getattr(self.topology, name) > 1
        ]
        return f"rank {self.index}" + (f" ({', '.join(parts)})" if parts else "")
