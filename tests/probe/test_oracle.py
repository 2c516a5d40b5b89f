"""Random loading code, really run and dry run: every destination element holds exactly what the regions say."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from probe_cli.probe import probe
from tests.oracle import LoadingModel, check, checkpoint_of, random_examples

SENTINEL = -7

Step = Callable[[torch.Tensor], torch.Tensor]


def numbered(shape: tuple[int, ...], start: int, dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.int64).view(shape).to(dtype)


@st.composite
def destinations(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, Step, tuple[int, ...]]:
    """A view of a tensor, as loaders make it, and its shape."""
    text, steps = [], []
    probe_tensor = torch.empty(shape, device="meta")
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(
            st.sampled_from(["narrow", "select", "chunk", "step", "transpose", "unflatten", "flat", "ellipsis"])
        )
        dims = probe_tensor.dim()
        if kind == "flat":
            if not probe_tensor.is_contiguous():
                continue
            step: Step = lambda t: t.view(-1)  # noqa: E731
        elif dims == 0:
            continue
        else:
            dim = draw(st.integers(0, dims - 1))
            size = probe_tensor.shape[dim]
            if kind == "narrow":
                start = draw(st.integers(0, size - 1))
                length = draw(st.integers(1, size - start))
                step = lambda t, d=dim, s=start, n=length: t.narrow(d, s, n)  # noqa: E731
            elif kind == "select":
                index = draw(st.integers(0, size - 1))
                step = lambda t, d=dim, i=index: t.select(d, i)  # noqa: E731
            elif kind == "chunk":
                parts = draw(st.integers(1, min(3, size)))
                which = draw(st.integers(0, 10))
                step = lambda t, d=dim, p=parts, i=which: (lambda c: c[i % len(c)])(t.chunk(p, d))  # noqa: E731
            elif kind == "step":
                stride = draw(st.integers(1, 3))
                step = lambda t, s=stride: t[::s]  # noqa: E731
            elif kind == "transpose":
                other = draw(st.integers(0, dims - 1))
                step = lambda t, a=dim, b=other: t.transpose(a, b)  # noqa: E731
            elif kind == "unflatten":
                factor = draw(st.sampled_from([f for f in range(1, size + 1) if size % f == 0]))
                step = lambda t, d=dim, f=factor, n=size: t.unflatten(d, (f, n // f))  # noqa: E731
            else:
                step = lambda t: t[..., :1]  # noqa: E731
        text.append(kind)
        steps.append(step)
        probe_tensor = step(probe_tensor)

    def run(t: torch.Tensor) -> torch.Tensor:
        for one in steps:
            t = one(t)
        return t

    return "|".join(text), run, tuple(probe_tensor.shape)


@st.composite
def origins(draw: st.DrawFn, wanted: tuple[int, ...], depth: int = 3) -> tuple[str, Step, tuple[int, ...]]:
    """The shape of a source, and how a loader makes a tensor of the wanted shape from it."""
    kinds = [
        "as is",
        "as is",
        "transpose",
        "narrow",
        "chunk",
        "step",
        "flat",
        "index",
        "clone",
        "scale",
        "pad",
        "scratch",
    ]
    kinds += [
        "cat",
        "stack",
        "rows",
        "inplace",
        "sum",
        "zeros",
        "unsqueeze_",
        "cast",
        "roll",
        "out",
        "where",
        "index_put",
    ]
    kind = draw(st.sampled_from(kinds)) if depth else "as is"
    dims = len(wanted)
    if kind in ("narrow", "chunk", "step", "pad", "cat", "rows", "zeros", "roll", "index_put") and not dims:
        kind = "as is"
    if kind == "as is":
        return "", lambda t: t, wanted
    dim = draw(st.integers(0, dims - 1)) if dims else 0
    size = wanted[dim] if dims else 1

    def resized(n: int) -> tuple[int, ...]:
        return (*wanted[:dim], n, *wanted[dim + 1 :])

    inner = wanted
    if kind == "transpose":
        other = draw(st.integers(0, max(dims - 1, 0)))
        if dims:
            inner = tuple(torch.empty(wanted, device="meta").transpose(dim, other).shape)
            make: Step = lambda t: t.transpose(dim, other)  # noqa: E731
        else:
            make = lambda t: t  # noqa: E731
    elif kind == "narrow":
        before, behind = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        inner = resized(size + before + behind)
        make = lambda t: t.narrow(dim, before, size)  # noqa: E731
    elif kind == "chunk":
        parts, which = draw(st.integers(1, 3)), draw(st.integers(0, 10))
        inner = resized(size * parts)
        make = lambda t: t.chunk(parts, dim)[which % parts]  # noqa: E731
    elif kind == "step":
        stride = draw(st.integers(1, 3))
        inner = resized(size * stride)
        make = lambda t: t[(slice(None),) * dim + (slice(None, None, stride),)]  # noqa: E731
    elif kind == "flat":
        inner = (torch.Size(wanted).numel(),)
        make = lambda t: t.reshape(wanted)  # noqa: E731
    elif kind == "index":
        count, which = draw(st.integers(1, 3)), draw(st.integers(0, 2))
        inner = (count, *wanted)
        make = lambda t: t[which % count]  # noqa: E731
    elif kind == "clone":
        make = lambda t: t.clone()  # noqa: E731
    elif kind == "scale":
        make = lambda t: t * 3 + 1  # noqa: E731
    elif kind == "inplace":
        make = lambda t: t.clone().add_(5)  # noqa: E731
    elif kind == "sum":
        inner = (2, *wanted)
        make = lambda t: t.sum(0)  # noqa: E731
    elif kind == "unsqueeze_":
        make = lambda t: t.clone().unsqueeze_(0).squeeze_(0)  # noqa: E731
    elif kind == "cast":
        make = lambda t: t.to(torch.float64).to(torch.int64)  # noqa: E731
    elif kind == "out":
        make = lambda t: torch.add(t, 1, out=torch.empty_like(t))  # noqa: E731
    elif kind == "where":
        make = lambda t: torch.where(torch.ones(wanted, dtype=torch.bool), t, t + 1)  # noqa: E731
    elif kind == "roll":
        make = lambda t: t.roll(1, dim)  # noqa: E731
    elif kind == "pad" and size > 1:
        inner = resized(size - 1)
        pads = [0, 0] * (dims - 1 - dim) + [0, 1]
        make = lambda t: torch.nn.functional.pad(t, pads, value=0)  # noqa: E731
    elif kind == "scratch":

        def make(t: torch.Tensor) -> torch.Tensor:
            buffer = torch.zeros(wanted, dtype=t.dtype)
            buffer.copy_(t)
            if dims:
                buffer.select(dim, 0).zero_()
            return buffer
    elif kind == "cat" and size > 1:
        cut = draw(st.integers(1, size - 1))
        make = lambda t: torch.cat([t.narrow(dim, cut, size - cut), t.narrow(dim, 0, cut)], dim)  # noqa: E731
    elif kind == "stack":
        make = lambda t: torch.stack([t + 0, t])[1]  # noqa: E731
    elif kind == "rows":
        order = draw(st.permutations(range(size)))
        make = lambda t: t.index_select(dim, torch.tensor(order))  # noqa: E731
    elif kind == "index_put":

        def make(t: torch.Tensor) -> torch.Tensor:
            buffer = torch.zeros(wanted, dtype=t.dtype)
            rows = torch.arange(wanted[0] - 1, -1, -1)
            buffer[rows] = t
            return buffer
    elif kind == "zeros" and size > 1:
        inner = resized(size - 1)
        make = lambda t: torch.cat([torch.zeros(resized(1), dtype=t.dtype), t], dim)  # noqa: E731
    else:
        return "", lambda t: t, wanted
    text, outer, shape = draw(origins(inner, depth - 1))
    return f"{text}>{kind}", lambda t: make(outer(t)), shape


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "copy_": lambda d, s: d.copy_(s),
    "setitem": lambda d, s: d.__setitem__(..., s),
    "foreach": lambda d, s: torch._foreach_copy_([d], [s]),
    "out": lambda d, s: torch.add(s, 0, out=d) if d.is_contiguous() else d.copy_(s),
    "index_copy": lambda d, s: d.index_copy_(0, torch.arange(d.shape[0]), s.to(d.dtype)) if d.dim() else d.copy_(s),
    "index_put": lambda d, s: d.__setitem__(torch.arange(d.shape[0]), s.to(d.dtype)) if d.dim() else d.copy_(s),
    "fill first": lambda d, s: (d.zero_(), d.copy_(s)),
    "add": lambda d, s: (d.zero_(), d.add_(s)),
}


@st.composite
def programs(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[dict[str, Any]]]:
    shapes = {
        name: tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=3))) for name in ("p", "q")
    }
    steps = []
    for index in range(draw(st.integers(1, 4))):
        target = draw(st.sampled_from(["p", "q"]))
        text, where, wanted = draw(destinations(shapes[target]))
        origin, make, source_shape = draw(origins(wanted))
        steps.append(
            {
                "name": f"s{index}",
                "target": target,
                "where": where,
                "make": make,
                "shape": source_shape,
                "write": draw(st.sampled_from(sorted(WRITES))),
                "through": draw(st.sampled_from(["loader", "direct"])),  # a direct constant has no source: refused
                "text": f"{origin} -> {target}[{text}]",
            }
        )
    return shapes, steps


def build(shapes: Mapping[str, tuple[int, ...]], steps: list[dict[str, Any]], dtype: torch.dtype) -> LoadingModel:
    by_name = {step["name"]: step for step in steps}

    def loader(param: torch.Tensor, value: torch.Tensor, part: str) -> None:
        step = by_name[part]
        WRITES[step["write"]](step["where"](param.data), step["make"](value))

    def load(model: Any, weights: Any) -> None:
        for name, value in weights:
            step = by_name[name]
            param = getattr(model, step["target"])
            constants = any(kind in step["text"] for kind in ("zeros", "scratch", "pad", "index_put"))
            if step["through"] == "loader" or constants or step["write"] in ("fill first", "add"):
                param.weight_loader(param, value, part=name)
            else:
                loader(param, value, name)

    model = LoadingModel(load, **{n: torch.full(shape, SENTINEL, dtype=dtype) for n, shape in shapes.items()})
    for name in shapes:
        getattr(model, name).weight_loader = loader
    return model


@random_examples
@given(programs(), st.sampled_from([torch.int64, torch.float64]))
def test_random_loaders_do_what_the_manifest_says(
    program: tuple[dict[str, tuple[int, ...]], list[dict[str, Any]]], dtype: torch.dtype
) -> None:
    shapes, steps = program
    sources = {step["name"]: numbered(step["shape"], 1000 * (i + 1), torch.int64) for i, step in enumerate(steps)}
    with tempfile.TemporaryDirectory() as folder:
        manifest = probe(build(shapes, steps, dtype), checkpoint_of(Path(folder), sources))

    def load(weights: Mapping[str, torch.Tensor]) -> nn.Module:
        model = build(shapes, steps, dtype)
        with torch.no_grad():
            model.load_weights((name, value.clone()) for name, value in weights.items())
        return model

    check(manifest, load, sources)
