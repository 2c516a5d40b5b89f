"""Text that is safe to print wherever it goes: no control characters from untrusted names, escapes where a format
needs them."""

from __future__ import annotations

import re

__all__ = ["clip", "github_data", "github_property", "markdown_code", "printable", "xml_text"]

# C0 but tab and newline, DEL, C1, line and paragraph separators, bidirectional overrides, lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """The text with what could steer a terminal written as escapes."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def xml_text(text: str) -> str:
    """The text without characters that XML 1.0 cannot hold."""
    return _NOT_XML.sub("\ufffd", text)


def github_data(text: str) -> str:
    """The text as the message of a GitHub workflow command."""
    return printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def github_property(text: str) -> str:
    """The text as a property of a GitHub workflow command."""
    return github_data(text).replace(":", "%3A").replace(",", "%2C")


def markdown_code(text: str) -> str:
    """The text as inline code in a Markdown table cell."""
    text = printable(text).replace("\n", " ").replace("|", "\\|")
    fence = "`"
    while fence in text:
        fence += "`"
    space = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def clip(text: str, limit: int) -> str:
    """At most `limit` characters."""
    return text if len(text) <= limit else text[: max(0, limit - 3)] + "..."
