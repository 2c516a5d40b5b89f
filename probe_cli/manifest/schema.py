"""The typed form of a manifest and of a bundle's index: schema version 1. `docs/manifest.md` is the specification.

All structs are frozen. Nothing here imports torch: dtypes are safetensors spellings, geometry is in elements.

Fields that have their default value are left out of files. msgspec tells by identity, not by equality, so each struct
puts the default itself in the place of what is only equal to it: the same content gives the same bytes, wherever a
string came from.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from probe_cli.topology import Rank, Topology

__all__ = [
    "BUNDLE_FORMAT",
    "MANIFEST_FORMAT",
    "SCHEMA_VERSION",
    "Application",
    "Box",
    "BundleIndex",
    "CheckpointIdentity",
    "Coverage",
    "EngineIdentity",
    "FileIdentity",
    "Layer",
    "ManifestDocument",
    "ModelIdentity",
    "RankEntry",
    "Selector",
    "SourceEntry",
    "Summary",
    "TensorEntry",
    "View",
    "Write",
]

MANIFEST_FORMAT = "probe-manifest/rank"
BUNDLE_FORMAT = "probe-manifest/bundle"
SCHEMA_VERSION = "1.1"

_MAX_INT = (1 << 63) - 1

#: A size, offset or number of things.
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT)]
#: A tensor has at most this many dimensions (torch's limit).
_DIMS = msgspec.Meta(max_length=64)
Shape: TypeAlias = Annotated[tuple[Size, ...], _DIMS]
#: A name of a tensor, layer, file or class.
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$", max_length=71)]

#: A selector value as it stands in JSON. Enums are `{"enum": "ClassName.MEMBER"}`, dtypes `{"dtype": "bfloat16"}`,
#: tuples and lists are arrays. Selectors whose value is None are left out.
Selector: TypeAlias = Any

#: One (start, stop) pair per dimension, in elements; a scalar tensor has the empty box.
Box: TypeAlias = Annotated[tuple[tuple[Size, Size], ...], _DIMS]


def _put_defaults(value: msgspec.Struct, **defaults: object) -> None:
    for name, default in defaults.items():
        found = getattr(value, name)
        if found is not default and found == default:
            msgspec.structs.force_setattr(value, name, default)


class View(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A strided view of a tensor in elements: what `torch.as_strided(tensor, shape, stride, offset)` selects."""

    offset: Size
    shape: Shape
    stride: Shape


