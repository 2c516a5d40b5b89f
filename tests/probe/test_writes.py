"""No write reaches a tensor, by whatever road; each is attributed, or the build ends: op, destination, source, line."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from probe_cli.errors import EngineError, ProbeError
from probe_cli.manifest.schema import View
from probe_cli.probe import probe
from tests.oracle import LoadingModel, applications, checkpoint_of, each, snapshot_of, state_of, tensor

Step = Callable[[Any, str, torch.Tensor], object]

SOURCE = torch.arange(4.0) + 1


def _model(step: Step) -> LoadingModel:
    model = LoadingModel(each(step), p=torch.full((4,), -1.0), q=torch.full((4,), -2.0))
    model.p.weight_loader = lambda param, value, part=None: step(model, part, value)
    return model


def _probe(tmp_path: Path, model: nn.Module) -> Any:
    before, seen = state_of(model), snapshot_of(model)
    try:
        return probe(model, checkpoint_of(tmp_path, {"a": SOURCE}))
    finally:
        assert snapshot_of(model) == seen
        after = state_of(model)
        assert all(torch.equal(before[name], after[name]) for name in before), "a write reached the model"


ATTRIBUTED: dict[str, Step] = {
    "copy_": lambda m, n, w: m.p.copy_(w),
    "data.copy_": lambda m, n, w: m.p.data.copy_(w),
    "setitem ellipsis": lambda m, n, w: m.p.__setitem__(..., w),
    "setitem slice": lambda m, n, w: m.p.__setitem__(slice(None), w),
    "setitem on data": lambda m, n, w: m.p.data.__setitem__(slice(0, 4), w),
    "add_": lambda m, n, w: m.p.add_(w),
    "mul_": lambda m, n, w: m.p.mul_(w),
    "lerp_": lambda m, n, w: m.p.lerp_(w, 0.5),
    "addcmul_": lambda m, n, w: m.p.addcmul_(w, w),
    "index_put_": lambda m, n, w: m.p.index_put_((torch.arange(4),), w),
    "index_copy_": lambda m, n, w: m.p.index_copy_(0, torch.arange(4), w),
    "index_add_": lambda m, n, w: m.p.index_add_(0, torch.arange(4), w),
    "scatter_": lambda m, n, w: m.p.scatter_(0, torch.arange(4), w),
    "masked_scatter_": lambda m, n, w: m.p.masked_scatter_(torch.ones(4, dtype=torch.bool), w),
    "put_": lambda m, n, w: m.p.put_(torch.arange(4), w),
    "set_ tensor": lambda m, n, w: m.p.set_(w),
    "set_ storage": lambda m, n, w: m.p.set_(w.untyped_storage(), 0, (4,), (1,)),
    ".data =": lambda m, n, w: setattr(m.p, "data", w),
    ".data = computed": lambda m, n, w: setattr(m.p, "data", w * 2),
    "foreach_copy_": lambda m, n, w: torch._foreach_copy_([m.p], [w]),
    "foreach_add_": lambda m, n, w: torch._foreach_add_([m.p], [w]),
    "foreach_mul then copy": lambda m, n, w: torch._foreach_copy_([m.p], torch._foreach_mul([w], 2.0)),
    "out= add": lambda m, n, w: torch.add(w, 1, out=m.p),
    "out= cat": lambda m, n, w: torch.cat([w[:2], w[2:]], out=m.p),
    "out= index_select": lambda m, n, w: torch.index_select(w, 0, torch.arange(4), out=m.p),
    "new parameter": lambda m, n, w: setattr(m, "p", nn.Parameter(w * 1, requires_grad=False)),
    "register_parameter": lambda m, n, w: m.register_parameter("p", nn.Parameter(w, requires_grad=False)),
    "_parameters": lambda m, n, w: m._parameters.__setitem__("p", nn.Parameter(w + 0, requires_grad=False)),
    "fill_ with a tensor": lambda m, n, w: m.p.fill_(w[0]),
    "inference_mode": lambda m, n, w: torch.inference_mode()(lambda: m.p.copy_(w))(),
    "swap halves in place": lambda m, n, w: m.p.copy_(torch.cat([w[2:], w[:2]])),
}


@pytest.mark.parametrize("kind", ATTRIBUTED)
def test_a_direct_write_is_attributed_to_its_source(kind: str, tmp_path: Path) -> None:
    manifest = _probe(tmp_path, _model(ATTRIBUTED[kind]))
    (application,) = applications(manifest)
    assert (application.sources, application.tensor, application.direct) == (("a",), "p", True)
    assert application.attribution == "storage"
    assert tensor(manifest, "", "q").coverage is not None
    covered = tensor(manifest, "", "p").coverage
    assert covered is None or (covered.gap_elements, covered.exact) == (0, False)
    assert manifest.document.summary.direct_writes == 1


THROUGH_A_LOADER: dict[str, Step] = {
    "fill_": lambda m, n, w: m.p.fill_(1.0),
    "zero_": lambda m, n, w: m.p.zero_(),
    "clamp_": lambda m, n, w: m.p.clamp_(0),
    "masked_fill_": lambda m, n, w: m.p.masked_fill_(w > 1, 0.0),
    "index_fill_": lambda m, n, w: m.p.index_fill_(0, torch.tensor([1, 3]), 0.0),
    "normal_": lambda m, n, w: m.p.normal_(),
    "foreach_zero_": lambda m, n, w: torch._foreach_zero_([m.p]),
    "nn.init": lambda m, n, w: nn.init.constant_(m.p, 3.0),
    "neg_": lambda m, n, w: m.p.neg_(),
    "setitem scalar": lambda m, n, w: m.p.__setitem__(slice(0, 2), 5.0),
    # What is put into `_parameters` is only noticed when the load is over.
    **{kind: step for kind, step in ATTRIBUTED.items() if kind != "_parameters"},
}


@pytest.mark.parametrize("kind", THROUGH_A_LOADER)
def test_a_write_inside_a_loader_is_part_of_its_application(kind: str, tmp_path: Path) -> None:
    step = THROUGH_A_LOADER[kind]
    model = _model(step)
    model.load = each(lambda m, name, value: m.p.weight_loader(m.p, value, name))
    (application,) = applications(_probe(tmp_path, model))
    assert (application.sources, application.tensor, application.direct) == (("a",), "p", False)
    assert application.selectors == {"part": "a"}


@pytest.mark.parametrize("kind", sorted(set(THROUGH_A_LOADER) - set(ATTRIBUTED) - {"masked_fill_"}))
def test_a_direct_write_of_nothing_that_has_a_source_ends_the_build(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ProbeError) as failure:
        _probe(tmp_path, _model(THROUGH_A_LOADER[kind]))
    text = str(failure.value)
    assert " writes p outside any weight loader" in text
    assert "aten::" in text
    assert "source a" in text
    assert "test_writes.py:" in text
    assert "\n" not in text


def _dlpack(model: Any, name: str, value: torch.Tensor) -> None:
    torch.from_dlpack(model.p).fill_(1)


def _numpy_dlpack(model: Any, name: str, value: torch.Tensor) -> None:
    np.from_dlpack(model.p)


BARE_MEMORY: dict[str, tuple[str, Step]] = {
    "numpy": ("numpy", lambda m, n, w: m.p.numpy().__setitem__(0, 5.0)),
    "numpy of data": ("numpy", lambda m, n, w: m.p.data.numpy().fill(5.0)),
    "asarray": ("numpy", lambda m, n, w: np.asarray(m.p).__setitem__(0, 5.0)),
    "numpy of a source": ("numpy", lambda m, n, w: w.numpy().__imul__(2)),
    "from_dlpack": ("__dlpack__", _dlpack),
    "numpy from_dlpack": ("__dlpack__", _numpy_dlpack),
    "to_dlpack": ("to_dlpack", lambda m, n, w: torch.utils.dlpack.to_dlpack(m.p)),
    "storage fill_": ("UntypedStorage.fill_", lambda m, n, w: m.p.untyped_storage().fill_(1)),
    "storage setitem": ("UntypedStorage.__setitem__", lambda m, n, w: m.p.untyped_storage().__setitem__(0, 1)),
    "storage resize_": ("UntypedStorage.resize_", lambda m, n, w: m.p.untyped_storage().resize_(0)),
    "storage copy_": (
        "UntypedStorage.copy_",
        lambda m, n, w: m.p.untyped_storage().copy_(torch.ones(4).untyped_storage()),
    ),
    "swap_tensors": ("swap_tensors", lambda m, n, w: torch.utils.swap_tensors(m.p, nn.Parameter(w))),
    "resize_": ("aten::resize_", lambda m, n, w: m.p.resize_(9)),
    "set_ nothing": ("aten::set_", lambda m, n, w: m.p.set_()),
}


@pytest.mark.parametrize("kind", BARE_MEMORY)
def test_writes_to_bare_memory_end_the_build(kind: str, tmp_path: Path) -> None:
    op, step = BARE_MEMORY[kind]
    with pytest.raises(ProbeError) as failure:
        _probe(tmp_path, _model(step))
    text = str(failure.value)
    assert op in text
    assert ("source a" if "of a source" in kind else "p ") in text
    assert "source a" in text
    assert "test_writes.py:" in text


@pytest.mark.parametrize("kind", BARE_MEMORY)
def test_loading_code_that_swallows_the_error_does_not_hide_it(kind: str, tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        with contextlib.suppress(Exception):
            BARE_MEMORY[kind][1](model, name, value)

    with pytest.raises(ProbeError, match=BARE_MEMORY[kind][0]):
        _probe(tmp_path, _model(step))


def test_swap_tensors_imported_by_name_leaves_both_tensors_whole(tmp_path: Path) -> None:
    swap = torch.utils.swap_tensors
    with pytest.raises(ProbeError, match="swap_tensors"):
        _probe(tmp_path, _model(lambda m, n, w: swap(m.p, nn.Parameter(w * 1))))


def test_reading_with_numpy_is_fine(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        rows = model.q.numpy()
        assert rows.tolist() == [-2.0] * 4
        model.p.copy_(value)

    (application,) = applications(_probe(tmp_path, _model(step)))
    assert application.tensor == "p"


def test_a_tensor_that_is_nobody_s_is_refused(tmp_path: Path) -> None:
    outside = torch.zeros(4)
    with pytest.raises(
        ProbeError, match=r"aten::copy_ writes to a \(4,\) tensor that is neither.*source a, at .*test_writes"
    ):
        _probe(tmp_path, _model(lambda m, n, w: outside.copy_(w)))
    assert outside.tolist() == [0.0] * 4


@torch.library.custom_op("probe_manifest_tests::pour", mutates_args={"out"})
def pour(out: torch.Tensor, value: torch.Tensor) -> None:
    out.copy_(value)


def test_a_custom_operator_that_declares_its_write_is_attributed_as_an_upper_bound(tmp_path: Path) -> None:
    manifest = _probe(tmp_path, _model(lambda m, n, w: pour(m.p, w)))
    (application,) = applications(manifest)
    assert application.sources == ("a",)
    assert [(w.source, w.exact) for w in application.writes] == [(0, False)]
    covered = tensor(manifest, "", "p").coverage
    assert covered is not None
    assert not covered.exact


_LIBRARY = torch.library.Library("probe_manifest_tests2", "DEF")
_LIBRARY.define("secretly(Tensor out, Tensor value) -> ()")
_LIBRARY.impl("secretly", lambda out, value: out.copy_(value), "CompositeExplicitAutograd")


def test_a_custom_operator_that_hides_its_write_ends_the_build(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"probe_manifest_tests2::secretly.*declares no write.*source a.*test_writes"):
        _probe(tmp_path, _model(lambda m, n, w: torch.ops.probe_manifest_tests2.secretly(m.p, w)))


MISFITS: dict[str, Step] = {
    "copy_": lambda m, n, w: m.p.copy_(w[:3]),
    "add_": lambda m, n, w: m.p.add_(w[:3]),
    "index_copy_": lambda m, n, w: m.p.index_copy_(0, torch.arange(3), w),
    "out= of another dtype": lambda m, n, w: torch.add(m.q, 1.5, out=torch.empty(4, dtype=torch.int64)),
    "setitem": lambda m, n, w: m.p.__setitem__(slice(0, 2), w),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_what_would_fail_really_fails_in_the_dry_run(kind: str, tmp_path: Path) -> None:
    with torch.no_grad(), pytest.raises((RuntimeError, IndexError)):
        MISFITS[kind](_model(MISFITS[kind]), "a", SOURCE.clone())
    with pytest.raises(EngineError, match=r"failed at source a"):
        _probe(tmp_path, _model(MISFITS[kind]))


def test_part_of_a_write_that_is_a_constant_is_covered_but_reads_nothing(tmp_path: Path) -> None:
    manifest = _probe(tmp_path, _model(lambda m, n, w: m.p.copy_(torch.cat([w[:2], torch.zeros(2)]))))
    (application,) = applications(manifest)
    assert [(w.source, w.src, w.dst) for w in application.writes] == [
        (None, None, None),
        (0, View(0, (2,), (1,)), View(0, (2,), (1,))),
    ]
    assert tensor(manifest, "", "p").coverage is None
    assert manifest.document.summary.bytes_read == 8


def test_a_constant_hides_the_source_beneath_it(tmp_path: Path) -> None:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        buffer = torch.zeros(4)
        buffer.copy_(value)
        buffer[:2] = 0
        model.p.copy_(buffer)

    manifest = _probe(tmp_path, _model(step))
    assert manifest.document.summary.bytes_read == 8
    writes = applications(manifest)[0].writes
    assert [(w.source, w.src) for w in writes] == [(None, None), (0, View(2, (2,), (1,)))]


def test_index_fill_covers_its_rows_alone(tmp_path: Path) -> None:
    model = _model(THROUGH_A_LOADER["index_fill_"])
    model.load = each(lambda m, name, value: m.p.weight_loader(m.p, value, name))
    covered = tensor(_probe(tmp_path, model), "", "p").coverage
    assert covered is not None
    assert covered.gaps == (((0, 1),), ((2, 3),))


def test_masked_fill_says_that_its_rows_are_not_known(tmp_path: Path) -> None:
    model = _model(THROUGH_A_LOADER["masked_fill_"])
    model.load = each(lambda m, name, value: m.p.weight_loader(m.p, value, name))
    covered = tensor(_probe(tmp_path, model), "", "p").coverage
    assert covered is not None
    assert not covered.exact


@pytest.mark.parametrize("direct", [True, False])
def test_parameters_that_share_one_flat_storage_are_told_apart(direct: bool, tmp_path: Path) -> None:
    """Two views of one buffer, of equal shape: each write belongs to the one it falls on."""
    flat = torch.zeros(8)

    def loader(param: torch.Tensor, value: torch.Tensor) -> None:
        param.data.copy_(value)

    def load(model: Any, weights: Any) -> None:
        for name, value in weights:
            param = model.p if name == "a" else model.q
            loader(param, value) if direct else param.weight_loader(param, value)

    model = LoadingModel(load, p=flat[:4], q=flat[4:])
    model.p.weight_loader = model.q.weight_loader = loader
    manifest = probe(model, checkpoint_of(tmp_path, {"a": SOURCE, "b": SOURCE + 4}))
    assert [(a.sources, a.tensor, a.writes[0].dst) for a in applications(manifest)] == [
        (("a",), "p", None),
        (("b",), "q", None),
    ]
    assert tensor(manifest, "", "p").coverage is None
    assert tensor(manifest, "", "q").coverage is None


def test_one_write_over_the_flat_storage_reaches_every_parameter_on_it(tmp_path: Path) -> None:
    flat = torch.zeros(8)
    model = LoadingModel(each(lambda m, n, w: m.flat.copy_(w)), p=flat[:4], q=flat[4:].view(2, 2))
    model.flat = flat
    manifest = probe(model, checkpoint_of(tmp_path, {"a": torch.arange(8.0)}))
    assert [
        (a.sources, a.tensor, next(w for w in a.writes if w.source is not None).src) for a in applications(manifest)
    ] == [
        (("a",), "p", View(0, (4,), (1,))),
        (("a",), "q", View(4, (2, 2), (2, 1))),
    ]
    assert tensor(manifest, "", "q").coverage is None


def test_a_transposed_alias_is_followed(tmp_path: Path) -> None:
    """`t_()` changes what the alias is, not what the model holds."""
    model = LoadingModel(each(lambda m, n, w: m.p.data.t_().copy_(w.view(2, 2))), p=torch.zeros(2, 2))
    manifest = probe(model, checkpoint_of(tmp_path, {"a": SOURCE}))
    (write,) = applications(manifest)[0].writes
    assert (write.src, write.dst) == (View(0, (2, 2), (2, 1)), View(0, (2, 2), (1, 2)))
    assert not write.computed


def test_nothing_is_left_on_torch(tmp_path: Path) -> None:
    names = ("weight_loader", "data", "tolist", "numpy", "__dlpack__", "_str")
    before = {name: vars(torch.Tensor).get(name) for name in names}
    functions = (torch.to_dlpack, torch.utils.swap_tensors, torch._tensor_str._str, torch._C._swap_tensor_impl)
    for kind in ("copy_", ".data ="):
        _probe(tmp_path, _model(ATTRIBUTED[kind]))
    gc.collect()
    assert {name: vars(torch.Tensor).get(name) for name in names} == before
    assert "weight_loader" not in vars(torch.Tensor)
    assert functions == (torch.to_dlpack, torch.utils.swap_tensors, torch._tensor_str._str, torch._C._swap_tensor_impl)
    assert "fill_" not in vars(torch.UntypedStorage)


def test_a_tensor_that_is_replaced_by_a_smaller_one_keeps_no_region_beyond_its_end(tmp_path: Path) -> None:
    """What was written before can only be stated as an upper bound of what is left."""

    def step(model: Any, name: str, value: torch.Tensor) -> None:
        model.p.data[1:].copy_(value[1:])
        model.p = nn.Parameter(value[:2] * 2, requires_grad=False)

    first, second = applications(_probe(tmp_path, _model(step)))[0].writes
    assert (first.dst, first.exact) == (None, False)
    assert (second.dst, second.exact, second.computed) == (None, True, True)


@torch.compile(backend="eager")
def _dequantized(value: torch.Tensor) -> torch.Tensor:
    return value * 2 + 1


@pytest.mark.parametrize("early", [True, False])
def test_compiled_functions_run_as_they_are_written(early: bool, tmp_path: Path) -> None:
    """The compiler traced the recorder, and the load failed in it."""

    def step(model: Any, name: str, value: torch.Tensor) -> None:
        @torch.compile
        def late(value: torch.Tensor) -> torch.Tensor:
            return value * 2 + 1

        model.p.data[:2].copy_((_dequantized if early else late)(value[:2]))

    compiler = torch.compile
    manifest = probe(LoadingModel(each(step), p=torch.zeros(4)), checkpoint_of(tmp_path, {"a": torch.arange(4.0)}))
    (application,) = applications(manifest)
    (write,) = application.writes
    assert (application.sources, write.src, write.dst, write.computed) == (
        ("a",),
        View(0, (2,), (1,)),
        View(0, (2,), (1,)),
        True,
    )
    assert torch.compile is compiler
    assert torch.equal(_dequantized(torch.ones(2)), torch.full((2,), 3.0))


@pytest.mark.parametrize("kind", ["index_copy_", "index_put_", "rows of a parameter"])
def test_an_indexed_write_of_source_and_constant_covers_both(kind: str, tmp_path: Path) -> None:
    """What of an indexed row comes from no source is written all the same: it is no gap."""
    steps: dict[str, Step] = {
        "index_copy_": lambda m, n, w: m.p.index_copy_(0, torch.arange(4), torch.cat([w[:2], torch.zeros(2)])),
        "index_put_": lambda m, n, w: m.p.__setitem__(torch.arange(4), torch.cat([torch.zeros(2), w[:2]])),
        "rows of a parameter": lambda m, n, w: m.p.view(1, 4).index_copy_(
            0, torch.arange(1), torch.cat([torch.zeros(1), w[:3]]).view(1, 4)
        ),
    }
    assert tensor(_probe(tmp_path, _model(steps[kind])), "", "p").coverage is None


ADDING: dict[str, tuple[Step, bool]] = {
    "add_": (lambda m, n, w: m.p.add_(w), True),
    "add_ to a part": (lambda m, n, w: (m.p[:2].copy_(w[:2]), m.p.add_(w)), True),
    "index_add_": (lambda m, n, w: m.p.index_add_(0, torch.arange(4), w), True),
    "accumulate": (lambda m, n, w: m.p.index_put_((torch.arange(4),), w, accumulate=True), True),
    "after halves": (lambda m, n, w: (m.p[:2].copy_(w[:2]), m.p[2:].copy_(w[2:]), m.p.add_(w)), False),
    "after copy_": (lambda m, n, w: (m.p.copy_(w), m.p.mul_(2), m.p.add_(w)), False),
    "index_put_": (lambda m, n, w: m.p.index_put_((torch.arange(4),), w), False),
    "out=": (lambda m, n, w: torch.mul(w, 2, out=m.p), False),
}


@pytest.mark.parametrize("kind", ADDING)
def test_what_is_added_to_values_from_before_the_load_is_marked(kind: str, tmp_path: Path) -> None:
    step, marked = ADDING[kind]
    manifest = _probe(tmp_path, _model(step))
    assert any(w.accumulates for a in applications(manifest) for w in a.writes) == marked
