"""Every kind of single change to a checkpoint is found by name, in each rank it touches (CASES 26 among them)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probe_cli.checkpoint import Checkpoint
from probe_cli.errors import UsageError
from probe_cli.manifest import Bundle, Manifest, digest
from probe_cli.manifest.check import CheckReport, check, is_manifest_path
from probe_cli.manifest.check_config import CheckConfig
from probe_cli.manifest.check_identity import Expectations
from probe_cli.manifest.findings import CODES, Finding
from probe_cli.manifest.fold_findings import fold_findings
from probe_cli.manifest.schema import Layer
from probe_cli.report.findings_text import verdict
from probe_cli.topology import Rank, Topology
from tests.manifest import corpus
from tests.manifest.corpus import Tensors

MTP = "model.mtp.0.proj.weight"
QUIET = CheckConfig().with_flags(ignore=["PM105"])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(corpus.write(tmp_path_factory.mktemp("original"), corpus.tensors()))


@pytest.fixture(scope="module")
def bundle(original: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus.bundle(original).write(tmp_path_factory.mktemp("bundles") / "bundle")


def run(bundle: Path, folder: Path, changed: Tensors, config: CheckConfig = QUIET) -> CheckReport:
    return check([bundle], lambda: Checkpoint.open(corpus.write(folder, changed)), config=config)


def ranks_of(name: str) -> tuple[int, ...]:
    """The ranks that use a source, from its name alone."""
    expert = re.search(r"experts\.(\d)", name)
    return () if name == MTP else (int(expert[1]) // 2,) if expert else (0, 1)


def only(report: CheckReport) -> Finding:
    (finding,) = report.all_findings()
    return finding


def test_the_checkpoint_it_was_built_from_is_clean(bundle: Path, tmp_path: Path) -> None:
    report = run(bundle, tmp_path, corpus.tensors())
    assert (report.exit_code, report.all_findings()) == (0, ())
    assert (report.checkpoint_sources, report.manifests[0].ranks) == (len(corpus.tensors()), (0, 1))


@pytest.mark.parametrize("name", [name for name in corpus.tensors() if name != MTP])
def test_a_dropped_source_is_named_in_each_rank_that_needs_it(name: str, bundle: Path, tmp_path: Path) -> None:
    changed = corpus.tensors()
    del changed[name]
    report = run(bundle, tmp_path, changed)
    finding = only(report)
    assert (finding.code, finding.subject, finding.ranks) == ("PM101", name, ranks_of(name))
    assert len(finding.layers) == 1
    assert name.startswith(finding.layers[0].removesuffix(".qkv_proj"))
    assert report.exit_code == 1


@pytest.mark.parametrize("name", [name for name in corpus.tensors() if "layers.1" in name or "norm" in name])
@pytest.mark.parametrize("kind", ["rename", "reshape", "retype", "move"])
def test_a_changed_source_is_named_in_each_rank_that_needs_it(
    name: str, kind: str, bundle: Path, tmp_path: Path
) -> None:
    changed = corpus.tensors()
    dtype, shape, file = changed[name]
    if kind == "rename":
        del changed[name]
        changed[name + "_renamed"] = (dtype, shape, file)
    elif kind == "reshape":
        changed[name] = (dtype, (*shape, 2), file)
    elif kind == "retype":
        changed[name] = ("F16" if dtype == "BF16" else "F64", shape, file)
    else:
        changed[name] = (dtype, shape, "b.safetensors" if file == "a.safetensors" else "a.safetensors")
    report = run(bundle, tmp_path, changed)
    finding = only(report)
    code = {"rename": "PM101", "reshape": "PM102", "retype": "PM103", "move": "PM107"}[kind]
    assert (finding.code, finding.subject, finding.ranks) == (code, name, ranks_of(name))
    assert report.exit_code == (0 if kind == "move" else 1)
    if kind == "rename":
        assert finding.found == name + "_renamed"


def test_a_source_in_two_files_is_named(bundle: Path, tmp_path: Path) -> None:
    corpus.write(tmp_path, corpus.tensors(), index=False)
    name = "model.norm.weight"
    corpus.write(tmp_path, {name: ("BF16", (8,), "c.safetensors")}, index=False)
    report = check([bundle], lambda: Checkpoint.open(tmp_path), config=QUIET)
    assert (only(report).code, report.exit_code) == ("PM109", 2)
    assert name in only(report).message


def test_a_truncated_file_is_named(bundle: Path, tmp_path: Path) -> None:
    corpus.write(tmp_path, corpus.tensors())
    data = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data[: len(data) - 5])
    report = check([bundle], lambda: Checkpoint.open(tmp_path), config=QUIET)
    assert (only(report).code, report.exit_code) == ("PM109", 2)
    assert "b.safetensors" in only(report).message


def test_a_shard_that_lacks_what_the_index_promises_is_named(bundle: Path, tmp_path: Path) -> None:
    corpus.write(tmp_path, corpus.tensors())
    less = corpus.tensors()
    del less["model.norm.weight"]
    corpus.write(tmp_path / "less", less)
    (tmp_path / "less" / "a.safetensors").replace(tmp_path / "a.safetensors")
    report = check([bundle], lambda: Checkpoint.open(tmp_path), config=QUIET)
    assert (only(report).code, report.exit_code) == ("PM109", 2)
    assert "a.safetensors" in only(report).message
    assert "model.norm.weight" in only(report).message


def test_an_extra_source_is_a_warning_and_an_error_if_strict(bundle: Path, tmp_path: Path) -> None:
    changed = corpus.tensors() | {"model.extra.bias": ("F32", (3,), "a.safetensors")}
    report = run(bundle, tmp_path, changed)
    assert (only(report).code, only(report).subject, only(report).severity) == ("PM104", "model.extra.bias", "warning")
    assert report.exit_code == 0
    strict = run(bundle, tmp_path, changed, QUIET.with_flags(strict=True))
    assert (only(strict).severity, strict.exit_code) == ("error", 1)


def test_a_source_that_no_rank_consumes_is_listed_with_the_reason(bundle: Path, tmp_path: Path) -> None:
    finding = only(run(bundle, tmp_path, corpus.tensors(), CheckConfig()))
    assert (finding.code, finding.subject) == ("PM105", MTP)
    assert finding.what == "no rank consumes it: load_weights passes over it"


def test_a_source_that_no_rank_consumes_may_go(bundle: Path, tmp_path: Path) -> None:
    changed = corpus.tensors()
    del changed[MTP]
    assert run(bundle, tmp_path, changed).all_findings() == ()


def test_a_checkpoint_cut_into_other_files_is_one_finding(bundle: Path, tmp_path: Path) -> None:
    changed = {name: (dtype, shape, "one.safetensors") for name, (dtype, shape, _) in corpus.tensors().items()}
    assert only(run(bundle, tmp_path, changed)).code == "PM108"


def test_a_wire_file_is_checked_as_a_checkpoint_is(bundle: Path, tmp_path: Path) -> None:
    changed = corpus.tensors()
    del changed["model.norm.weight"]
    rows = [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape, _) in changed.items()]
    (tmp_path / "names.json").write_bytes(msgspec.json.encode(rows))
    finding = only(check([bundle], lambda: Checkpoint.from_wire(tmp_path / "names.json"), config=QUIET))
    assert (finding.code, finding.subject, finding.ranks) == ("PM101", "model.norm.weight", (0, 1))


class TestNearMisses:
    def findings(self, bundle: Path, folder: Path, changed: Tensors) -> list[Finding]:
        return list(run(bundle, folder, changed).all_findings())

    def test_a_prefix_that_went(self, bundle: Path, tmp_path: Path) -> None:
        changed = {name.removeprefix("model."): value for name, value in corpus.tensors().items()}
        found = self.findings(bundle, tmp_path, changed)
        named = [f for f in found if f.code == "PM101"]
        assert len(named) == len(corpus.tensors()) - 2  # the head has no prefix, nothing loads the prediction layer
        assert {f.explanation for f in named} == {"in the checkpoint the prefix model. is missing"}
        assert all(f.found == f.subject.removeprefix("model.") for f in named)
        assert [(f.code, f.subject) for f in found if f.code != "PM101"] == [("PM104", "mtp.0.proj.weight")]

    def test_unused_sources_under_another_name_fold(self, original: Checkpoint, tmp_path: Path) -> None:
        """Each had an explanation of its own: 1,564 lines for DeepSeek-V3's prediction layer."""
        shapes = {f"model.mtp.{n}.proj.weight": ("BF16", (8, 8), "b.safetensors") for n in range(3)}
        before = Checkpoint.open(corpus.write(tmp_path / "old", {**corpus.tensors(), **shapes}))
        changed = {name.removeprefix("model."): value for name, value in {**corpus.tensors(), **shapes}.items()}
        report = run(corpus.bundle(before).write(tmp_path / "bundle"), tmp_path / "new", changed)
        found = [finding for finding in report.all_findings() if finding.code == "PM104"]
        assert {f.expected: f.subject for f in found} == {name: name.removeprefix("model.") for name in shapes}
        (folded,) = (f for f in fold_findings(report.all_findings()) if f.code == "PM104")
        assert (folded.subject, folded.count) == ("mtp.{0-2}.proj.weight", 3)
        assert (
            folded.explanation == "unused then too, under its old name: in the checkpoint the prefix model. is missing"
        )

    def test_a_prefix_that_came(self, bundle: Path, tmp_path: Path) -> None:
        changed = {f"policy.{name}": value for name, value in corpus.tensors().items()}
        found = self.findings(bundle, tmp_path, changed)
        assert {f.explanation for f in found if f.code == "PM101"} == {"in the checkpoint the prefix policy. is added"}

    def test_fused_experts_are_one_finding_per_layer_not_one_per_expert(self, bundle: Path, tmp_path: Path) -> None:
        """CASES 26: the trainer sends fused 3-D experts, the contract was built from per-expert files."""
        changed = {name: value for name, value in corpus.tensors().items() if ".experts." not in name}
        for block in range(2):
            prefix = f"model.layers.{block}.mlp.experts"
            changed[f"{prefix}.gate_up_proj"] = ("F8_E4M3", (4, 16, 8), "a.safetensors")
            changed[f"{prefix}.down_proj"] = ("F8_E4M3", (4, 8, 8), "a.safetensors")
            changed[f"{prefix}.gate_up_proj_scale"] = ("F32", (4, 2, 1), "a.safetensors")
            changed[f"{prefix}.down_proj_scale"] = ("F32", (4, 1, 1), "a.safetensors")
        found = self.findings(bundle, tmp_path, changed)
        assert [(f.code, f.subject, f.ranks) for f in found] == [
            ("PM106", "model.layers.0.mlp.experts", (0, 1)),
            ("PM106", "model.layers.1.mlp.experts", (0, 1)),
        ]
        assert found[0].what == "the contract wants 24 sources here, the checkpoint has them joined in 4"
        assert found[0].explanation == "fused 3-D experts against one tensor per expert"

    def test_fused_attention_against_separate(self, bundle: Path, tmp_path: Path) -> None:
        changed = corpus.tensors()
        for part in "qkv":
            del changed[f"model.layers.0.self_attn.{part}_proj.weight"]
        changed["model.layers.0.self_attn.qkv_proj.weight"] = ("BF16", (24, 8), "a.safetensors")
        (finding,) = self.findings(bundle, tmp_path, changed)
        assert (finding.code, finding.subject) == ("PM106", "model.layers.0.self_attn")
        assert finding.explanation == "fused attention projections against separate ones"

    def test_a_transposed_shape(self, bundle: Path, tmp_path: Path) -> None:
        changed = corpus.tensors()
        name = "model.layers.0.self_attn.o_proj.weight"
        changed[name] = ("BF16", (16, 8), "a.safetensors")
        (finding,) = self.findings(bundle, tmp_path, changed)
        assert (finding.code, finding.subject, finding.explanation) == ("PM102", name, "transposed")
        assert finding.what == "has shape [16, 8], the contract is for [8, 16]"

    def test_scale_for_inverse_scale(self, bundle: Path, tmp_path: Path) -> None:
        changed = {name.replace("_scale_inv", "_scale"): value for name, value in corpus.tensors().items()}
        found = self.findings(bundle, tmp_path, changed)
        assert len(found) == 24
        assert {f.code for f in found} == {"PM101"}
        assert found[0].explanation == (
            "in the checkpoint weight_scale_inv became weight_scale; "
            "exporters differ in which of the two is the inverse, so compare values before renaming"
        )

    def test_a_tied_head_left_out(self, bundle: Path, tmp_path: Path) -> None:
        changed = corpus.tensors()
        del changed["lm_head.weight"]
        (finding,) = self.findings(bundle, tmp_path, changed)
        assert finding.explanation is not None
        assert "tied embeddings" in finding.explanation

    def test_a_head_that_the_contract_ties(self, tmp_path: Path) -> None:
        less = corpus.tensors()
        del less["lm_head.weight"]
        tied = Checkpoint.open(corpus.write(tmp_path / "tied", less))
        without = corpus.bundle(tied, corpus.manifests(tied, change=lambda rank, made: made[:-1]))
        report = check([without], Checkpoint.open(corpus.write(tmp_path / "full", corpus.tensors())), config=QUIET)
        (finding,) = report.all_findings()
        assert (finding.code, finding.explanation) == (
            "PM104",
            "the manifest was built for a head that is tied to the embedding",
        )


