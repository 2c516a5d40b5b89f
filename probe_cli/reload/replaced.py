"""What became of a model's modules and tensors after the load. An engine that drafts with a second model gives it the first one's
embeddings and output layer (vLLM 0.32 and 0.33, `v1/spec_decode/llm_base_proposer.py`): the draft's loading code then finds the
other model's live tensors under its own names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from probe_cli.reload.layout import LayerLayout, LoadedLayout, Place

__all__ = ["Replaced", "Replacements", "find_replaced", "is_hollow", "let_go", "originals_in_place", "registered_names"]


@dataclass(eq=False)
class Replaced:
    """A layer that does not stand where it stood at the load, or not everywhere."""

    layer: LayerLayout
    #: The model does not have it at all any more.
    gone: bool
    #: Where its place was lost: its own, or that of a module that it was in.
    places: list[Place] = field(default_factory=list)

    def is_part_of(self, modules: Collection[nn.Module]) -> bool:
        """Whether all that stands there now belongs to these modules."""
        return all(place.occupant in modules for place in self.places)

    def covers(self, other: Replaced) -> bool:
        """Whether this, noted earlier, says all that the other says."""
        return (self.gone or not other.gone) and set(self.places) >= set(other.places)


@dataclass(eq=False)
class Replacements:
    """What no longer stands where it stood at the load."""

    layers: dict[str, Replaced] = field(default_factory=dict)
    #: Places whose module is inside what stands there now: LoRA, `torch.compile`.
    wrapped: list[Place] = field(default_factory=list)


def find_replaced(layout: LoadedLayout) -> Replacements:
    """What was replaced or wrapped since the load."""
    found = Replacements()
    lost = [place for place in layout.places if place.occupant is not place.module]
    if not lost:
        return found
    present = set(layout.model.modules())
    children: dict[nn.Module, list[nn.Module]] = {}
    for holder, _, child in layout.places:
        children.setdefault(holder, []).append(child)
    for place in lost:
        occupant = place.occupant
        inside = set(occupant.modules()) if occupant is not None else set()
        if place.module in inside:
            found.wrapped.append(place)
            continue
        for module in _below(place.module, children):
            layer = layout.layers.get(layout.names_of_modules[module])
            if layer is not None and layer.tensors and module not in inside:
                found.layers.setdefault(layer.name, Replaced(layer, module not in present)).places.append(place)
    return found


def _below(module: nn.Module, children: dict[nn.Module, list[nn.Module]]) -> list[nn.Module]:
    """A module and all that were in it at the load."""
    found = {module: None}
    waiting = [module]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


@contextmanager
def originals_in_place(places: Iterable[Place]) -> Iterator[None]:
    """The modules of the load where they were, for loading code to find; what stands there now again afterwards."""
    put: list[tuple[Place, bool, nn.Module | None]] = []
    try:
        for place in places:
            modules = place.holder._modules
            if place.occupant is not place.module:
                put.append((place, place.name in modules, place.occupant))
                modules[place.name] = place.module
        yield
    finally:
        for place, registered, occupant in reversed(put):
            if registered:
                place.holder._modules[place.name] = occupant
            else:
                place.holder._modules.pop(place.name, None)


def let_go(module: nn.Module) -> None:
    """Drop the tensors of a module; it keeps their names."""
    for registered in (module._parameters, module._buffers):
        registered.update(dict.fromkeys(registered))
    module.__dict__[_LET_GO] = True


def is_hollow(module: nn.Module) -> bool:
    """Whether a module's tensors were dropped and nobody has given it others since."""
    return _LET_GO in module.__dict__ and not registered_names(module)


def registered_names(module: nn.Module) -> frozenset[str]:
    """Names under which a module has tensors."""
    return frozenset(
        name
        for registered in (module._parameters, module._buffers)
        for name, tensor in registered.items()
        if tensor is not None
    )


_LET_GO = "_probe_manifest_let_go"
