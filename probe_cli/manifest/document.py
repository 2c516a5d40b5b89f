"""`Manifest`: the document of one rank, read, verified, built and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import msgspec

from probe_cli.errors import ManifestError, UsageError
from probe_cli.manifest.canonical import check_json, digest
from probe_cli.manifest.decode import decode_document, normalized, sniff, verify_digest
from probe_cli.manifest.files import compress, is_manifest_name, read_text, write_bytes
from probe_cli.manifest.keys import ContractKey, contract_digest, contract_of
from probe_cli.manifest.schema import (
    BUNDLE_FORMAT,
    MANIFEST_FORMAT,
    SCHEMA_VERSION,
    CheckpointIdentity,
    EngineIdentity,
    Layer,
    ManifestDocument,
    ModelIdentity,
    SourceEntry,
    Summary,
)
from probe_cli.manifest.text import render
from probe_cli.manifest.validate import validate_manifest
from probe_cli.topology import Rank, Topology

__all__ = ["Manifest"]


class Manifest:
    """The manifest of one rank. Immutable; equal if the documents' digests are.

    Get one from `build`, `read` or `from_bytes`; all three leave it verified.
    """

    def __init__(self, document: ManifestDocument, text: bytes | None = None) -> None:
        self.document = document
        #: The file text. Kept when the manifest was read, since it may hold fields that a newer release added.
        self._text = text

    @classmethod
    def build(
        cls,
        *,
        engine: EngineIdentity,
        topology: Topology,
        rank: Rank,
        model: ModelIdentity,
        checkpoint: CheckpointIdentity,
        sources: Iterable[SourceEntry],
        layers: Iterable[Layer],
        summary: Summary,
    ) -> Manifest:
        """A manifest of these parts, with its digests. Raises ManifestError if the parts contradict each other."""
        document = ManifestDocument(
            format=MANIFEST_FORMAT,
            version=SCHEMA_VERSION,
            engine=engine,
            topology=topology,
            rank=rank,
            model=model,
            checkpoint=checkpoint,
            sources=tuple(sources),
            layers=tuple(layers),
            summary=summary,
        )
        check_json(engine.arguments, "engine.arguments")
        for layer in document.layers:
            for application in layer.applications:
                if application.selectors:
                    check_json(application.selectors, f"layer {layer.name!r}, tensor {application.tensor!r}: selectors")
        document = msgspec.structs.replace(document, contract_digest=contract_digest(document.layers))
        document = msgspec.structs.replace(document, digest=digest(document))
        validate_manifest(document, f"rank {rank.index}")
        return cls(document)

    @classmethod
    def from_bytes(cls, text: bytes, where: str = "manifest") -> Manifest:
        """A manifest from the JSON text of its file. Raises ManifestError if it is malformed, of a newer major
        version, or not what its digest says."""
        if sniff(text, where) == BUNDLE_FORMAT:
            raise ManifestError(f"{where}: this is the index of a bundle, expected the manifest of one rank")
        document = decode_document(text, ManifestDocument, where)
        verify_digest(text, document.digest, where)
        validate_manifest(document, where)
        return cls(document, text)

    @classmethod
    def read(cls, path: str | Path, rank: int | None = None) -> Manifest:
        """The manifest in a rank's file, or that of `rank` in a bundle (its directory or its index file).

        `rank` may be left out where there is only one. Raises ManifestError, and UsageError if the rank is not there.
        """
        from probe_cli.manifest.bundle import Bundle

        path = Path(path)
        if path.is_dir():
            return Bundle.read(path).manifest(rank)
        text = read_text(path)
        if sniff(text, str(path)) == BUNDLE_FORMAT:
            return Bundle.read(path).manifest(rank)
        manifest = cls.from_bytes(text, str(path))
        if rank is not None and manifest.rank.index != rank:
            raise UsageError(f"{path}: this is the manifest of rank {manifest.rank.index}, not of rank {rank}")
        return manifest

    def to_bytes(self) -> bytes:
        """The JSON text of the file: the same for the same manifest, always."""
        if self._text is None:
            return render(msgspec.to_builtins(self.document))
        return normalized(self._text, "manifest")

    @property
    def text(self) -> bytes:
        """The JSON text as it was read; that of `to_bytes` if it was not read."""
        return self.to_bytes() if self._text is None else self._text

    def write(self, path: str | Path) -> Path:
        """Write the file atomically; packed if the name ends in `.json.gz`, plain if in `.json`. Returns the path."""
        path = Path(path)
        if not is_manifest_name(path.name):
            raise UsageError(f"{path}: a manifest's name ends in .json or .json.gz")
        text = self.to_bytes()
        write_bytes(path, compress(text) if path.name.endswith(".gz") else text)
        return path

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.document.layers

    @property
    def sources(self) -> tuple[SourceEntry, ...]:
        return self.document.sources

    @property
    def rank(self) -> Rank:
        return self.document.rank

    @property
    def topology(self) -> Topology:
        return self.document.topology

    @property
    def engine(self) -> EngineIdentity:
        return self.document.engine

    @property
    def digest(self) -> str:
        return self.document.digest

    @property
    def contract_digest(self) -> str:
        return self.document.contract_digest

    @property
    def summary(self) -> Summary:
        return self.document.summary

    def layer(self, name: str) -> Layer:
        """The layer of this name. Raises KeyError."""
        return self._by_name[name]

    def keys(self) -> Counter[ContractKey]:
        """The multiset of keys that all layers require together."""
        return contract_of(self.layers)

    @cached_property
    def _by_name(self) -> dict[str, Layer]:
        return {layer.name: layer for layer in self.layers}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Manifest {self.rank}, {len(self.layers)} layers, {self.digest[:19]}>"