class TestManifests:
    def test_missing_ranks_are_named(self, original: Checkpoint) -> None:
        part = corpus.bundle(original, corpus.manifests(original)[:1])
        report = check([part], original, config=QUIET)
        codes = {(f.code, f.subject, f.ranks) for f in report.all_findings()}
        assert ("PM201", "rank 1", (1,)) in codes
        assert report.exit_code == 1

    def test_a_swapped_rank_is_trouble_and_names_the_file(
        self, bundle: Path, original: Checkpoint, tmp_path: Path
    ) -> None:
        copy = Bundle.read(bundle).write(tmp_path / "copy")
        (copy / "rank-00000.json.gz").write_bytes((copy / "rank-00001.json.gz").read_bytes())
        report = check([copy], original, config=QUIET)
        assert (only(report).code, only(report).ranks, report.exit_code) == ("PM202", (0,), 2)
        assert only(report).file == str(copy / "rank-00000.json.gz")

    def test_an_edited_rank_is_trouble(self, bundle: Path, original: Checkpoint, tmp_path: Path) -> None:
        manifest = Manifest.read(bundle, rank=0)
        path = manifest.write(tmp_path / "rank.json")
        path.write_bytes(path.read_bytes().replace(b'"shard_id":"w1"', b'"shard_id":"w3"', 1))
        report = check([path], original, config=QUIET)
        assert (only(report).code, report.exit_code) == ("PM202", 2)
        assert "edited or damaged" in only(report).what

    def test_a_rank_alone_is_checked_for_what_it_needs(self, bundle: Path, tmp_path: Path) -> None:
        path = Manifest.read(bundle, rank=1).write(tmp_path / "rank.json")
        changed = corpus.tensors()
        del changed["model.layers.0.mlp.experts.0.up_proj.weight"]  # an expert of rank 0
        assert run(path, tmp_path / "c", changed).all_findings() == ()
        del changed["model.layers.0.mlp.experts.3.up_proj.weight"]
        finding = only(run(path, tmp_path / "d", changed))
        assert (finding.subject, finding.ranks) == ("model.layers.0.mlp.experts.3.up_proj.weight", (1,))

    def test_ranks_of_two_builds_do_not_belong_together(self, original: Checkpoint) -> None:
        first = corpus.manifests(original)[0]
        second = corpus.manifests(original, Topology(tp=4, ep=4))[1]
        report = check([first, second], config=QUIET)
        assert [(f.code, f.ranks) for f in report.findings] == [("PM204", (1,))]

    def test_unfed_parameters_are_named_with_their_ranks(self, original: Checkpoint) -> None:
        def change(rank: object, made: tuple[object, ...]) -> tuple[object, ...]:
            return (*made[:-1], msgspec.structs.replace(made[-1], applications=()))  # type: ignore[type-var]

        built = corpus.bundle(original, corpus.manifests(original, change=change))  # type: ignore[arg-type]
        found = {(f.code, f.subject, f.ranks) for f in check([built], original, config=QUIET).all_findings()}
        assert found == {("PM203", "lm_head.weight", (0, 1))}

    def test_nothing_to_check_is_trouble(self, bundle: Path) -> None:
        with pytest.raises(UsageError, match="no manifest to check"):
            check([])
        empty = Checkpoint(sources=())
        assert check([bundle], lambda: empty, config=QUIET).exit_code == 2

    @pytest.mark.parametrize(
        "config", [CheckConfig().with_flags(ignore=["PM"]), CheckConfig().with_flags(ignore=["PM109"])]
    )
    def test_what_cannot_be_read_is_trouble_even_if_it_is_not_shown(
        self, config: CheckConfig, bundle: Path, tmp_path: Path
    ) -> None:
        report = check([bundle], lambda: Checkpoint.open(tmp_path / "absent"), config=config)
        assert not [finding for finding in report.all_findings() if finding.code == "PM109"]
        assert (report.unread, report.exit_code) == (1, 2)
        assert verdict(report) == f"0 errors, 1 input could not be read, {report.suppressed} ignored"

    @pytest.mark.parametrize("whole", [False, True])
    def test_what_a_manifest_says_of_its_sources_is_not_taken_for_granted(
        self, whole: bool, bundle: Path, original: Checkpoint
    ) -> None:
        """Sources renamed in the files, and the digests of the files put right: the checkpoint has none of the new."""

        def renamed(text: bytes) -> dict[str, object]:
            document = json.loads(text.replace(b"model.norm.weight", b"other.norm.weight"))
            return {**document, "digest": digest({k: v for k, v in document.items() if k != "digest"})}

        read = Bundle.read(bundle)
        origin: Bundle | Manifest
        if whole:
            index = msgspec.convert(renamed(read.text), type(read.index))
            origin = Bundle(index, {rank: read.manifest(rank) for rank in read.ranks})
        else:
            origin = Manifest.from_bytes(json.dumps(renamed(read.rank_text(0))).encode())
        report = check([origin], original, config=QUIET)
        found = {(finding.code, finding.subject, finding.what) for finding in report.all_findings()}
        told = ("PM202", "", "checkpoint.digest is not that of the sources that are listed")
        assert found == ({told} if whole else {("PM101", "other.norm.weight", "missing")})

    @pytest.mark.parametrize("whole", [False, True])
    def test_a_contract_that_anything_fulfils_is_trouble(self, whole: bool, original: Checkpoint) -> None:
        def empty(rank: Rank, made: tuple[Layer, ...]) -> tuple[Layer, ...]:
            return tuple(msgspec.structs.replace(layer, applications=()) for layer in made)

        built = corpus.manifests(original, change=empty)
        origin = corpus.bundle(original, built) if whole else built[0]
        report = check([origin], original, config=QUIET)
        found = [finding for finding in report.all_findings() if finding.severity == "error"]
        assert [(finding.code, finding.what) for finding in found] == [
            ("PM202", "no rank in it loads anything: there is nothing to check")
        ]
        assert report.exit_code == 2


