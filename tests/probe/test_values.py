"""Case 27: a load that reads values gets the real ones from the file, or a clear error; never an invented one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from probe_cli.checkpoint import Checkpoint
from probe_cli.errors import EngineError, ProbeError
from probe_cli.manifest import Manifest
from probe_cli.probe import probe
from tests.oracle import LoadingModel, applications, checkpoint_of, each

VALUES = {"scale": torch.tensor([2.0, 0.0, 3.0]), "w": torch.arange(4.0)}


#: What the load saw. A list that the model can reach would be emptied again when the probe is over.
SEEN: list[Any] = []


def _model(read: Callable[[Any, torch.Tensor], Any]) -> LoadingModel:
    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "scale":
            SEEN.append(read(model, value))
            model.s.copy_(value)
        else:
            model.p.copy_(value)

    return LoadingModel(each(step), p=torch.zeros(4), s=torch.zeros(3))


def _probe(tmp_path: Path, read: Callable[[Any, torch.Tensor], Any], **options: Any) -> tuple[list[Any], Manifest]:
    SEEN.clear()
    manifest = probe(_model(read), checkpoint_of(tmp_path, VALUES), **options)
    return list(SEEN), manifest


READS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Any]] = {
    "item": (lambda m, w: w[2].item(), 3.0),
    "float": (lambda m, w: float(w[0]), 2.0),
    "int": (lambda m, w: int(w[2]), 3),
    "bool": (lambda m, w: bool(w[1]), False),
    "bool of a comparison": (lambda m, w: bool((w > 2).any()), True),
    "index": (lambda m, w: [10, 11, 12][w[0].long()], 12),
    "equal": (lambda m, w: torch.equal(w, torch.tensor([2.0, 0.0, 3.0])), True),
    "equal to another": (lambda m, w: torch.equal(w, torch.ones(3)), False),
    "allclose": (lambda m, w: torch.allclose(w, torch.tensor([2.0, 0.0, 3.0])), True),
    "in": (lambda m, w: 3.0 in w, True),
    "tolist": (lambda m, w: w.tolist(), [2.0, 0.0, 3.0]),
    "numpy": (lambda m, w: w.numpy().sum(), 5.0),
    "iteration": (lambda m, w: [float(x) for x in w], [2.0, 0.0, 3.0]),
    "format": (lambda m, w: f"{w[0]:.1f}", "2.0"),
    "max": (lambda m, w: w.max().item(), 3.0),
    "through operations": (lambda m, w: ((w * 2)[::2] + 1).to(torch.int64).tolist(), [5, 7]),
    "through a view": (lambda m, w: w.view(torch.int32)[0].item(), 1 << 30),
    "through a transposed view": (lambda m, w: w.view(3, 1).t()[0, 2].item(), 3.0),
    "nonzero": (lambda m, w: w.nonzero().flatten().tolist(), [0, 2]),
    "mask": (lambda m, w: w[w > 0].tolist(), [2.0, 3.0]),
    "unique": (lambda m, w: torch.unique(w).tolist(), [0.0, 2.0, 3.0]),
    "masked_select": (lambda m, w: w.masked_select(w > 0).shape, (2,)),
    "where": (lambda m, w: torch.where(w > 0)[0].tolist(), [0, 2]),
    "cpu": (lambda m, w: w.cpu().sum().item(), 5.0),
    "model": (lambda m, w: m.p.sum().item(), 0.0),
    "is_nonzero": (lambda m, w: w[0].is_nonzero(), True),
    "topk": (lambda m, w: w.topk(1).indices.item(), 2),
    "cat": (lambda m, w: torch.cat([w, torch.tensor([9.0])])[3].item(), 9.0),
}


@pytest.mark.parametrize("kind", READS)
def test_small_values_are_read_from_the_file(kind: str, tmp_path: Path) -> None:
    read, value = READS[kind]
    seen, manifest = _probe(tmp_path, read)
    assert seen == [value]
    assert [(a.sources, a.tensor) for a in applications(manifest)] == [(("scale",), "s"), (("w",), "p")]


@pytest.mark.parametrize("kind", sorted(set(READS) - {"model"}))
def test_over_the_limit_is_an_error_with_source_op_and_line(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ProbeError) as failure:
        _probe(tmp_path, READS[kind][0], value_limit=11)
    text = str(failure.value)
    assert "source scale: the load reads its value (" in text
    assert "test_values.py:" in text
    assert "\n" not in text
    assert failure.value.hint is not None
    assert "--value-limit" in failure.value.hint


def test_the_limit_itself_is_still_read(tmp_path: Path) -> None:
    assert _probe(tmp_path, READS["item"][0], value_limit=12)[0] == [3.0]


@pytest.mark.parametrize("kind", ["item", "equal", "tolist", "numpy", "nonzero"])
def test_headers_alone_are_an_error(kind: str, tmp_path: Path) -> None:
    wire = tmp_path / "names.json"
    wire.write_text('[{"name": "scale", "dtype": "F32", "shape": [3]}, {"name": "w", "dtype": "F32", "shape": [4]}]')
    with pytest.raises(
        ProbeError, match=r"source scale: the load reads its value .* at .*test_values.py:.*not at hand"
    ):
        probe(_model(READS[kind][0]), Checkpoint.from_wire(wire))


def test_a_swallowed_error_still_ends_the_build(tmp_path: Path) -> None:
    def read(model: Any, value: torch.Tensor) -> float:
        try:
            return value[0].item()
        except Exception:
            return 1.0

    with pytest.raises(ProbeError, match="source scale: the load reads its value"):
        _probe(tmp_path, read, value_limit=1)


NEVER_KNOWN: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "written parameter": lambda m, w: (m.s.copy_(w), m.s[0].item()),
    "written parameter, nonzero": lambda m, w: (m.s.copy_(w), m.s.nonzero()),
    "written parameter, mask": lambda m, w: (m.s.copy_(w), m.s[m.s > 0]),
    "written parameter, equal": lambda m, w: (m.s.copy_(w), torch.equal(m.s, w)),
    "written parameter, tolist": lambda m, w: (m.s.copy_(w), m.s.tolist()),
    "written parameter, numpy": lambda m, w: (m.s.copy_(w), m.s.numpy()),
    "written parameter, computed": lambda m, w: (m.s.copy_(w), (m.s * 2).sum().item()),
    "assigned data": lambda m, w: (setattr(m.s, "data", w * 1), m.s.sum().item()),
    "changed source": lambda m, w: (w.add_(1), w[0].item()),
    "scratch filled from a source": lambda m, w: torch.zeros(3).copy_(w)[0].item(),
    "scratch of scratch": lambda m, w: torch.ones(3).copy_(torch.zeros(3).copy_(w))[0].item(),
    "scratch of scratch, nonzero": lambda m, w: torch.ones(3).copy_(torch.zeros(3).copy_(w)).nonzero(),
    "out of a source": lambda m, w: torch.add(w, 1, out=torch.zeros(3))[0].item(),
}


@pytest.mark.parametrize("kind", NEVER_KNOWN)
def test_what_a_dry_run_has_not_written_is_never_invented(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"the load reads its value \(.*\) at .*test_values.py"):
        _probe(tmp_path, NEVER_KNOWN[kind])


def test_a_value_computed_before_its_input_changed_is_refused(tmp_path: Path) -> None:
    def read(model: Any, value: torch.Tensor) -> float:
        factor = torch.tensor(2.0)
        product = value * factor
        factor.mul_(100)
        return product[0].item()

    with pytest.raises(ProbeError, match="changed since"):
        _probe(tmp_path, read)


def test_scratch_without_any_source_keeps_its_value(tmp_path: Path) -> None:
    def read(model: Any, value: torch.Tensor) -> list[float]:
        table = torch.zeros(3)
        table[1] = 5
        table += torch.arange(3)
        return table.tolist()

    assert _probe(tmp_path, read)[0] == [[0.0, 6.0, 2.0]]


def test_printing_a_tensor_reads_no_value(tmp_path: Path) -> None:
    """A log line must not end a build, nor show what the load would not have left there."""

    def read(model: Any, value: torch.Tensor) -> str:
        model.s.copy_(value)
        return f"{value} {model.s}"

    (text,) = _probe(tmp_path, read, value_limit=1)[0]
    assert "size=(3,)" in text
    assert "0." not in text


def test_a_loader_may_choose_by_value(tmp_path: Path) -> None:
    """The value decides where the tensor goes, and the manifest follows."""

    def step(model: Any, name: str, value: torch.Tensor) -> None:
        if name == "scale":
            model.choice = int(value[2])
        else:
            (model.p if model.choice == 3 else model.q).copy_(value)

    model = LoadingModel(each(step), p=torch.zeros(4), q=torch.zeros(4))
    (application,) = applications(probe(model, checkpoint_of(tmp_path, VALUES)))
    assert (application.sources, application.tensor) == (("w",), "p")
    assert not hasattr(model, "choice")


def test_meta_models_have_no_values(tmp_path: Path) -> None:
    model = _model(lambda m, w: m.p.sum().item()).to("meta")
    with pytest.raises(ProbeError, match="cannot be derived from the checkpoint"):
        probe(model, checkpoint_of(tmp_path, VALUES))


def test_a_file_that_changed_after_opening_is_an_error(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, VALUES)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(EngineError, match="source scale"):
        probe(_model(READS["item"][0]), checkpoint)
