"""Documents that are generated, and files that other programs read: they say what the code does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from probe_cli.checkpoint import Checkpoint
from probe_cli.manifest.diff_rules import kinds_table
from probe_cli.manifest.findings import codes_table
from tests.manifest import corpus

ROOT = Path(__file__).parents[2]


def generated(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("held equal by a test -->\n")[2].strip()


def test_the_list_of_findings_is_that_of_the_code() -> None:
    assert generated(ROOT / "docs" / "findings.md") == codes_table().strip()


def test_the_table_of_changes_is_that_of_the_code() -> None:
    assert generated(ROOT / "docs" / "diff.md") == kinds_table().strip()


def schema(name: str) -> Any:
    # Found, not imported: the package's command line does not import everywhere.
    found = find_spec("check_jsonschema")
    assert found is not None
    assert found.origin is not None
    vendor = Path(found.origin).parent / "builtin_schemas" / "vendor"
    return json.loads((vendor / f"{name}.json").read_text(encoding="utf-8"))


def check_against(name: str, document: Any) -> None:
    loaded = schema(name)
    jsonschema.validators.validator_for(loaded)(loaded).validate(document)


def recipes(title: str) -> list[Any]:
    section = (
        (ROOT / "docs" / "ci.md").read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    )
    return [YAML(typ="safe").load(block) for block in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)]


def test_the_action_satisfies_the_published_schema() -> None:
    check_against("github-actions", YAML(typ="safe").load(ROOT / "action.yml"))


def test_no_input_of_the_action_is_pasted_into_a_script() -> None:
    steps = YAML(typ="safe").load(ROOT / "action.yml")["runs"]["steps"]
    assert all("${{" not in step["run"] for step in steps)


def test_the_recipes_satisfy_the_published_schemas() -> None:
    for workflow in recipes("GitHub"):
        check_against("github-workflows", {("on" if key is True else key): value for key, value in workflow.items()})
    for pipeline in recipes("GitLab"):
        check_against("gitlab-ci", pipeline)


def test_the_hook_has_what_pre_commit_asks_for() -> None:
    (hook,) = YAML(typ="safe").load(ROOT / ".pre-commit-hooks.yaml")
    assert {"id", "name", "entry", "language", "files"} <= hook.keys()
    assert hook["entry"].split() == ["probe-manifest", "check"]
    for path in ("manifests/tp8/bundle.json.gz", "rank-00003.json"):
        assert re.search(hook["files"], path)
    assert not re.search(hook["files"], "package.json")
    (recipe,) = recipes("pre-commit")
    assert recipe["repos"][0]["hooks"][0]["id"] == hook["id"]


@pytest.mark.parametrize(("name", "code"), [("checkpoint", 0), ("broken", 1)])
def test_the_action_checks_as_the_command_does(name: str, code: int, tmp_path: Path) -> None:
    """The action's own script, with the command that it would have installed."""
    given = corpus.tensors()
    checkpoint = Checkpoint.open(corpus.write(tmp_path / "checkpoint", given))
    corpus.bundle(checkpoint).write(tmp_path / "bundle $(touch owned)")
    corpus.write(tmp_path / "broken", {k: v for k, v in given.items() if k != "model.norm.weight"})
    bin_folder = tmp_path / "temp" / "probe-manifest" / "bin"
    bin_folder.mkdir(parents=True)
    command = bin_folder / "probe-manifest"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m probe_cli "$@"\n')
    command.chmod(0o755)
    steps = YAML(typ="safe").load(ROOT / "action.yml")["runs"]["steps"]
    inputs = {
        "INPUT_MANIFEST": "bundle $(touch owned)\n",
        "INPUT_CHECKPOINT": name,
        "INPUT_ARGS": "--tp=2\n--ignore=PM105\n",
        "INPUT_SARIF": "report.sarif",
        "INPUT_STRICT": "true",
    }
    environment = dict.fromkeys(steps[1]["env"], "") | inputs
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", steps[1]["run"]],
        cwd=tmp_path,
        env={
            **os.environ,
            **environment,
            "RUNNER_TEMP": str(tmp_path / "temp"),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert (tmp_path / "output").read_text() == f"exit-code={code}\n"
    assert (
        (tmp_path / "summary.md").read_text().startswith("### probe-manifest check " + ("failed" if code else "passed"))
    )
    assert json.loads((tmp_path / "report.sarif").read_text())["runs"][0]["invocations"][0]["exitCode"] == code
    assert ("::error file=bundle $(touch owned)/bundle.json.gz,title=PM101" in done.stdout) == bool(code)
    assert not (tmp_path / "owned").exists()
