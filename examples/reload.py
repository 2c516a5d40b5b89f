#!/usr/bin/env python3
"""A served model takes new weights through its contract: a whole update, then one that has lost a tensor.

    python examples/reload.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from probe_cli import Checkpoint, ReloadSession, Topology, probe
from probe_cli.engines.embedded.checkpoints import preset, write_checkpoint
from probe_cli.engines.embedded.loading import build_model, load_model, read_weights
from probe_cli.engines.embedded.parallel import ParallelContext
from probe_cli.errors import IncompleteUpdate
from probe_cli.reload import ColdLoad


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        a, b = (
            Checkpoint.open(write_checkpoint(Path(folder) / str(seed), preset("qwen3-moe"), seed=seed))
            for seed in (1, 2)
        )
        rank = Topology(tp=2, ep=2).rank(1)

        # The first load, watched: its layout before post-processing is what later updates are loaded into.
        model = build_model(a, ParallelContext(rank))
        manifest = probe(model, a, rank=rank)
        cold = ColdLoad(model)
        model.load_weights(read_weights(a))
        cold.loaded(manifest)
        cold.process()
        session = ReloadSession(model, manifest, cold=cold)

        addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        with session.update(scope="full") as update:
            for weight in read_weights(b):
                update.load_weights([weight])
        fresh = load_model(b, ParallelContext(rank))
        same = [torch.equal(x, y) for x, y in zip(model.parameters(), fresh.parameters())]
        stayed = addresses == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        print(f"full update: {len(update.receipt.layers)} layers published")
        print(f"as after a cold load of the same weights: {sum(same)} of {len(same)} parameters")
        print(f"all parameters in the same storage: {stayed}")

        lost = "model.layers.1.mlp.experts.6.up_proj.weight"
        try:
            with session.update(scope="full") as update:
                update.load_weights(weight for weight in read_weights(a) if weight[0] != lost)
        except IncompleteUpdate as error:
            print(f"an update without one tensor: {error}")


if __name__ == "__main__":
    main()
