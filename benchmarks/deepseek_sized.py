"""A checkpoint of DeepSeek-V3's names and shapes (91,991 tensors, FP8) and the manifests of its ranks, made without an
engine: the size is real, the routing is a serving engine's in outline."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from probe_cli.checkpoint import Checkpoint
from probe_cli.dtypes import DTYPE_BITS, numel
from probe_cli.manifest import Bundle, Manifest, checkpoint_identity
from probe_cli.manifest.identity import source_entry
from probe_cli.manifest.regions import contiguous
from probe_cli.manifest.schema import (
    Application,
    EngineIdentity,
    Layer,
    ModelIdentity,
    Summary,
    TensorEntry,
    View,
    Write,
)
from probe_cli.topology import Rank, Topology

__all__ = ["bundle", "rank_layers", "tensors", "write_checkpoint"]

Shape = tuple[int, ...]
HIDDEN, EXPERTS, LAYERS, DENSE = 7168, 256, 61, 3


def tensors() -> Iterator[tuple[str, Shape, str]]:
    """(name, shape, dtype) of every checkpoint tensor, the multi-token-prediction layer included."""

    def fp8(name: str, out: int, inner: int) -> Iterator[tuple[str, Shape, str]]:
        yield f"{name}.weight", (out, inner), "F8_E4M3"
        yield f"{name}.weight_scale_inv", (-(-out // 128), -(-inner // 128)), "F32"

    yield "model.embed_tokens.weight", (129280, HIDDEN), "BF16"
    for index in range(LAYERS + 1):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (HIDDEN,), "BF16"
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,), "BF16"
        attention = f"{layer}.self_attn"
        yield from fp8(f"{attention}.q_a_proj", 1536, HIDDEN)
        yield f"{attention}.q_a_layernorm.weight", (1536,), "BF16"
        yield from fp8(f"{attention}.q_b_proj", 128 * 192, 1536)
        yield from fp8(f"{attention}.kv_a_proj_with_mqa", 576, HIDDEN)
        yield f"{attention}.kv_a_layernorm.weight", (512,), "BF16"
        yield from fp8(f"{attention}.kv_b_proj", 128 * 256, 512)
        yield from fp8(f"{attention}.o_proj", HIDDEN, 128 * 128)
        if index < DENSE:
            groups = [(f"{layer}.mlp", 18432)]
        else:
            yield f"{layer}.mlp.gate.weight", (EXPERTS, HIDDEN), "BF16"
            yield f"{layer}.mlp.gate.e_score_correction_bias", (EXPERTS,), "F32"
            groups = [(f"{layer}.mlp.experts.{expert}", 2048) for expert in range(EXPERTS)]
            groups.append((f"{layer}.mlp.shared_experts", 2048))
        for group, width in groups:
            yield from fp8(f"{group}.gate_proj", width, HIDDEN)
            yield from fp8(f"{group}.up_proj", width, HIDDEN)
            yield from fp8(f"{group}.down_proj", HIDDEN, width)
        if index == LAYERS:
            yield f"{layer}.embed_tokens.weight", (129280, HIDDEN), "BF16"
            yield f"{layer}.enorm.weight", (HIDDEN,), "BF16"
            yield f"{layer}.hnorm.weight", (HIDDEN,), "BF16"
            yield f"{layer}.eh_proj.weight", (HIDDEN, 2 * HIDDEN), "BF16"
            yield f"{layer}.shared_head.head.weight", (129280, HIDDEN), "BF16"
            yield f"{layer}.shared_head.norm.weight", (HIDDEN,), "BF16"
    yield "model.norm.weight", (HIDDEN,), "BF16"
    yield "lm_head.weight", (129280, HIDDEN), "BF16"


def write_checkpoint(folder: Path, shards: int = 163) -> Checkpoint:
    """Write sharded safetensors files that are headers and holes, and open them."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = list(tensors())
    per_shard = -(-len(everything) // shards)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:06d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, shape, dtype in everything[shard * per_shard : (shard + 1) * per_shard]:
            size = numel(shape) * DTYPE_BITS[dtype] // 8
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
            weight_map[name] = file
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + offset)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    return Checkpoint.open(folder)


