"""Untrusted names in each form of output: one line, no markup, nothing that a renderer or a terminal acts on."""

from __future__ import annotations

import html
import re

import pytest

from probe_cli.report.plain import markdown_code, markdown_text, printable


def cells(row: str) -> int:
    """Cells of a table row as cmark-gfm's scanner counts them: a backslash takes the next character with it."""
    return len(re.findall(r"(?<!\\)\|", re.sub(r"\\[!-/:-@\[-`{-~]", "", row))) - 1


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nok: no error", "a\\nok: no error"),
        ("a\tb\r", "a\\tb\\r"),
        ("\x1b[31m\x9b\u202e\u2028\ud800", "\\x1b[31m\\x9b\\u202e\\u2028\\ud800"),
        ("größe.日本.😀", "größe.日本.😀"),
    ],
)
def test_a_name_is_one_line_without_controls(name: str, shown: str) -> None:
    assert printable(name) == shown


@pytest.mark.parametrize("name", ["a|b", "a\\|b", "a\\\\|b", "`|", "a\\", "``x`", "<img src=x>|", "plain.name"])
def test_code_stays_in_its_cell_and_reads_as_it_is(name: str) -> None:
    code = markdown_code(name)
    assert cells(f"| {code} |") == 1
    if code.startswith("<code>"):
        assert html.unescape(code) == f"<code>{name}</code>"
    else:
        fence = re.match("`+", code)
        assert fence is not None
        inner = code[fence.end() : -fence.end()]
        inner = inner[1:-1] if inner.startswith(" ") and inner.endswith(" ") else inner
        assert fence[0] not in inner
        assert inner.replace("\\|", "|") == name


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("has shape [31, 64], was weight_scale", "has shape [31, 64], was weight_scale"),
        ("a|b\\|c", "a\\|b\\\\\\|c"),
        ("![x](http://e/p.png)", "![x]\\(http:\u200b//e/p.png)"),
        ("<img src=x>&lt;", "&lt;img src=x>&amp;lt;"),
        ("@octocat #1 hf://o/n@main", "@\u200boctocat #\u200b1 hf://o/n@\u200bmain"),
        ("*a* __b__ ~c~ `d` $e$", "\\*a\\* \\_\\_b\\_\\_ \\~c\\~ \\`d\\` \\$e\\$"),
        ("www.e.org\n| x |", "www\u200b.e.org\\\\n\\| x \\|"),
    ],
)
def test_text_has_no_markup_and_calls_nobody(text: str, written: str) -> None:
    assert markdown_text(text) == written
    assert cells(f"| {written} |") == 1
