"""Whether a model still is as it was when its weights were loaded: what loading code would find, and what an update would reach."""

from __future__ import annotations

from collections.abc import Iterable

from probe_cli.errors import ReloadError
from probe_cli.reload.cold import ColdLoad, fed_tensors
from probe_cli.reload.contract import Contract
from probe_cli.reload.layout import Place
from probe_cli.reload.replaced import Replaced, Replacements, find_replaced, is_hollow, let_go, registered_names
from probe_cli.reload.text import some

__all__ = ["Structure"]


class Structure:
    """The modules and tensors that a session was bound to, and which of them were ceded since."""

    def __init__(self, cold: ColdLoad, contract: Contract) -> None:
        self._cold = cold
        self._fed = fed_tensors(contract)
        #: Layers that some application writes to.
        self._needed = {full_name.rpartition(".")[0] for full_name in self._fed} & cold.layout.layers.keys()
        #: Tensors that serving needs, of layers that were processed: layer -> names.
        self._processed = {
            layer.name: registered_names(layer.module)
            for layer in cold.layout.layers.values()
            if cold.hooks is not None and cold.hooks_of.has_hook(layer.name, layer.module)
        }
        #: Layers that gave a place to another model's, and which.
        self.ceded: dict[str, Replaced] = {}

    def cede(self, layers: Iterable[str]) -> None:
        """These layers' places are another model's. Raises ReloadError if a layer is not there, or was not replaced."""
        replaced = find_replaced(self._cold.layout).layers
        names = list(layers)
        for name in names:
            if name not in replaced:
                known = (
                    "its module is still the model's" if name in self._cold.layout.layers else "there is no such layer"
                )
                raise ReloadError(f"layer {name or '(model)'} cannot be ceded: {known}")
        for name in names:
            self.ceded[name] = replaced[name]
            if replaced[name].gone:
                let_go(replaced[name].layer.module)

    def is_gone(self, layer: str) -> bool:
        """Whether a layer was ceded and is nowhere in the model: nothing is written for it."""
        entry = self.ceded.get(layer)
        return entry is not None and entry.gone

    def originals(self) -> list[Place]:
        """Where loading code is to find the modules of the cold load again. Raises ReloadError as `require_modules`."""
        return self.require_modules().wrapped + [place for entry in self.ceded.values() for place in entry.places]

    def require_modules(self) -> Replacements:
        """What has been replaced since the cold load. Raises ReloadError if loading code would find a module there that is not
        for it."""
        replaced = find_replaced(self._cold.layout)
        gone = sorted(
            name
            for name, entry in replaced.layers.items()
            if name in self._needed and not (name in self.ceded and self.ceded[name].covers(entry))
        )
        if gone:
            raise ReloadError(
                f"modules were replaced since the contract was bound: {some(gone, 4)}; loading code would write to what stands "
                "there now",
                hint="make a new session, or session.cede([...]) the layers if those are another model's",
            )
        return replaced

    def require(self) -> None:
        """Raise ReloadError unless the model's modules and tensors are where loading code found them at the cold load."""
        layout = self._cold.layout
        replaced = self.require_modules().layers
        hollow = sorted(
            name
            for name in self._needed
            if not self.is_gone(name) or name not in replaced
            if is_hollow(layout.layers[name].module)
        )
        if hollow:
            raise ReloadError(
                f"{some(hollow, 4)} {'is' if len(hollow) == 1 else 'are'} the model's again, but let go of all tensors when ceded",
                hint="put the other model's module back in place, or load this model anew and make a new session",
            )
        lost = sorted(
            f"{name}.{local}" if name else local
            for name in self._needed
            if not self.is_gone(name)
            for local in self._serving_names(name) - registered_names(layout.layers[name].module)
        )
        if lost:
            raise ReloadError(
                f"tensors are no longer registered since the contract was bound: {some(lost, 4)} (parametrized, pruned or deleted); "
                "an update would not reach what the model computes with",
                hint="undo that, or build the manifest for the model as it is now and make a new session",
            )

    def _serving_names(self, layer: str) -> frozenset[str]:
        """The tensors that an update of a layer is for: as processed, or else as loaded."""
        found = self._processed.get(layer)
        if found is not None:
            return found
        entry = self._cold.layout.layers[layer]
        if self._cold.hooks_of.has_hook(layer, entry.module):
            return frozenset()  # processed at a time that nobody told: its tensors are what they are
        return frozenset(name for name in entry.tensors if f"{layer}.{name}".lstrip(".") in self._fed)
