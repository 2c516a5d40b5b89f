"""What an update did deliver: the receipt, as values and as JSON. `docs/reload.md` is the specification."""

from __future__ import annotations

import msgspec

__all__ = ["RECEIPT_FORMAT", "RECEIPT_VERSION", "Ballot", "Finding", "LayerReceipt", "Receipt"]

RECEIPT_FORMAT = "probe-manifest/receipt"
RECEIPT_VERSION = "1.0"


class Finding(msgspec.Struct, frozen=True):
    """One finding of the audit. Kinds: `moved` (another address), `freed` (gone), `respecified` (another dtype, shape
    or strides), `stale` (a Python number that its tensor has left behind), `settled` (post-processing made a fresh
    tensor; its values were copied into the storage that was live before), `refreshed` (a number made from a tensor,
    set again)."""

    kind: str
    layer: str
    #: Attribute path within the layer.
    path: str
    message: str

    @property
    def harmless(self) -> bool:
        """True for what was put right."""
        return self.kind in ("settled", "refreshed")

    def __str__(self) -> str:
        return f"{self.layer}.{self.path}: {self.kind}: {self.message}" if self.layer else f"{self.path}: {self.kind}"


class LayerReceipt(msgspec.Struct, frozen=True):
    """One layer that the update was to deliver, or that something arrived for."""

    name: str
    #: Applications that the contract requires in this scope, and that arrived (extras aside).
    expected: int
    observed: int
    #: Applied beyond the contract before the layer was published.
    extras: int
    #: Offered and not taken by the loader, or offered after publication.
    declined: int
    published: bool
    #: Bytes copied into live storage; 0 for layers loaded in place.
    nbytes: int
    #: Seconds for post-processing and publication.
    seconds: float


class Ballot(msgspec.Struct, frozen=True):
    """One rank's word on the update."""

    rank: int
    ok: bool
    digest: str
    update: int
    #: Why not, for a rank that is not ready.
    reason: str = ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One finished update. An update that failed has one too (`update.receipt` after the error), with `ok` false."""

    format: str = RECEIPT_FORMAT
    version: str = RECEIPT_VERSION
    ok: bool
    #: Counts the updates of the session, from 1.
    update: int
    manifest_digest: str
    contract_digest: str
    rank: int
    #: "full", or the scope in words.
    scope: str
    #: "layer" or "model".
    commit: str
    layers: tuple[LayerReceipt, ...]
    expected: int
    observed: int
    extras: int
    declined: int
    #: Applications that arrived for layers outside the scope; they were not applied.
    out_of_scope: int
    #: Sources that were delivered and that this rank's contract does not name.
    unknown_sources: tuple[str, ...]
    #: Keys that did not arrive as often as required, with how many are missing.
    missing: tuple[tuple[str, int], ...]
    sources: int
    bytes_received: int
    bytes_published: int
    seconds: float
    staging_budget: int
    staging_peak: int
    #: Times that a unit was staged in host memory for want of room, and the bytes that it took.
    spills: int
    spilled_bytes: int
    findings: tuple[Finding, ...]
    #: True if the hooks of the cold load are known, so that each was required again.
    hooks_required: bool
    ballots: tuple[Ballot, ...] = ()
    error: str = ""

    def to_json(self) -> bytes:
        """Indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def from_json(cls, text: bytes) -> Receipt:
        """The receipt in a JSON text. Raises msgspec.ValidationError (a ValueError) if it is none."""
        return msgspec.json.decode(text, type=cls)

    def line(self) -> str:
        """One line for a log."""
        return (
            f"update {self.update} rank {self.rank} {'ok' if self.ok else 'FAILED'}: {self.observed} of "
            f"{self.expected} applications, {sum(layer.published for layer in self.layers)} layers, "
            f"{self.bytes_published / 1e6:.1f} MB published in {self.seconds:.2f} s, staging peak "
            f"{self.staging_peak / 1e6:.1f} MB, {self.spills} spills, {self.extras} extras, {self.declined} declined, "
            f"{self.manifest_digest[:19]}"
        )
