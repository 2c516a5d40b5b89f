"""That loading code did to the model what an update can follow, and nothing else: it wrote to the tensors that were there."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from probe_cli.errors import ReloadError
from probe_cli.reload.live import LiveLayer
from probe_cli.reload.progress import UnitState
from probe_cli.reload.text import some

__all__ = ["Intact"]


class Intact:
    """Of one update. `states` may still grow."""

    def __init__(
        self,
        rank: str,
        number: int,
        live: Mapping[str, LiveLayer],
        states: Sequence[UnitState],
        modules: Container[nn.Module],
    ) -> None:
        self._rank = rank
        self._during = f"{rank}, update {number}"
        self._live = live
        self._states = states
        self._modules = modules
        #: Loading code has set a module of the model.
        self.restructured = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around loading code: note whether it sets modules."""
        thread = threading.current_thread()
        self.restructured = False

        def module_set(holder: nn.Module, name: str, module: nn.Module | None) -> None:
            if holder in self._modules and threading.current_thread() is thread:
                self.restructured = True

        handle = register_module_module_registration_hook(module_set)
        try:
            yield
        finally:
            handle.remove()

    def require_tensors(self) -> None:
        """Raise ReloadError if any layer has other tensors registered than it is to have: they would be gone when what was
        taken aside is put back."""
        for state in self._states:
            self.require_registered(state)

    def require_registered(self, state: UnitState) -> None:
        """The same for one unit."""
        if state.unit.expectations and not state.ceded:
            for layer in state.unit.layers:
                self._live[layer.name].require_unchanged(self._during)

    def require_memory(self, state: UnitState) -> None:
        """Raise ReloadError if a unit's tensors have left their memory. Loaders may do that to their own tensor; with others it
        is not seen before it is too late."""
        self._refuse(self.move_back(state) if state.in_place else state.staged.moved_objects())

    def require_live_memory(self) -> None:
        """The same for all live tensors, those that are published or that nothing is due for too."""
        self._refuse([key for state in self._states for key in self.move_back(state)])

    def move_back(self, state: UnitState) -> list[tuple[str, str]]:
        """Put a unit's live tensors back that have left their memory. Returns which: (layer, name)."""
        if state.ceded or not state.unit.expectations:
            return []
        return [key for layer in state.unit.layers for key in self._live[layer.name].move_back()]

    def _refuse(self, moved: Iterable[tuple[str, str]]) -> None:
        names = [f"{layer}.{name}" if layer else name for layer, name in moved]
        if names:
            raise ReloadError(
                f"{self._rank}: loading code put other memory under {some(names, 4)} (`.data =`) outside their own loaders",
                hint="copy into the tensor instead (`copy_`)",
            )
