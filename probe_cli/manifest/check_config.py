"""Which findings count, and how much: defaults, `[tool.probe-manifest]`, and the command line on top."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

import msgspec

from probe_cli.errors import UsageError
from probe_cli.manifest.findings import CODES, Code, Severity, find_code

__all__ = ["CheckConfig", "Exemption", "find_config", "load_config"]

_KEYS = frozenset({"strict", "select", "ignore", "severity", "exempt"})


class Exemption(msgspec.Struct, frozen=True):
    """Findings of a code about subjects that match a glob are left out, for a reason that someone wrote down."""

    code: str
    subject: str
    reason: str


class CheckConfig(msgspec.Struct, frozen=True):
    """Severities as they stand after everything that was said about them. Start from `CheckConfig()`."""

    severities: Mapping[str, Severity] = msgspec.field(
        default_factory=lambda: {code.code: code.severity for code in CODES.values()}
    )
    strict: bool = False
    exemptions: tuple[Exemption, ...] = ()

    def severity(self, code: str, subject: str = "") -> Severity:
        """What a finding of this code counts as; "off" if it is ignored or exempt."""
        severity = self.severities[code]
        if severity == "off":
            return "off"
        if self.exemptions and any(e.code == code and fnmatchcase(subject, e.subject) for e in self.exemptions):
            return "off"
        return "error" if self.strict else severity

    def with_flags(
        self, *, strict: bool = False, select: Iterable[str] = (), ignore: Iterable[str] = ()
    ) -> CheckConfig:
        """This configuration with what the command line adds. `select` leaves only the codes that it names (a code, a
        name, or a prefix such as PM1) and those of input that cannot be read; `ignore` turns codes off. Several may stand in
        one text, with commas between."""
        severities = dict(self.severities)
        if select := _separate(select):
            chosen = {code for text in select for code in _matching(text, "--select")}
            # What could not be read was not checked, whatever was asked for: that is never "ok".
            severities = {c: s if c in chosen or CODES[c].trouble else "off" for c, s in severities.items()}
            for code in chosen:
                # What is asked for by name is wanted, even if a file turned it off.
                if severities[code] == "off":
                    severities[code] = CODES[code].severity
        for text in _separate(ignore):
            for code in _matching(text, "--ignore"):
                severities[code] = "off"
        return msgspec.structs.replace(self, severities=severities, strict=self.strict or strict)


def find_config(start: Path) -> Path | None:
    """The nearest pyproject.toml with a `[tool.probe-manifest]` table, from `start` upwards."""
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        # Reading TOML is slow to start; most files can be told without.
        if path.is_file() and b"probe-manifest" in path.read_bytes() and _table(path) is not None:
            return path
    return None


def load_config(path: Path) -> CheckConfig:
    """The configuration in a file: its `[tool.probe-manifest]` table if it has one, else the file's own top level.

    Raises UsageError that names file and key.
    """
    table = _table(path)
    if table is None:
        table = _toml(path)
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise UsageError(f"{path}: unknown key {unknown[0]!r}", hint=f"known keys: {', '.join(sorted(_KEYS))}")
    config = CheckConfig(exemptions=tuple(_exemption(path, item) for item in _list(path, table, "exempt")))
    severities = dict(config.severities)
    for text, value in _mapping(path, table, "severity").items():
        if value not in get_args(Severity):
            raise UsageError(f"{path}: severity of {text} is {value!r}, expected error, warning or off")
        for code in _matching(text, f"{path}: severity"):
            severities[code] = value
    strict = table.get("strict", False)
    if not isinstance(strict, bool):
        raise UsageError(f"{path}: strict is {strict!r}, expected true or false")
    config = msgspec.structs.replace(config, severities=severities, strict=strict)
    return config.with_flags(select=_strings(path, table, "select"), ignore=_strings(path, table, "ignore"))


def _separate(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(part.strip() for text in texts for part in text.split(","))


def _matching(text: str, where: str) -> list[str]:
    code: Code | None = find_code(text)
    if code is not None:
        return [code.code]
    found = [known for known in CODES if known.startswith(text.upper())] if text.upper().startswith("PM") else []
    if not found:
        raise UsageError(f"{where}: no finding has the code or name {text!r}", hint="docs/findings.md lists them")
    return found


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deeply for a configuration") from None


def _table(path: Path) -> dict[str, Any] | None:
    tool = _toml(path).get("tool")
    table = tool.get("probe-manifest") if isinstance(tool, dict) else None
    return table if isinstance(table, dict) else None


def _list(path: Path, table: dict[str, Any], key: str) -> list[Any]:
    value = table.get(key, [])
    if not isinstance(value, list):
        raise UsageError(f"{path}: {key} is a {type(value).__name__}, expected a list")
    return value


def _strings(path: Path, table: dict[str, Any], key: str) -> list[str]:
    value = _list(path, table, key)
    if not all(isinstance(item, str) for item in value):
        raise UsageError(f"{path}: {key} holds something that is not a string")
    return value


def _mapping(path: Path, table: dict[str, Any], key: str) -> dict[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"{path}: {key} is a {type(value).__name__}, expected a table")
    return value


def _exemption(path: Path, item: Any) -> Exemption:
    try:
        exemption = msgspec.convert(item, Exemption)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: exempt: {error}", hint="each entry has code, subject (a glob) and reason") from None
    if not exemption.reason.strip():
        raise UsageError(f"{path}: exempt: {exemption.subject!r} has no reason", hint="say why it may be left out")
    code = find_code(exemption.code)
    if code is None:
        raise UsageError(f"{path}: exempt: no finding has the code or name {exemption.code!r}")
    return msgspec.structs.replace(exemption, code=code.code)
