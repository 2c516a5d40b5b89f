"""The safetensors dtypes and their sizes, without torch. Sub-byte types (F4, F6) have sizes in bits."""

from __future__ import annotations

__all__ = ["DTYPE_BITS", "nbytes", "numel"]

# safetensors 0.8, `Dtype` in safetensors/src/tensor.rs.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


def numel(shape: tuple[int, ...]) -> int:
    """Number of elements of a tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    return count


def nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor, or None if a sub-byte dtype does not fill whole bytes. `dtype` must be a known one."""
    bits = numel(shape) * DTYPE_BITS[dtype]
    return bits // 8 if bits % 8 == 0 else None
