"""Turn the entries of a bf16 checkpoint into those of a quantized one, in the layouts that quantization tools publish.

Each function takes an entry of a linear weight (out, in) and gives the entries that stand for it afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from tests.engines.vllm.sweep.header_only import Entry

__all__ = [
    "awq", "block_fp8", "compressed_fp8", "compressed_int8", "compressed_w4a16", "gptq", "left_whole", "nvfp4", "quantize",
    "static_fp8", "with_kv_scales",
]  # fmt: skip

_LINEAR = re.compile(r"\.(\w*_proj|\w*proj_with_mqa|w[123]|gate_up_proj|fc[12]|dense\w*)\.weight$")

Layout = Callable[[str, int, int], Iterable[Entry]]


def quantize(entries: Iterable[Entry], layout: Layout) -> list[Entry]:
    """Every linear weight of the decoder in `layout`; embeddings, norms, routers and the head as they are."""
    result: list[Entry] = []
    for name, dtype, shape in entries:
        if (
            len(shape) == 2
            and _LINEAR.search(name)
            and "eh_proj" not in name
            and "visual" not in name
            and "vision" not in name
        ):
            result += layout(name.removesuffix(".weight"), *shape)
        else:
            result.append((name, dtype, shape))
    return result


def _blocks(size: int, block: int = 128) -> int:
    return -(-size // block)


def block_fp8(name: str, out: int, inner: int) -> Iterable[Entry]:
    """DeepSeek-V3's: 128 x 128 blocks."""
    yield f"{name}.weight", "F8_E4M3", (out, inner)
    yield f"{name}.weight_scale_inv", "F32", (_blocks(out), _blocks(inner))


def static_fp8(name: str, out: int, inner: int) -> Iterable[Entry]:
    """One scale per tensor, activations too."""
    yield f"{name}.weight", "F8_E4M3", (out, inner)
    yield f"{name}.weight_scale", "F32", ()
    yield f"{name}.input_scale", "F32", ()


def compressed_fp8(name: str, out: int, inner: int) -> Iterable[Entry]:
    """compressed-tensors, scale per channel, dynamic activations."""
    yield f"{name}.weight", "F8_E4M3", (out, inner)
    yield f"{name}.weight_scale", "BF16", (out, 1)


def compressed_int8(name: str, out: int, inner: int) -> Iterable[Entry]:
    """compressed-tensors W8A8."""
    yield f"{name}.weight", "I8", (out, inner)
    yield f"{name}.weight_scale", "BF16", (out, 1)


def compressed_w4a16(name: str, out: int, inner: int) -> Iterable[Entry]:
    """compressed-tensors pack-quantized, groups of 128."""
    yield f"{name}.weight_packed", "I32", (out, inner // 8)
    yield f"{name}.weight_scale", "BF16", (out, inner // 128)
    yield f"{name}.weight_shape", "I64", (2,)


def gptq(name: str, out: int, inner: int) -> Iterable[Entry]:
    """GPTQ 4 bit, groups of 128."""
    yield f"{name}.qweight", "I32", (inner // 8, out)
    yield f"{name}.qzeros", "I32", (inner // 128, out // 8)
    yield f"{name}.scales", "F16", (inner // 128, out)
    yield f"{name}.g_idx", "I32", (inner,)


def awq(name: str, out: int, inner: int) -> Iterable[Entry]:
    """AWQ 4 bit, groups of 128."""
    yield f"{name}.qweight", "I32", (inner, out // 8)
    yield f"{name}.qzeros", "I32", (inner // 128, out // 8)
    yield f"{name}.scales", "F16", (inner // 128, out)


def nvfp4(name: str, out: int, inner: int) -> Iterable[Entry]:
    """ModelOpt NVFP4: two values to a byte, an FP8 scale for 16."""
    yield f"{name}.weight", "U8", (out, inner // 2)
    yield f"{name}.weight_scale", "F8_E4M3", (out, inner // 16)
    yield f"{name}.weight_scale_2", "F32", ()
    yield f"{name}.input_scale", "F32", ()


def with_kv_scales(entries: Iterable[Entry]) -> list[Entry]:
    """Add the scales of an FP8 key/value cache to every attention."""
    result: list[Entry] = []
    for entry in entries:
        result.append(entry)
        if entry[0].endswith("self_attn.k_proj.weight"):
            stem = entry[0].removesuffix("k_proj.weight")
            result += [(f"{stem}k_proj.k_scale", "F32", ()), (f"{stem}v_proj.v_scale", "F32", ())]
    return result


def left_whole(layout: str, entries: Iterable[Entry]) -> dict[str, Any]:
    """For layouts whose published configurations name what is not quantized: the routers."""
    if CONFIGS[layout]["quant_method"] != "fp8":
        return {}
    routers = [name.removesuffix(".weight") for name, _, _ in entries if name.endswith(".mlp.gate.weight")]
    return {"modules_to_not_convert": ["lm_head", *routers]} if routers else {}


def _scheme(weights: dict[str, Any], inputs: dict[str, Any] | None, layout: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }


_NUMBERS = {"dynamic": False, "symmetric": True, "observer": "minmax"}
#: Layout -> `quantization_config` of config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "block_fp8": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    },
    "static_fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "compressed_fp8": _scheme(
        {"num_bits": 8, "type": "float", "strategy": "channel", **_NUMBERS},
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
        "float-quantized",
    ),
    "compressed_int8": _scheme(
        {"num_bits": 8, "type": "int", "strategy": "channel", **_NUMBERS},
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True},
        "int-quantized",
    ),
    "compressed_w4a16": _scheme(
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **_NUMBERS}, None, "pack-quantized"
    ),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "nvfp4": {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None,
        "ignore": ["lm_head", "*.mlp.gate"], "exclude_modules": ["lm_head", "*.mlp.gate"],
    },
}  # fmt: skip
LAYOUTS: dict[str, Layout] = {
    "block_fp8": block_fp8, "static_fp8": static_fp8, "compressed_fp8": compressed_fp8, "compressed_int8": compressed_int8,
    "compressed_w4a16": compressed_w4a16, "gptq": gptq, "awq": awq, "nvfp4": nvfp4,
}  # fmt: skip
