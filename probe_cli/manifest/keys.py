"""Contract keys: what identifies an application, and the digest over a contract."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from probe_cli.manifest.canonical import canonical_bytes, digest
from probe_cli.manifest.schema import Application, Layer

__all__ = [
    "CONSTANT",
    "ContractKey",
    "application_key",
    "contract_digest",
    "contract_of",
    "describe_selectors",
    "layer_contract",
]


#: What stands for the sources of an application that has none, for people.
CONSTANT = "(a constant)"


class ContractKey(NamedTuple):
    """(sources, layer, tensor, selectors): equal keys are the same demand, however often it is made."""

    sources: tuple[str, ...]
    layer: str
    tensor: str
    #: Canonical JSON of the selectors; `{}` where there are none.
    selectors: str = "{}"

    @property
    def full_tensor(self) -> str:
        """The destination's name in the model."""
        return f"{self.layer}.{self.tensor}" if self.layer else self.tensor

    def __str__(self) -> str:
        text = f"{' + '.join(self.sources) or CONSTANT} -> {self.full_tensor}"
        chosen = describe_selectors(json.loads(self.selectors))
        return f"{text} [{chosen}]" if chosen else text


def describe_selectors(selectors: dict[str, Any]) -> str:
    """Selectors for people: `shard_id=w1, expert_id=3`."""
    return ", ".join(f"{name}={_plain(value)}" for name, value in selectors.items())


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value if value.isprintable() and not _reads_as_another(value) else canonical_bytes(value).decode()
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in ("enum", "dtype"):
        return str(next(iter(value.values())))
    return canonical_bytes(value).decode()


def _reads_as_another(text: str) -> bool:
    """Whether a text without quotes would be taken for another value: `3`, `null`, nothing at all."""
    try:
        json.loads(text)
    except ValueError:
        return not text or text != text.strip()
    return True


def application_key(layer: str, application: Application) -> ContractKey:
    """The key of an application of this layer."""
    selectors = application.selectors
    text = canonical_bytes(selectors).decode() if selectors else "{}"
    return ContractKey(application.sources, layer, application.tensor, text)


def layer_contract(layer: Layer) -> Counter[ContractKey]:
    """The multiset of keys that one layer requires."""
    contract: Counter[ContractKey] = Counter()
    for application in layer.applications:
        contract[application_key(layer.name, application)] += application.count
    return contract


def contract_of(layers: Iterable[Layer]) -> Counter[ContractKey]:
    """The multiset of keys that the layers require together."""
    contract: Counter[ContractKey] = Counter()
    for layer in layers:
        contract.update(layer_contract(layer))
    return contract


def contract_digest(layers: Iterable[Layer]) -> str:
    """SHA-256 over the layers' keys and counts alone: the same whatever the order of arrival, the regions, the shapes
    or the engine's version. Rows are [layer, tensor, sources, selectors as canonical JSON, count], sorted."""
    rows = [(key.layer, key.tensor, key.sources, key.selectors, count) for key, count in contract_of(layers).items()]
    return digest(sorted(rows))
