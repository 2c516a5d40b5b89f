"""Write tests/hostile/headers: one hostile safetensors file per fault, and say what the error must contain.

    python tests/hostile/make_headers.py

The files are committed; a test holds them equal to what this script writes. The faults are those of parsers that trust
lengths, offsets or JSON (safetensors' own checks, and what they leave open).
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "headers"

GOOD = '"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


def framed(header: str | bytes, data: bytes = b"") -> bytes:
    raw = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return len(raw).to_bytes(8, "little") + raw + data


def announced(length: int, rest: bytes = b"{}") -> bytes:
    return length.to_bytes(8, "little") + rest


def one(dtype: str = '"U8"', shape: str = "[2]", offsets: str = "[0,2]", data: bytes = b"\1\2") -> bytes:
    return framed(f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}', data)


def two(first: str, second: str, data: bytes = b"\1\2\3\4") -> bytes:
    return framed(
        f'{{"a":{{"dtype":"U8","shape":[2],"data_offsets":{first}}},'
        f'"b":{{"dtype":"U8","shape":[2],"data_offsets":{second}}}}}',
        data,
    )


#: File -> its bytes, and what the message must contain. Files named `ok_...` must open.
CASES: dict[str, tuple[bytes, str]] = {
    # The length.
    "empty": (b"", "has 0 bytes, expected at least the 8 bytes of a header length"),
    "seven_bytes": (b"\2\0\0\0\0\0\0", "has 7 bytes, expected at least the 8 bytes"),
    "length_alone": (announced(2, b""), "header length is 2 bytes, but the file ends after 8 bytes"),
    "length_zero": (announced(0), "header length is 0 bytes, expected 2 to 100,000,000"),
    "length_over_file": (announced(1000), "header length is 1,000 bytes, but the file ends after 10 bytes"),
    "length_by_one": (announced(3), "header length is 3 bytes, but the file ends after 10 bytes"),
    "length_over_cap": (announced(100_000_001), "header length is 100,000,001 bytes, expected 2 to 100,000,000"),
    "length_2_63": (announced(2**63), "header length is 9,223,372,036,854,775,808 bytes"),
    "length_2_64": (announced(2**64 - 1), "header length is 18,446,744,073,709,551,615 bytes"),
    # Other things named .safetensors.
    "lfs_pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n",
        "is a Git LFS pointer",
    ),
    "zip_archive": (b"PK\x03\x04" + b"\0" * 30, "header length is 67,324,752 bytes, but the file ends after 34"),
    "html_page": (b"<!DOCTYPE html><html></html>", "header length is"),
    "gguf": (b"GGUF\3\0\0\0" + b"\0" * 16, "header length is"),
    # The JSON.
    "not_an_object": (framed("[1]"), "header starts with b'[', expected b'{'"),
    "leading_space": (framed(' {"a":1}'), "header starts with b' ', expected b'{'"),
    "unclosed": (framed("{" + GOOD), "expected ',' or '}', found the end"),
    "trailing_comma": (framed("{" + GOOD + ",}", b"\1\2"), "expected a string as a key of the header"),
    "trailing_garbage": (framed("{" + GOOD + "} x", b"\1\2"), "expected the end after the JSON value"),
    "second_object": (framed("{" + GOOD + "}{}", b"\1\2"), "expected the end after the JSON value"),
    "not_utf8": (framed(b'{"\xff":1}'), "header is not UTF-8 at byte 10"),
    "overlong_utf8": (framed(b'{"\xc0\x80":1}'), "header is not UTF-8 at byte 10"),
    "surrogate_escape": (
        framed('{"\\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"\1\2"),
        "name has control characters",
    ),
    "surrogate_utf8": (framed('{"\ud800":1}'), "header is not UTF-8 at byte 10"),
    "raw_newline_in_name": (framed('{"a\nb":1}'), "Invalid control character"),
    "newline_in_name": (
        framed('{"a\\nb":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"\1\2"),
        "tensor 'a\\nb': name has control characters",
    ),
    "terminal_escape_in_name": (
        framed('{"\\u001b[2J":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"\1\2"),
        "tensor '\\x1b[2J': name has control characters",
    ),
    "long_name": (
        framed('{"' + "n" * 2049 + '":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"\1\2"),
        "name is longer than 2,048 characters",
    ),
    "nan": (one(shape="[NaN]"), "tensor 'a': NaN is not JSON"),
    "infinity": (one(offsets="[0,Infinity]"), "tensor 'a': Infinity is not JSON"),
    "minus_infinity": (one(offsets="[-Infinity,2]"), "tensor 'a': -Infinity is not JSON"),
    "deep_nesting": (framed('{"a":' + "[" * 5000 + "]" * 5000 + "}"), "tensor 'a': nested too deeply"),
    "long_entry": (one(shape="[" + "1," * 10_000 + "2]"), "a value is malformed or longer than 16,384 characters"),
    "comment": (framed("{/**/" + GOOD + "}"), "expected a string as a key of the header"),
    "single_quotes": (framed("{'a':1}"), "expected a string as a key of the header"),
    # Keys that stand twice.
    "duplicate_tensor": (framed("{" + GOOD + "," + GOOD + "}", b"\1\2"), "duplicate key 'a'"),
    "duplicate_by_escape": (
        framed("{" + GOOD + ',"\\u0061":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}', b"\1\2\3\4"),
        "duplicate key 'a'",
    ),
    "duplicate_metadata": (
        framed('{"__metadata__":{"k":"v"},"__metadata__":{"k":"v"},' + GOOD + "}", b"\1\2"),
        "duplicate key '__metadata__'",
    ),
    "duplicate_metadata_key": (
        framed('{"__metadata__":{"k":"v","k":"w"},' + GOOD + "}", b"\1\2"),
        "duplicate key 'k' in __metadata__",
    ),
    "duplicate_field": (
        framed('{"a":{"dtype":"U8","dtype":"I8","shape":[2],"data_offsets":[0,2]}}', b"\1\2"),
        "tensor 'a': duplicate key 'dtype'",
    ),
    # Metadata.
    "metadata_list": (framed('{"__metadata__":[],' + GOOD + "}", b"\1\2"), "expected '{', found '['"),
    "metadata_number": (
        framed('{"__metadata__":{"k":1},' + GOOD + "}", b"\1\2"),
        "expected a string as the value of 'k' in __metadata__",
    ),
    "metadata_nested": (
        framed('{"__metadata__":{"k":{}},' + GOOD + "}", b"\1\2"),
        "expected a string as the value of 'k' in __metadata__",
    ),
    "metadata_null": (framed('{"__metadata__":null,' + GOOD + "}", b"\1\2"), "expected '{', found 'n'"),
    "metadata_not_utf8": (
        framed(b'{"__metadata__":{"k":"\xff,"},' + GOOD.encode() + b"}", b"\1\2"),
        "header is not UTF-8 at byte 30",
    ),
    # Fields.
    "entry_number": (framed('{"a":1}'), "tensor 'a': is 1, expected an object"),
    "entry_list": (framed('{"a":["U8",[2],[0,2]]}', b"\1\2"), "expected an object with dtype, shape and data_offsets"),
    "no_dtype": (framed('{"a":{"shape":[2],"data_offsets":[0,2]}}', b"\1\2"), "tensor 'a': lacks 'dtype'"),
    "no_shape": (framed('{"a":{"dtype":"U8","data_offsets":[0,2]}}', b"\1\2"), "tensor 'a': lacks 'shape'"),
    "no_offsets": (framed('{"a":{"dtype":"U8","shape":[2]}}', b"\1\2"), "tensor 'a': lacks 'data_offsets'"),
    "extra_field": (
        framed('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"x":0}}', b"\1\2"),
        "tensor 'a': has the unknown field 'x'",
    ),
    "unknown_dtype": (one(dtype='"F7"'), "tensor 'a': dtype 'F7' is unknown, expected one of BOOL"),
    "lower_case_dtype": (one(dtype='"u8"'), "tensor 'a': dtype 'u8' is unknown"),
    "dtype_number": (one(dtype="8"), "tensor 'a': dtype is 8, expected a string"),
    "shape_string": (one(shape='"[2]"'), "tensor 'a': shape is '[2]', expected a list of integers"),
    "shape_negative": (one(shape="[-2]"), "tensor 'a': shape has -2, expected integers of 0 or more"),
    "shape_two_negatives": (one(shape="[-1,-2]"), "tensor 'a': shape has -1, expected integers of 0 or more"),
    "shape_float": (one(shape="[2.0]"), "tensor 'a': shape has 2.0, expected integers of 0 or more"),
    "shape_bool": (one(shape="[true,2]"), "tensor 'a': shape has True, expected integers of 0 or more"),
    "shape_exponent": (one(shape="[2e0]"), "tensor 'a': shape has 2.0, expected integers of 0 or more"),
    "shape_leading_zero": (one(shape="[02]"), "tensor 'a': malformed JSON"),
    "shape_rank": (one(shape="[" + ",".join(["1"] * 65) + "]"), "shape has 65 dimensions, expected at most 64"),
    "shape_overflow": (one(shape="[4294967296,4294967296]"), "overflows 2^63 bytes"),
    "shape_overflow_wraps_to_2": (one(shape="[9223372036854775809,2]"), "overflows 2^63 bytes"),
    "shape_overflow_times_zero": (one(shape="[4294967296,4294967296,0]", offsets="[0,0]", data=b""), "overflows 2^63"),
    "shape_huge_integer": (one(shape="[" + "9" * 4000 + "]"), "overflows 2^63 bytes"),
    "shape_huger_integer": (one(shape="[" + "9" * 6000 + "]"), "tensor 'a': "),
    # Offsets.
    "offsets_three": (one(offsets="[0,2,2]"), "data_offsets is [0, 2, 2], expected two integers of 0 or more"),
    "offsets_string": (one(offsets='["0","2"]'), "expected two integers of 0 or more"),
    "offsets_float": (one(offsets="[0,2.0]"), "expected two integers of 0 or more"),
    "offsets_negative": (one(offsets="[-2,0]"), "data_offsets is [-2, 0], expected two integers of 0 or more"),
    "offsets_reversed": (one(offsets="[2,0]"), "data_offsets [2, 0] end before they begin"),
    "offsets_short": (one(offsets="[0,1]", data=b"\1"), "span 1 bytes, expected 2 for U8 of shape [2]"),
    "offsets_long": (one(offsets="[0,3]", data=b"\1\2\3"), "span 3 bytes, expected 2 for U8 of shape [2]"),
    "offsets_of_other_dtype": (one(dtype='"F32"'), "span 2 bytes, expected 8 for F32 of shape [2]"),
    "offsets_2_64": (
        one(offsets="[18446744073709551614,18446744073709551616]"),
        "data_offsets begin at 18446744073709551614, expected 0: leaves a gap",
    ),
    "gap_at_start": (one(offsets="[1,3]", data=b"\1\2\3"), "data_offsets begin at 1, expected 0: leaves a gap"),
    "gap": (two("[0,2]", "[3,5]", b"\1\2\3\4\5"), "tensor 'b': data_offsets begin at 3, expected 2: leaves a gap"),
    "overlap": (two("[0,2]", "[1,3]", b"\1\2\3"), "tensor 'b': data_offsets begin at 1, expected 2: overlaps 'a'"),
    "same_bytes_twice": (two("[0,2]", "[0,2]", b"\1\2"), "tensor 'b': data_offsets begin at 0, expected 2: overlaps"),
    "half_a_byte": (one(dtype='"F4"', shape="[3]"), "shape [3] of F4 is 12 bits, expected whole bytes"),
    "six_bits": (one(dtype='"F6_E2M3"', shape="[2]"), "shape [2] of F6_E2M3 is 12 bits, expected whole bytes"),
    # The data.
    "data_cut": (one(data=b"\1"), "is truncated: has 62 bytes, expected 63 by its header"),
    "data_too_long": (one(data=b"\1\2\3"), "has 1 bytes after its data, expected 63 bytes by its header"),
    "no_tensors": (framed("{}"), "no tensors, expected at least one"),
    "metadata_alone": (framed('{"__metadata__":{"k":"v"}}'), "no tensors, expected at least one"),
    # What looks odd and is right.
    "ok_header_only": (one(data=b""), ""),
    "ok_padded": (framed("{" + GOOD + "}    ", b"\1\2"), ""),
    "ok_spaced": (framed('{ "a" : { "shape" : [ 2 ] ,\t"data_offsets" : [ 0 , 2 ] ,\n"dtype" : "U8" } }', b"\1\2"), ""),
    "ok_metadata_last": (framed("{" + GOOD + ',"__metadata__":{}}', b"\1\2"), ""),
    "ok_metadata_has_field_names": (
        framed('{"__metadata__":{"dtype":"\\"shape\\"","data_offsets":"é"},' + GOOD + "}", b"\1\2"),
        "",
    ),
    "ok_field_name_as_tensor": (framed('{"dtype":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"\1\2"), ""),
    "ok_scalar_and_empty": (
        framed(
            '{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"b":{"dtype":"I64","shape":[0,7],"data_offsets":[1,1]},'
            '"c":{"dtype":"F4","shape":[2],"data_offsets":[1,2]}}',
            b"\1\2",
        ),
        "",
    ),
    "ok_unordered": (two("[2,4]", "[0,2]"), ""),
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, (content, _) in CASES.items():
        (FOLDER / f"{name}.safetensors").write_bytes(content)


if __name__ == "__main__":
    main()
