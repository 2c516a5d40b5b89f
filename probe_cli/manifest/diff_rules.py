"""The kinds of change between two manifests, what each means for a process that serves with the old one, and why."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import msgspec

__all__ = ["CLASSES", "KINDS", "SECTIONS", "ChangeClass", "Kind", "Section", "kinds_table"]

#: breaking: a serving process with the old manifest would fail or load wrongly. compatible: an old sender still fulfils
#: the contract. cosmetic: nothing that takes part in loading.
ChangeClass: TypeAlias = Literal["breaking", "compatible", "cosmetic"]
Section: TypeAlias = Literal["layers", "sources", "selectors", "regions", "coverage", "identity"]

CLASSES: tuple[ChangeClass, ...] = get_args(ChangeClass)
SECTIONS: tuple[Section, ...] = get_args(Section)


class Kind(msgspec.Struct, frozen=True):
    """A kind of change."""

    name: str
    section: Section
    change_class: ChangeClass
    reason: str


_ALL = (
    Kind("layer-added", "layers", "breaking", "an old sender's update would not be judged complete for it"),
    Kind("layer-removed", "layers", "breaking", "the old contract waits for a layer that is not there"),
    Kind("layer-renamed", "layers", "breaking", "the old contract names a layer that is not there"),
    Kind("empty-layer-added", "layers", "compatible", "it has no contract: nothing is sent for it"),
    Kind("empty-layer-removed", "layers", "compatible", "it had no contract: nothing was sent for it"),
    Kind("empty-layer-renamed", "layers", "compatible", "it has no contract: nothing is sent for it"),
    Kind("layer-class-changed", "layers", "compatible", "the contract says what is loaded, whatever class loads it"),
    Kind("layer-order-changed", "layers", "cosmetic", "layers are found by name"),
    Kind("tensor-added", "layers", "compatible", "what is written to it is listed as applications"),
    Kind("tensor-removed", "layers", "breaking", "the old manifest describes a tensor that is not there"),
    Kind("tensor-changed", "layers", "breaking", "regions of the old manifest fall on other elements"),
    Kind("tensor-persistence-changed", "layers", "cosmetic", "it decides what is saved, not what is loaded"),
    Kind("tensor-order-changed", "layers", "cosmetic", "tensors are found by name"),
    Kind("alias-changed", "layers", "breaking", "writing one tensor no longer means writing the same others"),
    Kind(
        "application-added",
        "layers",
        "breaking",
        "the old contract is fulfilled without it, and the layer published too early",
    ),
    Kind("application-removed", "layers", "breaking", "the old contract waits for it"),
    Kind("application-renamed", "layers", "breaking", "the old contract waits for a source of another name"),
    Kind("application-order-changed", "layers", "cosmetic", "contracts are multisets"),
    Kind("count-changed", "layers", "breaking", "the old contract expects it another number of times"),
    Kind(
        "application-kind-changed",
        "layers",
        "breaking",
        "a direct write is not seen as a loader's call, nor the other way round",
    ),
    Kind("attribution-changed", "layers", "cosmetic", "it says how the source was found, not what is loaded"),
    Kind("selectors-changed", "selectors", "breaking", "selectors are part of the key: the old one never arrives"),
    Kind("regions-changed", "regions", "breaking", "a plan made from the old regions reads or writes other elements"),
    Kind(
        "region-notes-changed", "regions", "compatible", "the elements are the same; how exactly they are known is not"
    ),
    Kind(
        "coverage-changed",
        "coverage",
        "compatible",
        "elements outside the contract keep the first load's values; which these are changed",
    ),
    Kind("unfed-changed", "coverage", "compatible", "a parameter that no source writes is in no contract"),
    Kind("needed-source-added", "sources", "breaking", "an old sender does not send it"),
    Kind("source-added", "sources", "compatible", "no rank consumes it"),
    Kind("source-removed", "sources", "breaking", "the old contract waits for it"),
    Kind("unused-source-removed", "sources", "compatible", "no rank consumed it"),
    Kind("source-renamed", "sources", "breaking", "the old contract waits for the old name"),
    Kind("unused-source-renamed", "sources", "compatible", "no rank consumes it"),
    Kind("source-changed", "sources", "breaking", "regions of the old manifest cut it in the wrong places"),
    Kind("unused-source-changed", "sources", "compatible", "no rank consumes it"),
    Kind("source-moved", "sources", "cosmetic", "contracts know names, not files"),
    Kind("source-order-changed", "sources", "compatible", "contracts do not depend on the order of arrival"),
    Kind("source-now-used", "sources", "breaking", "the old contract does not wait for it"),
    Kind("source-now-unused", "sources", "breaking", "the old contract waits for it, and a rank no longer takes it"),
    Kind("unused-reason-changed", "sources", "cosmetic", "no rank consumes it, before and after"),
    Kind("engine-changed", "identity", "breaking", "another engine routes by other code"),
    Kind("engine-version-changed", "identity", "compatible", "what it changed in the contracts is listed by itself"),
    Kind(
        "engine-arguments-changed",
        "identity",
        "compatible",
        "what they changed in the contracts is listed by themselves",
    ),
    Kind("torch-changed", "identity", "cosmetic", "it records no weights"),
    Kind("target-changed", "identity", "breaking", "engines lay weights out by target"),
    Kind("emulation-changed", "identity", "cosmetic", "it says where the manifest was built"),
    Kind("topology-changed", "identity", "breaking", "ranks hold other parts of the weights"),
    Kind("rank-changed", "identity", "breaking", "this rank has another place in its groups"),
    Kind("rank-added", "identity", "compatible", "the ranks that there were are as they were"),
    Kind("rank-removed", "identity", "breaking", "a rank of the old bundle has no manifest any more"),
    Kind("model-changed", "identity", "breaking", "another model has other layers behind the same names"),
    Kind("config-changed", "identity", "compatible", "what it changed in the contracts is listed by itself"),
    Kind("revision-changed", "identity", "cosmetic", "sources are compared by their headers"),
    Kind("checkpoint-changed", "identity", "cosmetic", "what changed in it is listed as sources"),
    Kind(
        "checkpoint-kind-changed",
        "identity",
        "compatible",
        "names are listed from files, or as a trainer will send them",
    ),
    Kind("format-changed", "identity", "cosmetic", "the same content, written by another release"),
    Kind("summary-changed", "identity", "cosmetic", "numbers that follow from the rest"),
    Kind("field-changed", "identity", "cosmetic", "a field that this release does not know"),
    Kind("layer-field-changed", "layers", "cosmetic", "a field that this release does not know"),
    Kind("tensor-field-changed", "layers", "cosmetic", "a field that this release does not know"),
    Kind("application-field-changed", "layers", "cosmetic", "a field that this release does not know"),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


def kinds_table() -> str:
    """The table of docs/diff.md: kind, what `--only` calls it, class, reason."""
    rows = [f"| `{k.name}` | {k.section} | {k.change_class} | {k.reason} |" for k in _ALL]
    return "\n".join(["| kind | section | class | reason |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    print(kinds_table())