@pytest.mark.parametrize(
    ("expected", "code", "subject"),
    [
        (Expectations(topology={"tp": 4}), "PM301", "tp"),
        (Expectations(engine="vllm"), "PM303", "engine"),
        (Expectations(engine="sample", engine_version="9"), "PM303", "version of sample"),
        (Expectations(target="cuda:sm90"), "PM304", "target"),
    ],
)
def test_a_manifest_made_for_something_else(
    expected: Expectations, code: str, subject: str, bundle: Path, original: Checkpoint
) -> None:
    finding = only(check([bundle], original, config=QUIET, expectations=expected))
    assert (finding.code, finding.subject) == (code, subject)


def test_expectations_that_hold_are_silent(bundle: Path, original: Checkpoint) -> None:
    fits = Expectations(topology={"tp": 2, "pp": 1, "ep": 2}, engine="sample", engine_version="1.2.3", target="cpu")
    assert check([bundle], original, config=QUIET, expectations=fits).all_findings() == ()


def test_another_revision_and_another_config_are_warnings(original: Checkpoint) -> None:
    then = msgspec.structs.replace(original, repo_id="org/name", revision="a" * 40)
    model = msgspec.structs.replace(corpus.MODEL, config_digest="sha256:" + "9" * 64)
    built = corpus.bundle(then, corpus.manifests(then, model=model))
    now = msgspec.structs.replace(original, repo_id="org/name", revision="b" * 40)
    found = [(f.code, f.severity) for f in check([built], now, config=QUIET).all_findings()]
    assert found == [("PM302", "warning"), ("PM305", "warning")]


