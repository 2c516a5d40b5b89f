"""Really load a checkpoint into the family: one rank, or all ranks of a topology in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from probe_cli.checkpoint import Checkpoint
from probe_cli.engines.embedded.model import CausalLM, process_weights
from probe_cli.engines.embedded.parallel import LocalGroup, ParallelContext
from probe_cli.errors import CheckpointError
from probe_cli.model.dtypes import torch_dtype
from probe_cli.topology import Rank, Topology

__all__ = ["build_model", "forward_all", "load_model", "load_ranks", "read_weights"]


def read_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream that `load_weights` takes: real tensors on the host, one at a time."""
    for source in checkpoint.sources:
        data = checkpoint.read(source)
        dtype = torch_dtype(source.dtype)
        tensor = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        yield source.name, tensor.reshape(source.shape)


def build_model(
    checkpoint: Checkpoint, context: ParallelContext | None = None, *, device: str | torch.device = "cpu"
) -> CausalLM:
    """The model of a checkpoint, not yet loaded. Raises CheckpointError without a config.json."""
    if checkpoint.config is None:
        raise CheckpointError("the embedded models need a config.json beside the checkpoint")
    with torch.device(device):
        return CausalLM(checkpoint.config, context)


def load_model(
    checkpoint: Checkpoint,
    context: ParallelContext | None = None,
    *,
    device: str | torch.device = "cpu",
    process: bool = True,
) -> CausalLM:
    """A model of one rank as it serves: built, loaded and (unless `process` is false) post-processed."""
    model = build_model(checkpoint, context, device=device)
    with torch.no_grad():
        model.load_weights(read_weights(checkpoint))
    if process:
        process_weights(model)
    return model


def load_ranks(checkpoint: Checkpoint, topology: Topology, *, device: str | torch.device = "cpu") -> list[CausalLM]:
    """Models of all ranks, by global rank; each pipeline stage of each replica is a `LocalGroup`."""
    groups: dict[tuple[int, int], LocalGroup] = {}

    def context(rank: Rank) -> ParallelContext:
        group = groups.setdefault((rank.dp, rank.pp), LocalGroup(topology.tp))
        return ParallelContext(rank, group.member(rank.tp))

    return [load_model(checkpoint, context(rank), device=device) for rank in topology.ranks()]


def forward_all(models: Sequence[CausalLM], tokens: torch.Tensor) -> torch.Tensor:
    """Logits (batch x sequence x vocabulary) of the ranks that `load_ranks` made, run as the threads of one process."""
    topology = models[0].context.rank.topology
    x = tokens
    for stage in range(topology.pp):
        ranks = [m for m in models if m.context.rank.pp == stage and m.context.rank.dp == 0]
        x = LocalGroup(topology.tp).run([lambda model=model, x=x: model(x) for model in ranks])[0]  # type: ignore[misc]
    return x
