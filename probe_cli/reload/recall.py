"""What loader calls came to in earlier updates: a source usually brings the same calls again, in the same order.

Binding a call to its signature and looking its key up costs more than all else that tracking does. So each source
keeps its calls, and a call that is like the remembered one at the same place is that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from probe_cli.reload.contract import Contract, Expectation
from probe_cli.reload.progress import Destination

__all__ = ["Incoming", "KnownCall", "Recall", "are_plain"]


class KnownCall:
    """A call of a loader with a tensor of one source, and what it came to. `arguments` and `keywords` are what the
    loader was given after the parameter and the tensor."""

    __slots__ = ("arguments", "destination", "expectation", "keywords", "loader", "queue", "sources")

    def __init__(
        self,
        destination: Destination,
        loader: Callable[..., object],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        expectation: Expectation | None,
        queue: Sequence[Expectation] | None,
        sources: Sequence[str],
    ) -> None:
        self.destination = destination
        self.loader = loader
        self.arguments = arguments
        self.keywords = keywords
        #: None: the contract does not know this call.
        self.expectation = expectation
        #: Expectations that write the same elements, if there are others.
        self.queue = queue
        #: The sources that its tensors are known to be.
        self.sources = sources


class Incoming:
    """A name that may arrive. `shape` is the contract's, None for a name that the contract does not know; `group` are
    the sources that it is joined with, if any."""

    __slots__ = ("calls", "group", "name", "position", "shape")

    def __init__(self, name: str, shape: tuple[int, ...] | None, group: tuple[str, ...] | None) -> None:
        self.name = name
        self.shape = shape
        self.group = group
        self.calls: list[KnownCall] = []
        #: Calls seen since the source arrived.
        self.position = 0

    def remember(self, call: KnownCall) -> None:
        """Keep what the call at this position came to, for the next update."""
        if self.position < len(self.calls):
            self.calls[self.position] = call
        else:
            self.calls.append(call)
        self.position += 1


class Recall:
    """All names of one session, over its updates."""

    def __init__(self, contract: Contract) -> None:
        self.sources = {
            name: Incoming(name, tuple(entry.shape), contract.joined.get(name))
            for name, entry in contract.sources.items()
        }

    def stranger(self, name: str) -> Incoming:
        """A name that the contract does not know: mostly another rank's, so it comes again with the next update."""
        made = Incoming(name, None, None)
        if len(self.sources) < _MAX_NAMES:
            self.sources[name] = made
        return made


#: A stream may bring new names without end.
_MAX_NAMES = 1 << 18


def are_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all arguments but the first two are plain values: such a call can be remembered. True equals 1 in a
    dictionary, so only the flag may be one."""
    return all(type(value) in _PLAIN for value in args[2:]) and all(
        type(value) in _PLAIN or (name == "return_success" and type(value) is bool) for name, value in kwargs.items()
    )


_PLAIN = frozenset({str, int, type(None)})
