"""What `check` can find: codes with a stable number, a name, a default severity, a meaning and a remedy."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

__all__ = ["CODES", "Code", "Finding", "Severity", "codes_table", "find_code"]

Severity: TypeAlias = Literal["error", "warning", "off"]


class Code(msgspec.Struct, frozen=True):
    """A kind of finding. `trouble`: what was to be checked could not be read, so the command ends with exit code 2."""

    code: str
    name: str
    severity: Severity
    meaning: str
    remedy: str
    trouble: bool = False


_ALL = (
    Code(
        "PM101",
        "missing-source",
        "error",
        "A contract needs this source and the checkpoint lacks it. A serving process would wait for it until the "
        "update ends, and then fail.",
        "Send or export the tensor. If the checkpoint is right and the model changed, build the manifest again.",
    ),
    Code(
        "PM102",
        "changed-shape",
        "error",
        "The source is there, with another shape than the contract was built for: its regions would be cut in the "
        "wrong places.",
        "Export it in the shape that is named, or build the manifest again for this checkpoint.",
    ),
    Code(
        "PM103",
        "changed-dtype",
        "error",
        "The source is there, with another dtype than the contract was built for.",
        "Export it in the dtype that is named, or build the manifest again for this checkpoint.",
    ),
    Code(
        "PM104",
        "unknown-source",
        "warning",
        "The checkpoint has a source that was not there when the manifest was built. No rank consumes it.",
        "Leave it out of the checkpoint, or build the manifest again if the model should load it.",
    ),
    Code(
        "PM105",
        "unused-source",
        "warning",
        "No rank consumes this source. It was already so when the manifest was built; the reason is what the loading "
        "code did with it then.",
        "Leave it out of what is sent, or exempt it with a reason (a prediction layer that is served elsewhere, say).",
    ),
    Code(
        "PM106",
        "other-layout",
        "error",
        "The checkpoint holds these weights in another layout than the contract: joined where the contract wants them "
        "apart, or the other way round (fused experts, fused qkv).",
        "Build a manifest for the layout that is sent (`build --wire`), or export the layout that is named.",
    ),
    Code(
        "PM107",
        "moved-source",
        "warning",
        "The source is in another file than when the manifest was built. The contract holds; what was planned per file "
        "does not.",
        "Build the manifest again if something reads the checkpoint by its recorded files.",
    ),
    Code(
        "PM108",
        "other-files",
        "warning",
        "The same sources are cut into other files than when the manifest was built.",
        "Build the manifest again if something reads the checkpoint by its recorded files.",
    ),
    Code(
        "PM109",
        "broken-checkpoint",
        "error",
        "The checkpoint cannot be read: a file is missing, truncated or malformed, lacks what the index promises, or a "
        "tensor is there twice.",
        "Fetch or export the file that is named again.",
        trouble=True,
    ),
    Code(
        "PM201",
        "missing-rank",
        "error",
        "The bundle does not hold every rank of its topology, so what the missing ranks need is unknown.",
        "Build the other ranks too, or set this code to warning where a part is meant.",
    ),
    Code(
        "PM202",
        "broken-manifest",
        "error",
        "A manifest cannot be read: truncated, edited, swapped with another rank's or another build's, of a newer "
        "major version, or malformed; or it holds no application, so that anything would fulfil it.",
        "Build the bundle again, or fetch it again.",
        trouble=True,
    ),
    Code(
        "PM203",
        "unfed-parameter",
        "warning",
        "No source writes this parameter on the ranks that are named: it keeps whatever the model's constructor left "
        "in it.",
        "Check that the checkpoint is complete for this model; exempt the parameter if it is derived after loading.",
    ),
    Code(
        "PM204",
        "mixed-manifests",
        "error",
        "Manifests of single ranks that were given together do not belong together: they are of different engines, "
        "models, topologies or checkpoints. Bundles may differ: each is checked by itself.",
        "Check the ranks of each build on their own, or give their bundles.",
    ),
    Code(
        "PM301",
        "other-topology",
        "error",
        "The manifest was made for another topology than the one asked for.",
        "Build the manifest for the topology that serves.",
    ),
    Code(
        "PM302",
        "other-revision",
        "warning",
        "The manifest was built from another revision of the checkpoint's repository. Sources are compared all the "
        "same.",
        "Build the manifest again for this revision to silence this.",
    ),
    Code(
        "PM303",
        "other-engine",
        "error",
        "The manifest was made by another engine than the one asked for, or by another version of it.",
        "Build the manifest with the engine that serves, or use --reprobe to see whether the contracts differ.",
    ),
    Code(
        "PM304",
        "other-target",
        "error",
        "The manifest was made for another target than the one asked for: engines choose other layouts there.",
        "Build the manifest with the target that serves.",
    ),
    Code(
        "PM305",
        "other-config",
        "warning",
        "The checkpoint's config.json is not the one that the manifest was built with. Routing may follow it.",
        "Build the manifest again, or use --reprobe to see whether the contracts differ.",
    ),
    Code(
        "PM401",
        "contract-changed",
        "error",
        "Built again with the installed engine, the contract is another: a serving process with the old manifest would "
        "fail, or load wrongly.",
        "Roll out the new manifest together with the engine. `probe-manifest diff` shows the details.",
    ),
    Code(
        "PM402",
        "details-changed",
        "warning",
        "Built again with the installed engine, the contract holds but something beside it changed.",
        "Build the manifest again when convenient. `probe-manifest diff` shows the details.",
    ),
)

#: Every code, in order.
CODES: dict[str, Code] = {code.code: code for code in _ALL}
_BY_NAME = {code.name: code for code in _ALL}


class Finding(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One thing that is not as it should be. `subject` is what it is about: a source, parameter, file or field."""

    code: str
    severity: Severity
    subject: str
    #: What is wrong with the subject, without its name: like findings have the same.
    what: str
    #: Ranks that it touches, ascending; empty where it is not about ranks.
    ranks: tuple[int, ...] = ()
    #: Layers whose contract it touches.
    layers: tuple[str, ...] = ()
    expected: Any = None
    found: Any = None
    #: A near miss: what is there instead, and what that probably means.
    explanation: str | None = None
    #: The file that it is about.
    file: str | None = None
    hint: str | None = None

    @property
    def name(self) -> str:
        return CODES[self.code].name

    @property
    def message(self) -> str:
        """`subject: what`, and the explanation where there is one."""
        text = f"{self.subject}: {self.what}" if self.subject else self.what
        return f"{text} ({self.explanation})" if self.explanation else text


def find_code(text: str) -> Code | None:
    """The code of this number or name."""
    return CODES.get(text.upper()) or _BY_NAME.get(text.lower())


def codes_table() -> str:
    """The codes as docs/findings.md lists them."""
    lines: list[str] = []
    for code in _ALL:
        ends = "; exit code 2" if code.trouble else ""
        lines += [f"### {code.code} {code.name}", "", f"*{code.severity}{ends}*. {code.meaning}", "", code.remedy, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(codes_table())
