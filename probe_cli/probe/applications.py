"""From loader calls and suppressed writes to contracts: which call wrote what, under which key, how often."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from probe_cli.engines.base import Engine
from probe_cli.errors import ProbeError, described
from probe_cli.manifest.canonical import canonical_bytes
from probe_cli.model.inventory import OwnedTensor
from probe_cli.model.selectors import Binder, loader_name
from probe_cli.model.storage import storage_key
from probe_cli.probe.recorder import Recorder
from probe_cli.probe.writes import ModelWrite, code_line

__all__ = ["Collector", "Entry"]


@dataclass
class Entry:
    """One key of a contract while it is being recorded."""

    owned: OwnedTensor
    sources: tuple[int, ...]
    selectors: dict[str, Any]
    direct: bool
    attribution: Literal["storage", "stream"]
    count: int = 0
    #: Distinct writes, in order.
    writes: dict[ModelWrite, None] = field(default_factory=dict)
    #: What single calls wrote -> how many of them wrote just that.
    calls: dict[tuple[ModelWrite, ...], int] = field(default_factory=dict)


class Collector:
    """Sorts what a replay does into applications, declined calls and direct writes."""

    def __init__(self, engine: Engine, binder: Binder) -> None:
        self._engine = engine
        self._binder = binder
        self.recorder: Recorder
        #: Layer name -> key -> entry; keys in order of first arrival.
        self.contracts: dict[str, dict[tuple[object, ...], Entry]] = {}
        self.declined = 0
        #: Sources that a loader was offered and did not take.
        self.offered: set[int] = set()
        self.consumed: set[int] = set()
        self._call: list[ModelWrite] | None = None

    def on_write(self, writes: list[ModelWrite]) -> None:
        """Take the model writes of one operator."""
        if self._call is not None:
            self._call += writes
        else:
            self._direct(writes)

    def on_call(
        self,
        loader: Callable[..., object],
        parameter: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> object:
        """Run one loader call and record what it did, after it returned."""
        if self._call is not None:  # a loader that calls another: one application, the outer one's
            return loader(*args, **kwargs)
        recorder = self.recorder
        writes = self._call = []
        recorder.call = (parameter, args)
        try:
            result = loader(*args, **kwargs)
        except Exception as error:
            # Loading code may try a call that the loader's signature does not fit; whatever else it swallows is a
            # tensor that did not arrive.
            if writes or not _is_misfit(error):
                after = f" after writing {writes[0].owned.full_name}" if writes else ""
                recorder.fail(
                    f"weight loader {loader_name(loader)} raised{after} while loading {recorder.loading()}: "
                    f"{described(error)}"
                )
            raise
        finally:
            self._call = None
            recorder.call = None
        if self._engine.declined(result) or not writes:
            if writes:
                raise recorder.fail(
                    f"weight loader {loader_name(loader)} wrote {writes[0].owned.full_name} and then declined "
                    f"{recorder.loading()} (returned {result!r})",
                    hint="a loader that declines must not write",
                )
            self.declined += 1
            if recorder.current is not None:
                self.offered.add(recorder.current)
            return result
        try:
            bound = self._binder.bind(loader, args, kwargs)
        except ProbeError as error:  # noted, should the loading code swallow it
            raise recorder.fail(str(error), hint=error.hint) from None
        owned = recorder.inventory.destination(parameter, args) or writes[0].owned
        given: list[int] = []
        foreign: list[str] = []
        for name, tensor in zip(bound.names, bound.tensors):
            if recorder.inventory.on_storage(storage_key(tensor)):
                continue
            behind = recorder.sources_of(tensor)
            given += behind
            if not behind:
                foreign.append(name)
        if foreign and given:
            raise recorder.fail(
                f"weight loader {loader_name(loader)}: argument {foreign[0]!r} is a tensor that comes from no source while "
                f"loading {recorder.loading()}; a selector must be a JSON scalar, a tuple of them, an enum or a dtype",
                hint="pass the value itself (`.item()`, `tolist()`), or register the tensor with the model",
            )
        sources, writes = _attribute(given, writes)
        self._record(owned, sources, bound.selectors, writes, direct=False)
        return result

    def _direct(self, writes: list[ModelWrite]) -> None:
        given = [source for write in writes for source in write.given]
        sources, writes = _attribute(given, writes)
        if not sources:
            owned = writes[0].owned
            raise self.recorder.fail(
                f"{writes[0].op} writes {owned.full_name} outside any weight loader, with a value that comes from no "
                f"source, while loading {self.recorder.loading()}, at {code_line()}",
                hint="move the write into a weight loader or into post-processing; a contract cannot hold it",
            )
        self._record(writes[0].owned, sources, {}, writes, direct=True)

    def _record(
        self,
        owned: OwnedTensor,
        sources: tuple[int, ...],
        selectors: dict[str, Any],
        writes: list[ModelWrite],
        *,
        direct: bool,
    ) -> None:
        attribution: Literal["storage", "stream"] = "storage"
        if not sources and self.recorder.current is not None:
            sources, attribution = (self.recorder.current,), "stream"
        elif not sources and self.recorder.values_taken:  # else it is a constant of the loading code's own
            raise self.recorder.fail(
                f"a weight loader writes {owned.full_name} with a value that comes from no source, while no source "
                f"is being loaded, at {code_line()}; it may be made of values of sources that the load has read",
                hint="load it while the source that it is made of is being loaded",
            )
        self.consumed.update(sources)
        key = (sources, owned.name, canonical_bytes(selectors) if selectors else b"")
        layer = self.contracts.setdefault(owned.layer, {})
        entry = layer.get(key)
        if entry is None:
            entry = layer[key] = Entry(owned, sources, selectors, direct, attribution)
        entry.count += 1
        entry.writes.update(dict.fromkeys(writes))
        call = tuple(writes)
        entry.calls[call] = entry.calls.get(call, 0) + 1

    def keys(self) -> dict[str, dict[tuple[object, ...], int]]:
        """Layer -> key -> count, for comparing two replays."""
        return {layer: {key: entry.count for key, entry in keys.items()} for layer, keys in self.contracts.items()}


def _attribute(given: list[int], writes: list[ModelWrite]) -> tuple[tuple[int, ...], list[ModelWrite]]:
    """The sources of an application, in order, and its writes in their terms.

    What a write reads back from the model was brought there by an earlier application, which answers for it; unless
    there is nothing else.
    """
    sources = dict.fromkeys(given)
    sources.update(dict.fromkeys(w.source for w in writes if w.source is not None and not w.recalled))
    if not sources:
        return tuple(dict.fromkeys(w.source for w in writes if w.source is not None)), writes
    if all(w.source is None or w.source in sources for w in writes):
        return tuple(sources), writes
    own = [
        w
        if w.source is None or w.source in sources
        else replace(w, source=None, src=None, src_dtype=None, computed=True)
        for w in writes
    ]
    return tuple(sources), own


def _is_misfit(error: Exception) -> bool:
    """Whether a call failed before its first line, because the arguments did not fit."""
    traceback = error.__traceback__
    return isinstance(error, TypeError) and (traceback is None or traceback.tb_next is None)
