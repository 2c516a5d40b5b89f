"""One change between two manifests: typed, complete, and addressed so that it can be applied as a patch."""

from __future__ import annotations

from typing import Any

import msgspec

from probe_cli.manifest.diff_rules import KINDS, ChangeClass, Section

__all__ = ["Change"]


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What is different about one thing. `subject` is its name; `old` and `new` are its JSON before and after."""

    kind: str
    subject: str
    #: None: it is about what all ranks have in common (a bundle's index, a checkpoint).
    rank: int | None = None
    #: The layer it is in, by its old name.
    layer: str | None = None
    #: The tensor that an application writes; its sources are the subject.
    into: str | None = None
    old: Any = None
    new: Any = None
    #: Position in the old list; position in the new one. For a change of order, `new` is the new order of old positions
    #: of those that stayed.
    at: int | None = None
    to: int | None = None
    #: It repeats for one rank what is said of all.
    echo: bool = False

    @property
    def change_class(self) -> ChangeClass:
        return KINDS[self.kind].change_class

    @property
    def section(self) -> Section:
        return KINDS[self.kind].section

    @property
    def reason(self) -> str:
        return KINDS[self.kind].reason
