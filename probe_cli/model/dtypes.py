"""safetensors dtype spellings and torch dtypes."""

from __future__ import annotations

import torch

from probe_cli.errors import ProbeError

__all__ = ["SAFETENSORS_TO_TORCH", "dtype_name", "torch_dtype"]

# Types that torch lacks a full dtype for (F6) are absent: a checkpoint that has them cannot be probed.
_SPELLINGS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}

SAFETENSORS_TO_TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, spelling) for name, spelling in _SPELLINGS.items() if hasattr(torch, spelling)
}
_TORCH_TO_SAFETENSORS = {dtype: name for name, dtype in SAFETENSORS_TO_TORCH.items()}


def torch_dtype(name: str, *, what: str = "tensor") -> torch.dtype:
    """The torch dtype of a safetensors spelling. Raises ProbeError if this torch has none."""
    try:
        return SAFETENSORS_TO_TORCH[name]
    except KeyError:
        raise ProbeError(
            f"{what}: torch {torch.__version__} has no dtype for {name}",
            hint="use a newer torch to build this manifest",
        ) from None


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors spelling of a torch dtype; torch's own name where safetensors has none (e.g. `complex128`)."""
    return _TORCH_TO_SAFETENSORS.get(dtype, str(dtype).removeprefix("torch."))
