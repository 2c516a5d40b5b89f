"""Manifests and checkpoints made by hand, small and large."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probe_cli.checkpoint.types import CheckpointFile, Source
from probe_cli.dtypes import nbytes
from probe_cli.manifest import Bundle, Manifest, checkpoint_identity, digest
from probe_cli.manifest.identity import source_entry
from probe_cli.manifest.schema import (
    Application,
    Coverage,
    EngineIdentity,
    Layer,
    ModelIdentity,
    Summary,
    TensorEntry,
    View,
    Write,
)
from probe_cli.topology import Topology

ENGINE = EngineIdentity(name="sample", version="1.2.3", torch="2.13.0", target="cpu", arguments={"dtype": "bfloat16"})
MODEL = ModelIdentity(class_name="SampleModel", architecture="SampleForCausalLM", config_digest="sha256:" + "0" * 64)


@dataclass
class FakeCheckpoint:
    """The part of `Checkpoint` that manifests need, from sources alone."""

    sources: tuple[Source, ...]
    files: tuple[CheckpointFile, ...] = ()
    kind: str = "files"
    revision: str | None = None
    repo_id: str | None = None
    root: Path | None = None
    config: Mapping[str, Any] | None = None
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return digest(sorted((s.name, s.dtype, s.shape) for s in self.sources))

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    def __contains__(self, name: object) -> bool:
        return any(source.name == name for source in self.sources)

    def __getitem__(self, name: str) -> Source:
        return next(source for source in self.sources if source.name == name)

    def __len__(self) -> int:
        return len(self.sources)


def source(name: str, shape: Iterable[int], dtype: str = "BF16", file: int | None = 0) -> Source:
    shape = tuple(shape)
    return Source(name=name, dtype=dtype, shape=shape, nbytes=nbytes(dtype, shape) or 0, file=file)


def checkpoint(sources: Iterable[Source]) -> FakeCheckpoint:
    files = (CheckpointFile("model.safetensors", 4096, "sha256:" + "a" * 64),)
    return FakeCheckpoint(tuple(sources), files)


def summary(layers: tuple[Layer, ...], sources_used: int, **changes: int) -> Summary:
    numbers = {
        "layers": len(layers),
        "tensors": sum(len(layer.tensors) for layer in layers),
        "applications": sum(a.count for layer in layers for a in layer.applications),
        "sources_used": sources_used,
    }
    others = dict.fromkeys(("declined", "direct_writes", "computed", "gaps", "overlaps", "unfed", "bytes_read"), 0)
    return Summary(**{**others, **numbers, **changes})


def dense_layers(rank: int, world: int, blocks: int = 2, hidden: int = 8) -> tuple[Layer, ...]:
    """Blocks of a fused projection (two sources), a column-parallel weight and a norm, cut `world` ways."""
    part = hidden // world
    layers: list[Layer] = []
    for block in range(blocks):
        name = f"model.layers.{block}"
        fused = [
            Application(
                sources=(f"{name}.mlp.{half}_proj.weight",),
                tensor="weight",
                selectors={"loaded_shard_id": index},
                writes=(
                    Write(
                        src=View(rank * part * hidden, (part, hidden), (hidden, 1)),
                        dst=View(index * part * hidden, (part, hidden), (hidden, 1)),
                    ),
                ),
            )
            for index, half in enumerate(("gate", "up"))
        ]
        layers.append(
            Layer(
                name=f"{name}.mlp.gate_up_proj",
                class_name="MergedColumnParallelLinear",
                tensors=(TensorEntry("weight", "BF16", (2 * part, hidden)),),
                applications=tuple(fused),
            )
        )
        layers.append(
            Layer(
                name=f"{name}.norm",
                class_name="RMSNorm",
                tensors=(
                    TensorEntry("weight", "BF16", (hidden,)),
                    TensorEntry(
                        "cache",
                        "F32",
                        (4,),
                        kind="buffer",
                        persistent=False,
                        coverage=Coverage(gap_elements=4, gaps=(((0, 4),),)),
                    ),
                ),
                applications=(Application((f"{name}.norm.weight",), "weight", writes=(Write(),)),),
            )
        )
    return tuple(layers)


def dense_checkpoint(blocks: int = 2, hidden: int = 8) -> FakeCheckpoint:
    sources: list[Source] = []
    for block in range(blocks):
        name = f"model.layers.{block}"
        sources += [source(f"{name}.mlp.{half}_proj.weight", (hidden, hidden)) for half in ("gate", "up")]
        sources.append(source(f"{name}.norm.weight", (hidden,)))
    sources.append(source("model.layers.9.mtp.weight", (hidden,)))
    return checkpoint(sources)


def dense_manifests(world: int = 2, **sizes: int) -> list[Manifest]:
    given = dense_checkpoint(**sizes)
    topology = Topology(tp=world)
    manifests = []
    for rank in topology.ranks():
        layers = dense_layers(rank.index, world, **sizes)
        used = {name for layer in layers for a in layer.applications for name in a.sources}
        manifests.append(
            Manifest.build(
                engine=ENGINE,
                topology=topology,
                rank=rank,
                model=MODEL,
                checkpoint=checkpoint_identity(given),  # type: ignore[arg-type]
                sources=[source_entry(s) for s in given.sources if s.name in used],
                layers=layers,
                summary=summary(layers, len(used)),
            )
        )
    return manifests


def dense_bundle(world: int = 2, **sizes: int) -> Bundle:
    given = dense_checkpoint(**sizes)
    manifests = dense_manifests(world, **sizes)
    outcomes = [{"model.layers.9.mtp.weight": "skipped"} for _ in manifests]
    return Bundle.build(given, manifests, outcomes)  # type: ignore[arg-type]
