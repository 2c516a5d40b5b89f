"""Was the manifest made for what it is used for? Topology, engine, target, revision and configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from probe_cli.checkpoint import Checkpoint
from probe_cli.manifest.bundle import Bundle
from probe_cli.manifest.check_sources import Draft
from probe_cli.manifest.document import Manifest

__all__ = ["Expectations", "compare_identity", "mixed"]


class Expectations(msgspec.Struct, frozen=True):
    """What the user says the manifest should be for. What is left out is not compared."""

    #: Sizes by group name: tp, pp, ep, dp.
    topology: Mapping[str, int] = {}
    engine: str | None = None
    engine_version: str | None = None
    target: str | None = None


def compare_identity(origin: Bundle | Manifest, checkpoint: Checkpoint | None, expected: Expectations) -> list[Draft]:
    """Findings where the manifest's identity is not the one expected, or not that of the checkpoint at hand."""
    document = origin.index if isinstance(origin, Bundle) else origin.document
    drafts: list[Draft] = []

    def compare(code: str, subject: str, found: object, wanted: object) -> None:
        if wanted is not None and found != wanted:
            what = f"is {found} in the manifest, expected {wanted}"
            drafts.append(Draft(code, {"subject": subject, "what": what, "expected": wanted, "found": found}))

    for group, size in expected.topology.items():
        compare("PM301", group, getattr(document.topology, group), size)
    compare("PM303", "engine", document.engine.name, expected.engine)
    if expected.engine in (None, document.engine.name):
        compare("PM303", f"version of {document.engine.name}", document.engine.version, expected.engine_version)
    if expected.target not in (None, "auto"):
        compare("PM304", "target", document.engine.target, expected.target)
    if checkpoint is not None:
        built = document.checkpoint
        if checkpoint.revision and built.revision and checkpoint.repo_id == built.repo_id:
            compare("PM302", f"revision of {built.repo_id}", built.revision, checkpoint.revision)
        config, found = document.model.config_digest, checkpoint.config_digest
        if config and found and config != found:
            what = "differs from the one that the manifest was built with"
            drafts.append(Draft("PM305", {"subject": "config.json", "what": what, "expected": config, "found": found}))
    return drafts


def mixed(origins: Sequence[Bundle | Manifest]) -> list[Draft]:
    """Findings where manifests of single ranks, given together, are not of one build."""
    manifests = [origin for origin in origins if isinstance(origin, Manifest)]
    drafts: list[Draft] = []
    for name in ("engine", "model", "topology", "checkpoint"):
        values = [getattr(manifest.document, name) for manifest in manifests]
        for manifest, value in zip(manifests[1:], values[1:]):
            if value != values[0]:
                what = f"its {name} is not that of {manifests[0].rank}, given with it"
                drafts.append(
                    Draft("PM204", {"subject": str(manifest.rank), "what": what, "ranks": (manifest.rank.index,)})
                )
    return drafts
