"""A small mixture-of-experts checkpoint on disk, the bundle of its two ranks, and every kind of single change to
either."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from probe_cli.checkpoint import Checkpoint
from probe_cli.dtypes import DTYPE_BITS, numel
from probe_cli.manifest import Bundle, Manifest, checkpoint_identity
from probe_cli.manifest.identity import source_entry
from probe_cli.manifest.regions import contiguous
from probe_cli.manifest.schema import Application, Layer, TensorEntry, View, Write
from probe_cli.topology import Rank, Topology
from tests.manifest.samples import ENGINE, MODEL, summary

HIDDEN, EXPERTS, BLOCKS = 8, 4, 2

#: name -> (dtype, shape, file)
Tensors = dict[str, tuple[str, tuple[int, ...], str]]


def tensors() -> Tensors:
    """Two blocks in a file each; embedding, norm and head in the first; a prediction layer that nothing loads."""
    made: Tensors = {"model.embed_tokens.weight": ("BF16", (32, HIDDEN), "a.safetensors")}
    for block in range(BLOCKS):
        file = "ab"[block] + ".safetensors"
        layer = f"model.layers.{block}"
        for part in ("q", "k", "v"):
            made[f"{layer}.self_attn.{part}_proj.weight"] = ("BF16", (HIDDEN, HIDDEN), file)
        made[f"{layer}.self_attn.o_proj.weight"] = ("BF16", (HIDDEN, 2 * HIDDEN), file)
        made[f"{layer}.input_layernorm.weight"] = ("BF16", (HIDDEN,), file)
        for expert in range(EXPERTS):
            for part in ("gate", "up", "down"):
                made[f"{layer}.mlp.experts.{expert}.{part}_proj.weight"] = ("F8_E4M3", (HIDDEN, HIDDEN), file)
                made[f"{layer}.mlp.experts.{expert}.{part}_proj.weight_scale_inv"] = ("F32", (1, 1), file)
    made["model.norm.weight"] = ("BF16", (HIDDEN,), "a.safetensors")
    made["lm_head.weight"] = ("BF16", (32, HIDDEN), "a.safetensors")
    made["model.mtp.0.proj.weight"] = ("BF16", (HIDDEN, HIDDEN), "b.safetensors")
    return made


def write(folder: Path, given: Tensors, *, index: bool = True) -> Path:
    """Write the checkpoint as safetensors files of zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted({file for _, _, file in given.values()}):
        header: dict[str, object] = {}
        offset = 0
        for name, (dtype, shape, own) in given.items():
            if own == file:
                size = numel(shape) * DTYPE_BITS[dtype] // 8
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
                offset += size
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
    if index:
        weight_map = {name: file for name, (_, _, file) in given.items()}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "sample"}')
    return folder


def layers(rank: Rank) -> tuple[Layer, ...]:
    """One rank's contract: attention cut by tp, experts spread by ep, the rest on both."""
    made: list[Layer] = []

    def layer(name: str, kind: str, entries: list[tuple[TensorEntry, list[Application]]]) -> None:
        tensors = tuple(entry for entry, _ in entries)
        made.append(Layer(name, kind, tensors, tuple(a for _, applications in entries for a in applications)))

    def plain(name: str, shape: tuple[int, ...], kind: str) -> None:
        layer(name, kind, [(TensorEntry("weight", "BF16", shape), [Application((f"{name}.weight",), "weight")])])

    plain("model.embed_tokens", (32, HIDDEN), "Embedding")
    part = HIDDEN // rank.tp_size
    for block in range(BLOCKS):
        prefix = f"model.layers.{block}"
        fused = [
            Application(
                (f"{prefix}.self_attn.{name}_proj.weight",),
                "weight",
                {"loaded_shard_id": name},
                writes=(
                    Write(
                        src=View(rank.tp * part * HIDDEN, (part, HIDDEN), (HIDDEN, 1)),
                        dst=View(number * part * HIDDEN, (part, HIDDEN), (HIDDEN, 1)),
                    ),
                ),
            )
            for number, name in enumerate("qkv")
        ]
        layer(
            f"{prefix}.self_attn.qkv_proj",
            "QKVParallelLinear",
            [(TensorEntry("weight", "BF16", (3 * part, HIDDEN)), fused)],
        )
        plain(f"{prefix}.self_attn.o_proj", (HIDDEN, 2 * HIDDEN), "Linear")
        plain(f"{prefix}.input_layernorm", (HIDDEN,), "RMSNorm")
        local = EXPERTS // rank.ep_size
        entries = []
        for tensor, dtype, size in (("weight", "F8_E4M3", HIDDEN), ("weight_scale_inv", "F32", 1)):
            shape = (local, 3 * size, size)
            applications = [
                Application(
                    (f"{prefix}.mlp.experts.{expert}.{name}_proj.{tensor}",),
                    tensor,
                    {"shard_id": shard, "expert_id": expert},
                    writes=(
                        Write(
                            dst=View(
                                (expert % local) * 3 * size * size + number * size * size,
                                (size, size),
                                contiguous((size, size)),
                            )
                        ),
                    ),
                )
                for expert in range(rank.ep * local, (rank.ep + 1) * local)
                for number, (name, shard) in enumerate((("gate", "w1"), ("up", "w3"), ("down", "w2")))
            ]
            entries.append((TensorEntry(tensor, dtype, shape), applications))
        layer(f"{prefix}.mlp.experts", "FusedMoE", entries)
    plain("model.norm", (HIDDEN,), "RMSNorm")
    plain("lm_head", (32, HIDDEN), "LMHead")
    return tuple(made)


def manifests(
    checkpoint: Checkpoint,
    topology: Topology | None = None,
    change: Callable[[Rank, tuple[Layer, ...]], tuple[Layer, ...]] = lambda rank, made: made,
    **identity: object,
) -> list[Manifest]:
    """The manifests of all ranks; `change` edits a rank's layers before the manifest is built from them."""
    topology = topology or Topology(tp=2, ep=2)
    built = []
    for rank in topology.ranks():
        own = change(rank, layers(rank))
        used = {name for layer in own for application in layer.applications for name in application.sources}
        parts: dict[str, object] = {
            "engine": ENGINE,
            "topology": topology,
            "rank": rank,
            "model": msgspec.structs.replace(MODEL, config_digest=checkpoint.config_digest),
            "checkpoint": checkpoint_identity(checkpoint),
            "sources": [source_entry(source) for source in checkpoint.sources if source.name in used],
            "layers": own,
            "summary": summary(own, len(used)),
        }
        built.append(Manifest.build(**{**parts, **identity}))  # type: ignore[arg-type]
    return built


def bundle(checkpoint: Checkpoint, built: list[Manifest] | None = None) -> Bundle:
    """The bundle of these manifests, or of those that belong to the checkpoint."""
    built = built or manifests(checkpoint)
    outcomes = []
    for manifest in built:
        used = {source.name for source in manifest.sources}
        outcomes.append({s.name: "skipped" for s in checkpoint.sources if s.name not in used})
    return Bundle.build(checkpoint, built, outcomes)
