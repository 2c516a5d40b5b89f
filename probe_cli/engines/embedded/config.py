"""What the family reads from config.json, checked: the file comes from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from probe_cli.errors import InputError, UsageError
from probe_cli.topology import Topology

__all__ = ["SUPPORTED_MODEL_TYPES", "BlockSize", "ModelConfig", "Rope", "expert_parts"]

SUPPORTED_MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")

#: Rows and columns of a weight that share one scale.
BlockSize = tuple[int, int]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
#: Sizes beyond this are no model's; they would only be there to exhaust memory.
_LIMIT = 1 << 24


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `kind` is "default", "linear", "llama3" or one that only loads."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A Llama, Qwen3 or Qwen3-MoE configuration. The last fields are options of this family alone."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: torch.dtype
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    tied: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    block: BlockSize | None = None  # block FP8 weights
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalize_experts: bool = False
    sparse_step: int = 1
    dense_layers: frozenset[int] = frozenset()
    #: Features of the model that change the forward and that this family loads but does not compute.
    not_computed: tuple[str, ...] = ()
    sinks: bool = False
    decay: bool = False
    q_rank: int = 0  # with kv_rank: low-rank projections
    kv_rank: int = 0

    def is_sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        return self.experts > 0 and index not in self.dense_layers and (index + 1) % self.sparse_step == 0

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From config.json. Raises UsageError for a model of another family, InputError for a value that cannot be."""
        kind = config.get("model_type")
        if kind not in SUPPORTED_MODEL_TYPES:
            raise UsageError(
                f"the embedded models do not know model_type {kind!r}; they know {', '.join(SUPPORTED_MODEL_TYPES)}",
                hint="install an engine that does (the extra `vllm`), or give your own: --engine python:module:factory",
            )
        heads = _int(config, "num_attention_heads")
        hidden = _int(config, "hidden_size")
        sparse = kind == "qwen3_moe"
        # transformers before 5 writes num_experts, later releases num_local_experts.
        experts_key = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
        act = config.get("hidden_act", "silu")
        rope = _rope(config)
        not_computed = [f"hidden_act {act!r}"] if act != "silu" else []
        if rope.kind not in ("default", "linear", "llama3"):
            not_computed.append(f"rope_type {rope.kind!r}")
        if config.get("use_sliding_window"):
            not_computed.append("use_sliding_window")
        return cls(
            model_type=kind,
            hidden_size=hidden,
            intermediate_size=_int(config, "intermediate_size"),
            layers=_int(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=_int(config, "num_key_value_heads", heads),
            head_dim=_int(config, "head_dim", max(1, hidden // heads)),
            vocab_size=_int(config, "vocab_size"),
            dtype=_dtype(config),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope=rope,
            tied=bool(config.get("tie_word_embeddings")),
            attention_bias=bool(config.get("attention_bias")),
            mlp_bias=kind == "llama" and bool(config.get("mlp_bias")),
            block=_block(config),
            experts=_int(config, experts_key) if sparse else 0,
            experts_per_token=_int(config, "num_experts_per_tok") if sparse else 0,
            expert_size=_int(config, "moe_intermediate_size") if sparse else 0,
            normalize_experts=bool(config.get("norm_topk_prob")),
            sparse_step=_int(config, "decoder_sparse_step", 1),
            dense_layers=_indices(config, "mlp_only_layers"),
            not_computed=tuple(not_computed),
            sinks=bool(config.get("attention_sinks")),
            decay=bool(config.get("attention_decay")),
            q_rank=_int(config, "q_lora_rank") if config.get("q_lora_rank") else 0,
            kv_rank=_int(config, "kv_lora_rank") if config.get("q_lora_rank") else 0,
        )

    def check_topology(self, topology: Topology) -> None:
        """Raise UsageError if this model cannot be cut that way."""
        tp = topology.tp
        if self.heads % tp:
            raise UsageError(f"{self.heads} attention heads cannot be spread over tp={tp} ranks")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise UsageError(f"{self.kv_heads} key/value heads cannot be spread over, or copied to, tp={tp} ranks")
        if self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly")
        if topology.pp > self.layers:
            raise UsageError(f"{self.layers} layers cannot be spread over pp={topology.pp} stages")
        if topology.ep > 1 and not self.experts:
            raise UsageError(f"ep={topology.ep}, but a {self.model_type} model has no experts")
        if self.experts % topology.ep:
            raise UsageError(f"{self.experts} experts cannot be spread over ep={topology.ep} ranks")
        expert_tp = expert_parts(topology)
        dense = any(not self.is_sparse(index) for index in range(self.layers))
        cuts = [("intermediate_size", self.intermediate_size, tp)] if dense else []
        if self.experts:
            cuts.append(("moe_intermediate_size", self.expert_size, expert_tp))
        for what, size, parts in cuts:
            if size % parts:
                raise UsageError(f"{what} {size} cannot be spread over {parts} ranks")
        if self.block:
            local = [(what, size // parts) for what, size, parts in cuts]
            local.append(("queries", self.heads // tp * self.head_dim))
            local.append(("keys", max(1, self.kv_heads // tp) * self.head_dim))
            for what, size in local:
                for block in self.block:
                    if size % block:
                        raise UsageError(f"{what}: {size} per rank (tp={tp}) does not end on an FP8 block of {block}")


def expert_parts(topology: Topology) -> int:
    """In how many parts each expert is cut: ranks that share the experts of one place in the expert group."""
    return max(1, topology.tp // topology.ep) if topology.ep > 1 else topology.tp


def _int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LIMIT:
        what = "is missing" if value is None else f"is {str(value)[:60]!r}"
        raise InputError(f"config.json: {key} {what}, expected an integer from 1 to {_LIMIT:,}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise InputError(f"config.json: {key} is {str(value)[:60]!r}, expected a number")
    return float(value)


def _indices(config: Mapping[str, Any], key: str) -> frozenset[int]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise InputError(f"config.json: {key} is {str(value)[:60]!r}, expected a list of layer numbers")
    return frozenset(value)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = _DTYPES.get(str(name).removeprefix("torch."))
    if dtype is None:
        raise InputError(f"config.json: dtype is {str(name)[:60]!r}, expected one of {', '.join(_DTYPES)}")
    return dtype


def _table(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"config.json: {key} is {str(value)[:60]!r}, expected an object")
    return value


def _rope(config: Mapping[str, Any]) -> Rope:
    # transformers 5 has everything in rope_parameters; before, the base stood alone and the rest in rope_scaling.
    table = _table(config, "rope_parameters") or _table(config, "rope_scaling")
    return Rope(
        theta=_number(table, "rope_theta", _number(config, "rope_theta", 10000.0)),
        kind=str(table.get("rope_type") or table.get("type") or "default"),
        factor=_number(table, "factor", 1.0),
        low_freq_factor=_number(table, "low_freq_factor", 1.0),
        high_freq_factor=_number(table, "high_freq_factor", 4.0),
        original_length=_int(table, "original_max_position_embeddings", 8192),
    )


def _block(config: Mapping[str, Any]) -> BlockSize | None:
    table = _table(config, "quantization_config")
    if not table:
        return None
    size = table.get("weight_block_size")
    method = table.get("quant_method")
    if method != "fp8" or not isinstance(size, list) or len(size) != 2:
        raise UsageError(
            f"the embedded models know one quantization, fp8 with weight_block_size; this is {str(method)[:60]!r}"
            + ("" if size is None else f" with weight_block_size {str(size)[:60]}"),
            hint="install an engine that knows it (the extra `vllm`)",
        )
    kept = table.get("modules_to_not_convert") or []
    odd = [name for name in kept if "layers." in str(name) and not str(name).endswith((".gate", "norm"))]
    if odd:
        raise UsageError(
            f"the embedded models quantize every linear layer, but config.json excludes {str(odd[0])[:80]}"
        )
    rows, columns = ({"block": value} for value in size)
    return _int(rows, "block"), _int(columns, "block")