class Write(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One write of an application: elements of the destination, and the source elements that land there, in order.

    `src` and `dst` have the same number of elements, iterated in row-major order of their shapes; None means the
    whole tensor in order. A stride of 0 in `src` repeats an element.
    """

    #: Which of the application's sources (index into `Application.sources`); None if no source is read (a constant).
    source: Size | None = 0
    src: View | None = None
    dst: View | None = None
    #: `layer.tensor` that is written, if it is not the tensor that the application's key names.
    tensor: Name | None = None
    #: dtype (safetensors spelling) of the view if the bytes are reinterpreted; elements are then of that dtype.
    src_dtype: str | None = None
    dst_dtype: str | None = None
    #: The value went through arithmetic, a cast or a copy on its way: `src` says what was read, not what was stored.
    computed: bool = False
    #: False where `src` (or `dst`) is only an upper bound of the elements read (or written).
    exact: bool = True
    #: The source was added to what the tensor held before the load (`add_`): no reload can bring that back.
    accumulates: bool = False


class Application(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One key of a layer's contract, required `count` times. The key is (sources, layer, tensor, selectors)."""

    #: Canonical names, in the order in which they were joined; almost always one. None for a constant: a value that
    #: `load_weights` made itself, after the last source.
    sources: tuple[Name, ...]
    #: Name of the destination within the layer.
    tensor: Name
    selectors: dict[str, Selector] = {}
    count: Annotated[int, msgspec.Meta(ge=1, le=_MAX_INT)] = 1
    #: Written by `load_weights` itself, outside any weight loader. Each write is one application.
    direct: bool = False
    #: "storage": the sources are known from the tensors that the loader was given. "stream": only from what
    #: `load_weights` was consuming at the time.
    attribution: Literal["storage", "stream"] = "storage"
    writes: tuple[Write, ...] = ()

    def __post_init__(self) -> None:
        _put_defaults(self, count=1, attribution="storage", writes=())

    @property
    def computed(self) -> bool:
        """True if any write went through arithmetic, a cast or a copy."""
        return any(write.computed for write in self.writes)


class Coverage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Which elements of a tensor the contract does not write exactly once. Left out where every element is."""

    #: Elements that no application writes, and their boxes.
    gap_elements: Size = 0
    gaps: tuple[Box, ...] = ()
    #: Elements that more than one application writes, and their boxes.
    overlap_elements: Size = 0
    overlaps: tuple[Box, ...] = ()
    #: False if some write's destination is only an upper bound, so gaps may be larger than stated.
    exact: bool = True

    def __post_init__(self) -> None:
        _put_defaults(self, gap_elements=0, gaps=(), overlap_elements=0, overlaps=())


class TensorEntry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A parameter or buffer that a layer owns."""

    name: Name
    dtype: str
    shape: Shape
    #: In elements; None where contiguous.
    stride: Shape | None = None
    kind: Literal["parameter", "buffer"] = "parameter"
    #: False for a buffer that is not part of the state dict.
    persistent: bool = True
    #: Alias group: the full name of the first tensor (in model order) on the same storage. Every member carries it.
    alias: Name | None = None
    #: Offset in the storage, in elements of this tensor's dtype.
    storage_offset: Size = 0
    coverage: Coverage | None = None

    def __post_init__(self) -> None:
        _put_defaults(self, kind="parameter", storage_offset=0)


class Layer(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A module that directly owns tensors, in model order, and its contract."""

    #: Qualified module name; the empty string is the model itself.
    name: Name
    class_name: Name = msgspec.field(name="class")
    tensors: tuple[TensorEntry, ...] = ()
    #: In the order of first arrival.
    applications: tuple[Application, ...] = ()

    def __post_init__(self) -> None:
        _put_defaults(self, tensors=(), applications=())


class SourceEntry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A checkpoint tensor by its header."""

    name: Name
    dtype: str
    shape: Shape
    #: Index into `CheckpointIdentity.files`; None for a wire file.
    file: Size | None = None


class FileIdentity(msgspec.Struct, frozen=True, gc=False):
    """A checkpoint file, by its name within the checkpoint, its size in bytes and the SHA-256 of its header."""

    name: Name
    size: Size
    header_digest: Digest


class CheckpointIdentity(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What the manifest was built from, without paths."""

    #: SHA-256 over the sorted (name, dtype, shape) of all sources: equal for any sharding of the same tensors.
    digest: Digest
    sources: Size
    nbytes: Size
    #: "files" or "wire".
    kind: Literal["files", "wire"] = "files"
    #: The Hub's commit hash, where there is one.
    revision: str | None = None
    repo_id: str | None = None
    files: tuple[FileIdentity, ...] = ()

    def __post_init__(self) -> None:
        _put_defaults(self, kind="files", files=())


class EngineIdentity(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The engine whose loading code was run, and what it was told to load for."""

    name: Name
    version: str
    torch: str
    target: str = "cpu"
    #: The target's platform was emulated on another machine.
    emulated: bool = False
    #: Engine arguments that shape the contract.
    arguments: dict[str, Any] = {}

    def __post_init__(self) -> None:
        _put_defaults(self, target="cpu")


class ModelIdentity(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The model that was materialized."""

    class_name: Name = msgspec.field(name="class")
    architecture: str | None = None
    #: SHA-256 of config.json in canonical form.
    config_digest: str | None = None


class Summary(msgspec.Struct, frozen=True, gc=False):
    """The numbers of one rank, as `show --format json` prints them."""

    layers: Size
    #: Parameters and buffers.
    tensors: Size
    #: Distinct keys times count.
    applications: Size
    #: Loader calls that wrote nothing or returned False.
    declined: Size
    direct_writes: Size
    computed: Size
    #: Tensors with at least one gap (overlap). Tensors that no application writes at all are `unfed` instead.
    gaps: Size
    overlaps: Size
    unfed: Size
    sources_used: Size
    #: Bytes of the checkpoint that this rank reads: the union of all regions over every used source.
    bytes_read: Size


class ManifestDocument(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The manifest of one rank, as it stands in its file."""

    format: str
    version: str
    engine: EngineIdentity
    topology: Topology
    rank: Rank
    model: ModelIdentity
    checkpoint: CheckpointIdentity
    #: Sources that this rank uses, in the order of loading.
    sources: tuple[SourceEntry, ...]
    layers: tuple[Layer, ...]
    summary: Summary
    #: SHA-256 over the contracts alone: layer names, keys and counts.
    contract_digest: str = ""
    #: SHA-256 over the canonical form of everything else in the document.
    digest: str = ""


class RankEntry(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One rank's file in a bundle."""

    rank: Rank
    file: Name
    digest: Digest
    contract_digest: Digest
    summary: Summary


class BundleIndex(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The index of a bundle: what its ranks have in common, and the proof over all of them."""

    format: str
    version: str
    engine: EngineIdentity
    topology: Topology
    model: ModelIdentity
    checkpoint: CheckpointIdentity
    #: Every source of the checkpoint, in the order of loading.
    sources: tuple[SourceEntry, ...]
    #: Sources that no rank uses, by reason: "declined" (loaders were offered it and wrote nothing), "skipped"
    #: (`load_weights` took it and called no loader), "unread" (`load_weights` stopped before it).
    unused: dict[str, tuple[Name, ...]] = {}
    #: Parameters (`layer.tensor`) that no source writes, with the ranks where that is so.
    unfed: dict[Name, tuple[Size, ...]] = {}
    ranks: tuple[RankEntry, ...]
    digest: str = ""
