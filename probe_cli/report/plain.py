"""Text that is safe to print wherever it goes: no control characters from untrusted names, escapes where a format
needs them."""

from __future__ import annotations

import re

__all__ = ["clip", "github_data", "github_property", "markdown_code", "markdown_text", "printable", "xml_text"]

# C0 (line breaks too: a name must not look like another line), DEL, C1, line and paragraph separators, bidirectional
# overrides, lone surrogates.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_NOT_ALPHANUMERIC = re.compile(r"[^A-Za-z0-9]")
_MARKUP = re.compile(r"[\\`*|~$]|(?<=\])\(|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_LINKED = re.compile(r"[@#](?=\w)|(?:https?|ftp):(?=//)|www(?=\.)", re.IGNORECASE)
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """The text as one line, with what could steer a terminal written as escapes."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def xml_text(text: str) -> str:
    """The text without characters that XML 1.0 cannot hold."""
    return _NOT_XML.sub("\ufffd", text)


def github_data(text: str) -> str:
    """The text, which may have several lines, as the message of a GitHub workflow command."""
    return "%0A".join(printable(line).replace("%", "%25") for line in text.split("\n"))


def github_property(text: str) -> str:
    """The text as a property of a GitHub workflow command."""
    return github_data(printable(text)).replace(":", "%3A").replace(",", "%2C")


def markdown_code(text: str) -> str:
    """The text as inline code in a Markdown table cell."""
    text = printable(text)
    if "\\|" in text:
        # A cell ends at a bar after two backslashes, and in a code span there is no other way to write these two.
        return f"<code>{_NOT_ALPHANUMERIC.sub(lambda match: f'&#{ord(match[0])};', text)}</code>"
    text = text.replace("|", "\\|")
    fence = "`"
    while fence in text:
        fence += "`"
    space = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def markdown_text(text: str) -> str:
    """The text as it reads, in a Markdown table cell or line: no markup, no link or image, and nobody is notified."""
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    # An escaped @ still notifies, an escaped # still refers to an issue, and an address needs no brackets.
    return _MARKUP.sub(r"\\\g<0>", _LINKED.sub("\\g<0>\u200b", text))


def clip(text: str, limit: int) -> str:
    """At most `limit` characters."""
    return text if len(text) <= limit else text[: max(0, limit - 3)] + "..."
