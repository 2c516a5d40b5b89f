"""JSON without surprises: duplicate keys, NaN, oversized integers and deep nesting are faults, with a position."""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from probe_cli.checkpoint.text import quote

__all__ = ["Fault", "loads", "parse_string", "parse_string_map", "parse_value", "skip_space"]

_SPACE = re.compile(r"[ \t\r\n]*")


class Fault(Exception):
    """What is wrong, and at which character."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def _constant(name: str) -> NoReturn:
    raise Fault(f"{name} is not JSON", 0)


def _integer(digits: str) -> int:
    if len(digits) > 40:
        raise Fault(f"integer of {len(digits):,} digits", 0)
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise Fault(f"duplicate key {quote(key)}", 0)
            seen.add(key)
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)


def parse_string(text: str, position: int, what: str) -> tuple[str, int]:
    """The JSON string at `position`, and the position after it. Raises Fault."""
    if text[position : position + 1] != '"':
        raise Fault(f"expected {what}", position)
    try:
        value, end = scanstring(text, position + 1, True)
    except json.JSONDecodeError as error:
        raise Fault(f"{what}: {error.msg}", error.pos) from None
    return value, end


def parse_value(text: str, position: int, limit: int) -> tuple[Any, int]:
    """Any JSON value of at most `limit` characters at `position`, and the position after it. Raises Fault."""
    # Slices, because the decoder would read on to the end of the text. The first is long enough for any usual entry.
    for size in (512, limit):
        window = text[position : position + size]
        try:
            value, end = _DECODER.raw_decode(window)
        except json.JSONDecodeError as error:
            if len(window) < size:
                raise Fault(f"malformed JSON ({error.msg})", position + error.pos) from None
        except RecursionError:
            raise Fault("nested too deeply", position) from None
        else:
            return value, position + end
    raise Fault(f"value is malformed or longer than {limit:,} characters", position)


def parse_string_map(text: str, position: int, what: str) -> tuple[dict[str, str], int]:
    """The JSON object of strings at `position`, and the position after it. Raises Fault."""
    if text[position : position + 1] != "{":
        raise Fault(f"{what} is not an object, expected a map of strings", position)
    result: dict[str, str] = {}
    position = skip_space(text, position + 1)
    if text[position : position + 1] == "}":
        return result, position + 1
    while True:
        key, position = parse_string(text, position, f"a key of {what}")
        if key in result:
            raise Fault(f"duplicate key {quote(key)} in {what}", position)
        position = skip_space(text, position)
        if text[position : position + 1] != ":":
            raise Fault(f"expected ':' in {what}", position)
        position = skip_space(text, position + 1)
        result[key], position = parse_string(text, position, f"a string as value of {quote(key)} in {what}")
        position = skip_space(text, position)
        stop = text[position : position + 1]
        if stop == "}":
            return result, position + 1
        if stop != ",":
            raise Fault(f"expected ',' or '}}' in {what}", position)
        position = skip_space(text, position + 1)


def loads(text: str) -> Any:
    """A whole JSON document. Raises Fault."""
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Fault(f"malformed JSON ({error.msg})", error.pos) from None
    except RecursionError:
        raise Fault("nested too deeply", 0) from None


def skip_space(text: str, position: int) -> int:
    """The position of the next character that is not JSON white space."""
    found = _SPACE.match(text, position)
    return found.end() if found else position
