"""Built again with the installed engine, is the contract still the same? The comparison; building is the probe's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from probe_cli.manifest.bundle import Bundle
from probe_cli.manifest.check_sources import Draft
from probe_cli.manifest.diff import diff
from probe_cli.manifest.diff_rules import ChangeClass
from probe_cli.manifest.document import Manifest
from probe_cli.manifest.fold_changes import change_detail
from probe_cli.manifest.schema import EngineIdentity

__all__ = ["EngineSpec", "compare_rebuilt", "engine_spec"]

_CODES: dict[ChangeClass, str] = {"breaking": "PM401", "compatible": "PM402"}


def compare_rebuilt(origin: Bundle | Manifest, rebuilt: Bundle) -> Iterator[Draft]:
    """A draft for every change that is not cosmetic. Identity is left out: `check` compares it where it was asked
    to."""
    merged: dict[tuple[str, str, str], Draft] = {}
    for change in diff(origin, rebuilt).changes:
        code = _CODES.get(change.change_class)
        if code is None or change.echo or change.section == "identity":
            continue
        detail = change_detail(change)
        what = change.kind.replace("-", " ") + (f": {detail}" if detail else "")
        draft = merged.setdefault(
            (code, change.subject, what),
            Draft(
                code, {"subject": change.subject, "what": what, "ranks": (), "layers": (), "explanation": change.reason}
            ),
        )
        if change.rank is not None:
            draft.fields["ranks"] = tuple(sorted({*draft.fields["ranks"], change.rank}))
        if change.layer is not None:
            draft.fields["layers"] = (change.layer,)
    yield from merged.values()


class EngineSpec(NamedTuple):
    """What `--engine`, `--arg` and `--role` were, as far as the manifest records it."""

    engine: str
    arguments: dict[str, object]
    role: str = "main"


def engine_spec(identity: EngineIdentity) -> EngineSpec:
    """How to ask for the engine that a manifest was built with."""
    arguments = dict(identity.arguments)
    if identity.name == "python":
        # Whatever its author's own code takes, a role too, is an argument.
        factory = arguments.pop("factory", None)
        return EngineSpec("python" if factory is None else f"python:{factory}", arguments)
    return EngineSpec(identity.name, arguments, str(arguments.pop("role", "main")))