def test_paths_are_told_apart_by_their_content(bundle: Path, tmp_path: Path) -> None:
    corpus.write(tmp_path / "c", corpus.tensors())
    assert is_manifest_path(str(bundle))
    assert is_manifest_path(str(bundle / "rank-00000.json.gz"))
    assert not is_manifest_path(str(tmp_path / "c"))
    assert not is_manifest_path(str(tmp_path / "c" / "a.safetensors"))
    assert not is_manifest_path(str(tmp_path / "c" / "model.safetensors.index.json"))
    assert not is_manifest_path("org/name")


def test_every_code_is_found_by_a_test_here_or_in_reprobe() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    reprobe = Path(__file__).with_name("test_check_reprobe.py").read_text(encoding="utf-8")
    assert [code for code in CODES if f'"{code}"' not in text + reprobe] == []


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_set_of_dropped_sources_is_found_exactly(data: st.DataObject, original: Checkpoint, bundle: Path) -> None:
    names = [name for name in original.names() if name != MTP]
    dropped = data.draw(st.sets(st.sampled_from(names), min_size=1))
    left = tuple(source for source in original.sources if source.name not in dropped)
    report = check([bundle], msgspec.structs.replace(original, sources=left), config=QUIET)
    assert {(f.code, f.subject, f.ranks) for f in report.all_findings()} == {
        ("PM101", name, ranks_of(name)) for name in dropped
    }
