"""Bytes of sources: right for every dtype, and never those of a file that changed under the reader."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from header_writer import data_of, write
from safetensors.torch import save_file

from probe_cli.checkpoint import Checkpoint, local
from probe_cli.dtypes import DTYPE_BITS
from probe_cli.errors import CheckpointError

#: What safetensors.torch 0.8 writes.
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_round_trip_from_safetensors_torch(tmp_path: Path, dtype: str) -> None:
    size = DTYPE_BITS[dtype] // 8
    raw = torch.arange(12 * size, dtype=torch.uint8)
    if dtype == "BOOL":
        raw %= 2
    tensor = raw.view(TORCH_DTYPES[dtype]).reshape(3, 4)
    save_file({"x": tensor, "empty": tensor[:0]}, tmp_path / "m.safetensors", metadata={"format": "pt", "ü": '"'})
    checkpoint = Checkpoint.open(tmp_path / "m.safetensors")
    source = checkpoint["x"]
    assert (source.dtype, source.shape, source.nbytes) == (dtype, (3, 4), 12 * size)
    assert checkpoint.read(source) == bytes(raw.tolist())
    assert checkpoint["empty"].shape == (0, 4) and checkpoint.read(checkpoint["empty"]) == b""
    assert checkpoint.metadata["m.safetensors"] == {"format": "pt", "ü": '"'}


def test_pairs_of_4_bits_from_safetensors_torch(tmp_path: Path) -> None:
    """torch's float4_e2m1fn_x2 counts pairs, the file counts elements."""
    packed = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    save_file({"x": packed.view(torch.float4_e2m1fn_x2)}, tmp_path / "m.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "m.safetensors")
    assert (checkpoint["x"].dtype, checkpoint["x"].shape, checkpoint["x"].nbytes) == ("F4", (3, 8), 12)
    assert checkpoint.read(checkpoint["x"]) == bytes(range(12))


@pytest.mark.parametrize(("dtype", "shape", "size"), [("F4", (2, 5), 5), ("F6_E2M3", (4, 3), 9), ("F6_E3M2", (8,), 6)])
def test_sub_byte_dtypes(tmp_path: Path, dtype: str, shape: tuple[int, ...], size: int) -> None:
    tensors = {"x": (dtype, shape), "y": ("U8", (3,))}
    checkpoint = Checkpoint.open(write(tmp_path / "m.safetensors", tensors))
    assert checkpoint["x"].nbytes == size
    assert checkpoint.read(checkpoint["y"]) == data_of(tensors)[size:]


def test_file_replaced_after_opening(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": ("U8", (3,))})
    checkpoint = Checkpoint.open(path)
    new = write(tmp_path / "new", {"x": ("U8", (3,))})
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.replace(path)
    with pytest.raises(CheckpointError, match=r"m\.safetensors: changed while it was being read, expected the file"):
        checkpoint.read(checkpoint["x"])


def test_file_written_in_place_after_opening(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": ("U8", (3,))})
    checkpoint = Checkpoint.open(path)
    before = path.stat().st_mtime_ns
    with path.open("r+b") as stream:
        stream.seek(-3, os.SEEK_END)
        stream.write(b"abc")
    os.utime(path, ns=(before, before + 1))
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        checkpoint.read(checkpoint["x"])


def test_file_gone_after_opening(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"x": ("U8", (3,))})
    checkpoint = Checkpoint.open(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"m\.safetensors: no such file"):
        checkpoint.read(checkpoint["x"])


@pytest.mark.parametrize("how", ["grow", "cut"])
def test_file_changing_while_its_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    path = write(tmp_path / "m.safetensors", {"x": ("U8", (3,))})
    read = local._read

    def meddling(descriptor: int, start: int, count: int) -> bytes:
        if start:
            os.truncate(path, path.stat().st_size + 5 if how == "grow" else 20)
        return read(descriptor, start, count)

    monkeypatch.setattr(local, "_read", meddling)
    with pytest.raises(CheckpointError, match=r"m\.safetensors: changed while it was being read"):
        Checkpoint.open(path)


def test_pickles_for_worker_processes(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "m.safetensors", {"x": ("U8", (3,))}))
    assert checkpoint.digest
    copy = pickle.loads(pickle.dumps(checkpoint))
    assert copy.sources == checkpoint.sources and copy.digest == checkpoint.digest
    assert copy.read(copy["x"]) == checkpoint.read(checkpoint["x"])


def test_immutable(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path / "m.safetensors", {"x": ("U8", (3,))}))
    with pytest.raises(AttributeError):
        checkpoint.sources = ()  # type: ignore[misc]
    with pytest.raises(KeyError, match="the checkpoint has no tensor 'y'"):
        checkpoint["y"]
