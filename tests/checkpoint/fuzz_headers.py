"""Fuzz entry for the header parser: any bytes either open or raise CheckpointError, and nothing else.

    python tests/checkpoint/fuzz_headers.py -max_total_time=60 tests/hostile/headers     (needs atheris)

Also holds both roads through a header, the quick and the careful one, against each other.
"""

from __future__ import annotations

import sys

from probe_cli.checkpoint.entries import parse_entries
from probe_cli.checkpoint.header import LENGTH_BYTES, Header, header_length, parse_header
from probe_cli.checkpoint.index import parse_index
from probe_cli.checkpoint.quick import parse_quickly
from probe_cli.checkpoint.wire import parse_wire
from probe_cli.errors import CheckpointError

__all__ = ["fuzz_file", "fuzz_text", "main", "parse_file"]


def parse_file(content: bytes) -> Header | None:
    """The header of a file with this content, None if it is refused."""
    try:
        length = header_length(content[:LENGTH_BYTES], len(content), file="fuzz")
        return parse_header(content[: LENGTH_BYTES + length], file="fuzz")
    except CheckpointError as error:
        _check_message(error)
        return None


def fuzz_file(content: bytes) -> None:
    """One run on a whole file. Raises whatever is a bug."""
    header = parse_file(content)
    body = content[LENGTH_BYTES:] if header is None else content[LENGTH_BYTES : header.nbytes]
    quick = parse_quickly(body) if body.startswith(b"{") else None
    if quick is not None:
        # The quick road must never accept what the careful one refuses, or read it differently.
        assert quick == parse_entries(body.decode(), file="fuzz")
    if header is not None:
        at = 0
        for begin, end, *_ in header.records:
            assert begin == at <= end
            at = end
        assert at == header.data_nbytes


def fuzz_text(content: bytes) -> None:
    """One run on an index and on a wire file."""
    text = content.decode("utf-8", "surrogateescape" if len(content) % 2 else "replace")
    for parse in (parse_index, parse_wire):
        try:
            parse(text, file="fuzz")
        except CheckpointError as error:
            _check_message(error)


def _check_message(error: CheckpointError) -> None:
    message = str(error)
    assert message.startswith("fuzz: ") and message.isprintable() and len(message) < 1000, message


def main() -> None:
    """Run under atheris."""
    import atheris  # type: ignore[import-not-found]

    def both(content: bytes) -> None:
        fuzz_file(content)
        fuzz_text(content[LENGTH_BYTES:])

    atheris.instrument_all()
    atheris.Setup(sys.argv, both)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
