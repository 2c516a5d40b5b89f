"""`check`: does a checkpoint, or the list of what a trainer will send, fulfil the contracts of every rank?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from probe_cli.checkpoint import Checkpoint
from probe_cli.checkpoint.types import sources_digest
from probe_cli.errors import CheckpointError, ManifestError, UsageError
from probe_cli.manifest.bundle import Bundle
from probe_cli.manifest.check_config import CheckConfig
from probe_cli.manifest.check_identity import Expectations, compare_identity, mixed
from probe_cli.manifest.check_sources import Draft, compare_sources
from probe_cli.manifest.decode import sniff
from probe_cli.manifest.document import Manifest
from probe_cli.manifest.files import read_text
from probe_cli.manifest.findings import CODES, Finding
from probe_cli.manifest.proof import unfed_parameters
from probe_cli.manifest.read import read_any

__all__ = ["CheckReport", "CheckedManifest", "check", "is_manifest_path"]

Reprobe = Callable[[Bundle | Manifest, Checkpoint], Iterable[Draft]]


class CheckedManifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A bundle or manifest that was looked at. Digest and the rest are empty if it could not be read."""

    path: str
    digest: str = ""
    engine: str = ""
    topology: str = ""
    ranks: tuple[int, ...] = ()
    sources: int = 0
    findings: tuple[Finding, ...] = ()


class CheckReport(msgspec.Struct, frozen=True):
    """What a check found, manifest by manifest. Findings that are off or exempt are counted, not listed."""

    manifests: tuple[CheckedManifest, ...]
    #: What was checked against: a path, a repository, a wire file; None if nothing was.
    checkpoint: str | None = None
    checkpoint_digest: str | None = None
    checkpoint_sources: int = 0
    #: Findings about the checkpoint as such, or about the manifests together.
    findings: tuple[Finding, ...] = ()
    suppressed: int = 0
    #: Findings, shown or not, that something could not be read: what was not checked is never fine.
    unread: int = 0

    def all_findings(self) -> tuple[Finding, ...]:
        return (*self.findings, *(finding for manifest in self.manifests for finding in manifest.findings))

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.all_findings())

    @property
    def exit_code(self) -> int:
        """0 without errors, 1 with errors, 2 if something could not be read."""
        return 2 if self.unread else 1 if self.count("error") else 0


def is_manifest_path(path: str) -> bool:
    """Whether a path is a bundle or a manifest, and not a checkpoint. Looks at the file, not at its name alone."""
    where = Path(path)
    if where.is_dir():
        return any((where / name).is_file() for name in ("bundle.json.gz", "bundle.json"))
    if not where.is_file() or path.endswith((".safetensors", ".safetensors.index.json")):
        return False
    try:
        sniff(read_text(where), path)
    except ManifestError:
        # Damaged, or of a newer version: still a manifest by its name.
        return path.endswith((".json", ".json.gz"))
    return True


def check(
    manifests: Sequence[str | Path | Bundle | Manifest],
    checkpoint: Checkpoint | Callable[[], Checkpoint] | None = None,
    *,
    checkpoint_name: str | None = None,
    config: CheckConfig | None = None,
    expectations: Expectations | None = None,
    reprobe: Reprobe | None = None,
) -> CheckReport:
    """Check manifests by themselves and, if one is given, against a checkpoint.

    A checkpoint may be given as a function that opens it, so that one that cannot be opened becomes a finding. Raises
    UsageError if there is no manifest to check.
    """
    if not manifests:
        raise UsageError("no manifest to check")
    collector = _Collector(config or CheckConfig())
    opened, trouble = _open_checkpoint(checkpoint)
    general: list[Finding] = []
    if trouble is not None:
        collector.into(general, [trouble])
    checked: list[CheckedManifest] = []
    origins: list[Bundle | Manifest] = []
    for given in manifests:
        found: list[Finding] = []
        try:
            origin = given if isinstance(given, (Bundle, Manifest)) else read_any(given)
        except ManifestError as error:
            collector.into(found, [_broken(error, str(given))])
            checked.append(CheckedManifest(path=str(given), findings=tuple(found)))
            continue
        origins.append(origin)
        collector.into(found, _itself(origin))
        collector.into(found, compare_identity(origin, opened, expectations or Expectations()))
        if opened is not None:
            collector.into(found, compare_sources(origin, opened))
            if reprobe is not None:
                collector.into(found, reprobe(origin, opened))
        checked.append(_checked(given, origin, found))
    collector.into(general, mixed(origins))
    return CheckReport(
        manifests=tuple(checked),
        checkpoint=checkpoint_name,
        checkpoint_digest=None if opened is None else opened.digest,
        checkpoint_sources=0 if opened is None else len(opened.sources),
        findings=tuple(general),
        suppressed=collector.suppressed,
        unread=collector.unread,
    )