def _cut(shape: Shape, dim: int, index: int, parts: int, dst: Shape, dst_dim: int, dst_start: int) -> Write:
    """A write of the `index`-th of `parts` along `dim` to `dst`, from `dst_start` along `dst_dim` (of its last
    dims)."""
    size = shape[dim] // parts
    part = tuple(size if d == dim else n for d, n in enumerate(shape))
    strides, dst_strides = contiguous(shape), contiguous(dst)
    src = View(index * size * strides[dim], part, strides)
    tail = dst_strides[len(dst) - len(shape) :]
    return Write(src=src, dst=View(dst_start * dst_strides[dst_dim], part, tail))


class _Builder:
    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.layers: list[Layer] = []

    def add(self, name: str, kind: str, entries: list[tuple[TensorEntry, list[Application]]]) -> None:
        self.layers.append(
            Layer(
                name=name,
                class_name=kind,
                tensors=tuple(entry for entry, _ in entries),
                applications=tuple(a for _, applications in entries for a in applications),
            )
        )

    def plain(self, name: str, shape: Shape, dtype: str, kind: str = "RMSNorm", tensor: str = "weight") -> None:
        application = Application((f"{name}.{tensor}",), tensor, writes=(Write(),))
        self.add(name, kind, [(TensorEntry(tensor, dtype, shape), [application])])

    def linear(self, name: str, parts: list[tuple[str, int, int]], dim: int | None, kind: str) -> None:
        """A layer fused from `parts` (source, out, in), cut along `dim` of each, or replicated."""
        world = self.rank.tp_size if dim is not None else 1
        index = self.rank.tp if dim is not None else 0
        entries = []
        for tensor, dtype, block in (("weight", "F8_E4M3", 1), ("weight_scale_inv", "F32", 128)):
            shapes = [(-(-out // block), -(-inner // block)) for _, out, inner in parts]
            local = [tuple(n // world if d == dim else n for d, n in enumerate(shape)) for shape in shapes]
            dst = (sum(shape[0] for shape in local), local[0][1])
            applications, start = [], 0
            for number, ((source, _, _), shape, own) in enumerate(zip(parts, shapes, local)):
                selectors = {"loaded_shard_id": number} if len(parts) > 1 else {}
                write = _cut(shape, dim or 0, index, world, dst, 0, start)
                applications.append(Application((f"{source}.{tensor}",), tensor, selectors, writes=(write,)))
                start += own[0]
            entries.append((TensorEntry(tensor, dtype, dst), applications))
        self.add(name, kind, entries)

    def experts(self, name: str) -> None:
        local = EXPERTS // self.rank.ep_size
        entries = []
        for tensor, dtype, block in (("weight", "F8_E4M3", 1), ("weight_scale_inv", "F32", 128)):
            inner, width = HIDDEN // block, 2048 // block
            for group, shape, shards in (
                ("w13", (local, 2 * width, inner), (("gate_proj", "w1", 0), ("up_proj", "w3", width))),
                ("w2", (local, inner, width), (("down_proj", "w2", 0),)),
            ):
                applications = []
                for expert in range(self.rank.ep * local, (self.rank.ep + 1) * local):
                    for source, shard, start in shards:
                        part = (width, inner) if group == "w13" else (inner, width)
                        at = (expert % local) * shape[1] * shape[2] + start * shape[2]
                        applications.append(
                            Application(
                                (f"{name}.{expert}.{source}.{tensor}",),
                                f"{group}_{tensor}",
                                {"weight_name": f"{name}.{group}_{tensor}", "shard_id": shard, "expert_id": expert},
                                writes=(
                                    Write(src=View(0, part, contiguous(part)), dst=View(at, part, contiguous(part))),
                                ),
                            )
                        )
                entries.append((TensorEntry(f"{group}_{tensor}", dtype, shape), applications))
        self.add(name, "FusedMoE", entries)


def rank_layers(rank: Rank) -> tuple[Layer, ...]:
    """The layers of one rank: attention and shared experts cut by tp, experts spread by ep."""
    build = _Builder(rank)
    vocab = 129280 // rank.tp_size
    for name in ("model.embed_tokens", "lm_head"):
        write = _cut((129280, HIDDEN), 0, rank.tp, rank.tp_size, (vocab, HIDDEN), 0, 0)
        application = Application((f"{name}.weight",), "weight", writes=(write,))
        build.add(name, "VocabParallelEmbedding", [(TensorEntry("weight", "BF16", (vocab, HIDDEN)), [application])])
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        build.plain(f"{layer}.input_layernorm", (HIDDEN,), "BF16")
        fused = [(f"{attention}.q_a_proj", 1536, HIDDEN), (f"{attention}.kv_a_proj_with_mqa", 576, HIDDEN)]
        build.linear(f"{attention}.fused_qkv_a_proj", fused, None, "MergedReplicatedLinear")
        build.plain(f"{attention}.q_a_layernorm", (1536,), "BF16")
        build.linear(f"{attention}.q_b_proj", [(f"{attention}.q_b_proj", 128 * 192, 1536)], 0, "ColumnParallelLinear")
        build.plain(f"{attention}.kv_a_layernorm", (512,), "BF16")
        build.linear(f"{attention}.kv_b_proj", [(f"{attention}.kv_b_proj", 128 * 256, 512)], 0, "ColumnParallelLinear")
        build.linear(f"{attention}.o_proj", [(f"{attention}.o_proj", HIDDEN, 128 * 128)], 1, "RowParallelLinear")
        build.plain(f"{layer}.post_attention_layernorm", (HIDDEN,), "BF16")
        dense, width = (f"{layer}.mlp", 18432) if index < DENSE else (f"{layer}.mlp.shared_experts", 2048)
        halves = [(f"{dense}.gate_proj", width, HIDDEN), (f"{dense}.up_proj", width, HIDDEN)]
        build.linear(f"{dense}.gate_up_proj", halves, 0, "MergedColumnParallelLinear")
        build.linear(f"{dense}.down_proj", [(f"{dense}.down_proj", HIDDEN, width)], 1, "RowParallelLinear")
        if index >= DENSE:
            build.plain(f"{layer}.mlp.gate", (EXPERTS, HIDDEN), "BF16", "ReplicatedLinear")
            build.experts(f"{layer}.mlp.experts")
    build.plain("model.norm", (HIDDEN,), "BF16")
    return tuple(build.layers)


def bundle(checkpoint: Checkpoint, topology: Topology | None = None, version: str = "1.0") -> Bundle:
    """The bundle of all ranks, TP8 and EP8 unless told."""
    topology = topology or Topology(tp=8, ep=8)
    manifests, outcomes = [], []
    for rank in topology.ranks():
        layers = rank_layers(rank)
        used = {name for layer in layers for a in layer.applications for name in a.sources}
        applications = sum(a.count for layer in layers for a in layer.applications)
        tensor_count = sum(len(layer.tensors) for layer in layers)
        manifests.append(
            Manifest.build(
                engine=EngineIdentity(name="sample", version=version, torch="2.13.0", target="cuda:sm90"),
                topology=topology,
                rank=rank,
                model=ModelIdentity(class_name="DeepseekV3ForCausalLM"),
                checkpoint=checkpoint_identity(checkpoint),
                sources=[source_entry(source) for source in checkpoint.sources if source.name in used],
                layers=layers,
                summary=Summary(len(layers), tensor_count, applications, 0, 0, 0, 0, 0, 0, len(used), 0),
            )
        )
        outcomes.append({source.name: "declined" for source in checkpoint.sources if source.name not in used})
    return Bundle.build(checkpoint, manifests, outcomes)
