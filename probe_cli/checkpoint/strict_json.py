"""Reading JSON piece by piece: a duplicate key, NaN or deep nesting is a fault with a position, and no piece is built
in memory before its size is known."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from probe_cli.checkpoint.text import quote

__all__ = ["Fault", "Reader"]

_SPACE = re.compile(r"[ \t\r\n]*")


class Fault(Exception):
    """What is wrong, and at which character."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def _constant(name: str) -> NoReturn:
    raise Fault(f"{name} is not JSON", 0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Fault(f"duplicate key {quote(key)}", 0)
            seen.add(key)
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


class Reader:
    """A place in a JSON text. Every method raises Fault."""

    def __init__(self, text: str, position: int = 0) -> None:
        self.text = text
        self.position = position

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        char = self.text[self.position : self.position + 1]
        if char > " ":
            return char
        found = _SPACE.match(self.text, self.position)
        if found:
            self.position = found.end()
        return self.text[self.position : self.position + 1]

    def take(self, choices: str) -> str:
        """The next character, which must be one of `choices`."""
        char = self.peek()
        if not char or char not in choices:
            expected = " or ".join(repr(choice) for choice in choices)
            raise Fault(f"expected {expected}, found {quote(char) if char else 'the end'}", self.position)
        self.position += 1
        return char

    def end(self) -> None:
        """Nothing but white space may follow."""
        if self.peek():
            raise Fault("expected the end after the JSON value", self.position)

    def string(self, what: str) -> str:
        """A string; `what` says of what, for the message."""
        if self.peek() != '"':
            raise Fault(f"expected a string as {what}", self.position)
        try:
            value, self.position = scanstring(self.text, self.position + 1, True)
        except json.JSONDecodeError as error:
            raise Fault(f"{what}: {error.msg}", error.pos) from None
        return str(value)

    def members(self, what: str) -> Iterator[str]:
        """The keys of an object, one by one; the caller reads each value before it asks for the next key."""
        seen: set[str] = set()
        wanted = f"a key of {what}"
        self.take("{")
        if self.peek() == "}":
            self.position += 1
            return
        stop = ","
        while stop == ",":
            key = self.string(wanted)
            if key in seen:
                raise Fault(f"duplicate key {quote(key)} in {what}", self.position)
            seen.add(key)
            self.take(":")
            yield key
            stop = self.take(",}")

    def items(self) -> Iterator[int]:
        """The indices of an array; the caller reads each item before it asks for the next."""
        self.take("[")
        if self.peek() == "]":
            self.position += 1
            return
        at, stop = 0, ","
        while stop == ",":
            yield at
            stop = self.take(",]")
            at += 1

    def string_map(self, what: str, most: int) -> dict[str, str]:
        """An object of at most `most` members whose values are all strings."""
        result: dict[str, str] = {}
        for key in self.members(what):
            if len(result) == most:
                raise Fault(f"{what} has more than {most:,} members", self.position)
            if self.peek() != '"':
                raise Fault(f"expected a string as the value of {quote(key)} in {what}", self.position)
            result[key] = self.string("a value")
        return result

    def value(self, limit: int) -> Any:
        """Any value of at most `limit` characters."""
        self.peek()
        # Slices, because the decoder would read on to the end of the text. The first is enough for any usual entry.
        for size in (512, limit):
            window = self.text[self.position : self.position + size]
            try:
                value, end = _DECODER.raw_decode(window)
            except json.JSONDecodeError as error:
                if len(window) < size:
                    raise Fault(f"malformed JSON ({error.msg})", self.position + error.pos) from None
            except ValueError as error:
                raise Fault(f"malformed number ({error})", self.position) from None
            except RecursionError:
                raise Fault("nested too deeply", self.position) from None
            except Fault as fault:
                raise Fault(str(fault), self.position) from None
            else:
                self.position += end
                return value
        raise Fault(f"a value is malformed or longer than {limit:,} characters", self.position)