class _Collector:
    def __init__(self, config: CheckConfig) -> None:
        self.config = config
        self.suppressed = 0
        self.unread = 0

    def into(self, findings: list[Finding], drafts: Iterable[Draft]) -> None:
        severity_of = self.config.severity
        for draft in drafts:
            severity = severity_of(draft.code, draft.fields["subject"])
            self.unread += CODES[draft.code].trouble
            if severity == "off":
                self.suppressed += 1
            else:
                findings.append(Finding(code=draft.code, severity=severity, **draft.fields))


def _open_checkpoint(given: Checkpoint | Callable[[], Checkpoint] | None) -> tuple[Checkpoint | None, Draft | None]:
    if given is None or isinstance(given, Checkpoint):
        return given, None
    try:
        checkpoint = given()
        if not checkpoint.sources:
            raise CheckpointError("the checkpoint holds no tensor, so there is nothing to check")
    except CheckpointError as error:
        return None, Draft("PM109", {"subject": "", "what": str(error), "hint": error.hint})
    return checkpoint, None


def _broken(error: ManifestError, file: str) -> Draft:
    return Draft("PM202", {"subject": "", "what": str(error), "file": file, "hint": error.hint})


def _itself(origin: Bundle | Manifest) -> list[Draft]:
    """Findings about a bundle that need nothing but the bundle."""
    drafts: list[Draft] = []
    if isinstance(origin, Manifest):
        unfed = unfed_parameters([origin])
        applications = origin.document.summary.applications
    else:
        applications = sum(entry.summary.applications for entry in origin.index.ranks)
        unfed = origin.index.unfed
        if sources_digest(origin.index.sources) != origin.index.checkpoint.digest:
            what = "checkpoint.digest is not that of the sources that are listed"
            drafts.append(Draft("PM202", {"subject": "", "what": what, "hint": "build the bundle again"}))
        for rank in origin.ranks:
            try:
                origin.rank_text(rank)
            except ManifestError as error:
                file = str((origin.path or Path()) / f"rank-{rank:05d}.json.gz")
                drafts.append(_broken(error, file))
                drafts[-1].fields["ranks"] = (rank,)
        for index in sorted(set(range(origin.index.topology.world_size)) - set(origin.ranks)):
            what = f"not in the bundle, whose topology is {origin.index.topology}"
            drafts.append(Draft("PM201", {"subject": f"rank {index}", "what": what, "ranks": (index,)}))
    if not applications:
        what = "no rank in it loads anything: there is nothing to check"
        drafts.append(Draft("PM202", {"subject": "", "what": what}))
    for name, ranks in unfed.items():
        drafts.append(Draft("PM203", {"subject": name, "what": "no source writes it", "ranks": tuple(ranks)}))
    return drafts


def _checked(given: Any, origin: Bundle | Manifest, findings: list[Finding]) -> CheckedManifest:
    document = origin.index if isinstance(origin, Bundle) else origin.document
    path = str(given) if isinstance(given, (str, Path)) else str(getattr(origin, "path", None) or "manifest")
    return CheckedManifest(
        path=path,
        digest=document.digest,
        engine=f"{document.engine.name} {document.engine.version}",
        topology=str(document.topology),
        ranks=origin.ranks if isinstance(origin, Bundle) else (origin.rank.index,),
        sources=len(document.sources),
        findings=tuple(findings),
    )
