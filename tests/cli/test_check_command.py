"""`probe-manifest check`, run as people run it: arguments, exit codes, formats, configuration, environment."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from probe_cli.checkpoint import Checkpoint
from probe_cli.cli.main import main
from probe_cli.manifest import Manifest
from tests.manifest import corpus

NORM = "model.norm.weight"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint/, bundle/, and broken/: the checkpoint without its last norm."""
    folder = tmp_path_factory.mktemp("place")
    checkpoint = Checkpoint.open(corpus.write(folder / "checkpoint", corpus.tensors()))
    corpus.bundle(checkpoint).write(folder / "bundle")
    broken = corpus.tensors()
    del broken[NORM]
    corpus.write(folder / "broken", broken)
    rows = [{"name": name, "dtype": dtype, "shape": shape} for name, (dtype, shape, _) in broken.items()]
    (folder / "names.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for name in [name for name in os.environ if name.startswith("PROBE_MANIFEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for commands in processes of their own


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["check", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_clean_check_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "bundle", "checkpoint", "--ignore", "PM105")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"ok, 1 ignored against checkpoint ({len(corpus.tensors())} sources)"


def test_a_missing_source_ends_with_1_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bundle", "broken")
    assert code == 1
    assert f"error PM101 missing-source: {NORM}: missing\n    needed by model.norm on ranks 0,1\n" in out


def test_what_cannot_be_read_ends_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "bundle", str(tmp_path / "absent.safetensors"))
    assert code == 2
    assert "error PM109 broken-checkpoint: " in out
    assert "absent.safetensors" in out
    code, out, _ = run(capsys, "absent", "checkpoint")
    assert code == 2
    assert "error PM202 broken-manifest: absent: no such file" in out


def test_a_bundle_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bundle")
    assert (code, out.splitlines()[-1]) == (0, "ok")


def test_a_list_of_names_in_the_place_of_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bundle", "names.json")
    assert code == 2
    expected = (
        "error PM202 broken-manifest: names.json: is a list, expected a manifest\n    a list of names that will be"
    )
    assert expected in out


def test_a_manifest_that_git_lfs_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "rank.json.gz").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    code, out, _ = run(capsys, str(tmp_path / "rank.json.gz"), "checkpoint")
    assert code == 2
    assert (
        "rank.json.gz: is a Git LFS pointer, expected a manifest\n    the file was not downloaded: run `git lfs" in out
    )


def test_a_pipe_is_no_manifest(place: Path) -> None:
    command = f"{sys.executable} -m probe_cli check <(cat names.json) checkpoint"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=place, timeout=60)
    assert done.returncode == 2
    assert ": is not a regular file, expected a manifest" in done.stdout


def test_a_list_of_names_has_no_revision(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "bundle", "--wire", "names.json", "--revision", "main")
    assert (code, out) == (2, "")
    assert err.startswith("error: --revision and --wire contradict each other")


def test_a_wire_file_from_a_file_and_from_standard_input(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    assert run(capsys, "bundle", "--wire", "names.json")[0] == 1
    command = [sys.executable, "-m", "probe_cli", "check", "bundle", "--wire", "-", "--format", "json"]
    done = subprocess.run(command, input=(place / "names.json").read_bytes(), capture_output=True, check=False)
    document = json.loads(done.stdout)
    assert (done.returncode, document["checkpoint"]["name"]) == (1, "standard input")
    assert [f["subject"] for f in document["manifests"][0]["findings"] if f["code"] == "PM101"] == [NORM]


def test_ranks_in_files_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bundle/rank-00000.json.gz", "bundle/rank-00001.json.gz", "broken", "--format", "json")
    assert code == 1
    assert [m["ranks"] for m in json.loads(out)["manifests"]] == [[0], [1]]


def test_strict_makes_warnings_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "bundle", "checkpoint")[0] == 0
    assert run(capsys, "bundle", "checkpoint", "--strict")[0] == 1


def test_several_codes_with_commas_are_several_flags(capsys: pytest.CaptureFixture[str]) -> None:
    apart = run(capsys, "bundle", "broken", "--ignore", "PM101", "--ignore", "unused-source")
    assert run(capsys, "bundle", "broken", "--ignore", "PM101, unused-source") == apart
    assert apart[0] == 0
    code, _, err = run(capsys, "bundle", "broken", "--ignore", "PM101,PM9")
    assert (code, err.splitlines()[0]) == (2, "error: --ignore: no finding has the code or name 'PM9'")


def test_select_and_ignore_by_number_name_and_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "bundle", "broken", "--ignore", "missing-source")[0] == 0
    assert run(capsys, "bundle", "broken", "--select", "PM2")[0] == 0
    assert run(capsys, "bundle", "broken", "--select", "PM101")[0] == 1
    code, _, err = run(capsys, "bundle", "broken", "--select", "PM999")
    assert code == 2
    assert "no finding has the code or name 'PM999'" in err


class TestConfiguration:
    def pyproject(self, folder: Path, text: str) -> Path:
        (folder / "pyproject.toml").write_text(text)
        return folder / "pyproject.toml"

    def test_the_nearest_pyproject_is_read(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.pyproject(tmp_path, '[tool.probe-manifest.severity]\nPM101 = "warning"\nunused-source = "off"\n')
        (tmp_path / "deep").mkdir()
        monkeypatch.chdir(tmp_path / "deep")
        code, out, _ = run(capsys, str(place / "bundle"), str(place / "broken"))
        assert code == 0
        assert "warning PM101" in out
        assert "PM105" not in out

    def test_flags_come_on_top(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = str(self.pyproject(tmp_path, '[tool.probe-manifest]\nignore = ["PM101"]\nstrict = false\n'))
        assert run(capsys, "bundle", "broken", "--config", path)[0] == 0
        assert run(capsys, "bundle", "broken", "--config", path, "--select", "PM101")[0] == 1

    def test_an_exemption_needs_a_reason(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        row = '[[tool.probe-manifest.exempt]]\ncode = "PM101"\nsubject = "model.no*"\n'
        path = str(self.pyproject(tmp_path, row + 'reason = "the trainer adds it"\n'))
        assert run(capsys, "bundle", "broken", "--config", path)[0] == 0
        path = str(self.pyproject(tmp_path, row + 'reason = " "\n'))
        code, _, err = run(capsys, "bundle", "broken", "--config", path)
        assert code == 2
        assert "exempt: 'model.no*' has no reason" in err

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[tool.probe-manifest]\ncolour = 1\n", "unknown key 'colour'"),
            (
                '[tool.probe-manifest.severity]\nPM101 = "fatal"\n',
                "severity of PM101 is 'fatal', expected error, warning or off",
            ),
            ('[tool.probe-manifest.severity]\nPM900 = "off"\n', "no finding has the code or name 'PM900'"),
            ('[tool.probe-manifest]\nstrict = "yes"\n', "strict is 'yes', expected true or false"),
            ('[tool.probe-manifest]\nignore = "PM101"\n', "ignore is a str, expected a list"),
            ("[tool.probe-manifest\n", "not valid TOML"),
            ("strict = " + "[" * 100_000, "nested too deeply for a configuration"),
            ('[[tool.probe-manifest.exempt]]\ncode = "PM101"\n', "exempt: Object missing required field `subject`"),
        ],
    )
    def test_a_wrong_configuration_is_one_line(
        self, text: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        code, out, err = run(capsys, "bundle", "broken", "--config", str(self.pyproject(tmp_path, text)))
        assert (code, out) == (2, "")
        assert message in err.splitlines()[0]


@pytest.mark.parametrize(
    ("flags", "subject"),
    [
        (["--tensor-parallel-size", "4"], "tp"),
        (["-pp", "2"], "pp"),
        (["--tp", "4", "--enable-expert-parallel"], "ep"),
        (["--engine", "vllm"], "engine"),
        (["--engine-version", "1.2.4"], "version of sample"),
        (["--target", "cuda:sm90"], "target"),
    ],
)
def test_a_manifest_for_something_else(flags: list[str], subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bundle", "checkpoint", *flags, "--format", "json")
    assert code == 1
    assert subject in {f["subject"] for f in json.loads(out)["manifests"][0]["findings"]}


def test_the_right_topology_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "bundle", "checkpoint", "--tp", "2", "--ep")[0] == 0
    assert run(capsys, "bundle", "checkpoint", "--tp", "2", "--ep", "2", "--engine", "sample:anything")[0] == 0


def test_every_flag_has_an_environment_twin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROBE_MANIFEST_CHECK_FORMAT", "json")
    monkeypatch.setenv("PROBE_MANIFEST_CHECK_STRICT", "1")
    monkeypatch.setenv("PROBE_MANIFEST_CHECK_IGNORE", "PM105 PM101")
    code, out, _ = run(capsys, "bundle", "broken")
    assert (code, json.loads(out)["suppressed"]) == (0, 2)


@pytest.mark.parametrize("to", ["/dev/stdout", "/dev/stderr", "/dev/fd/1"])
def test_a_report_to_a_stream_comes_after_what_is_there(to: str, place: Path, tmp_path: Path) -> None:
    """Into a pipe, and into a file that holds something already."""
    command = f"echo before; {sys.executable} -m probe_cli check bundle broken --output {to}; echo after"
    piped = subprocess.run(["bash", "-c", f"({command}) 2>&1 | cat"], capture_output=True, text=True, cwd=place).stdout
    (tmp_path / "log").write_text("earlier\n")
    subprocess.run(["bash", "-c", f"({command}) >> {tmp_path}/log 2>&1"], cwd=place, check=True)
    assert (tmp_path / "log").read_text() == "earlier\n" + piped
    lines = piped.splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert lines[-2].startswith("1 error, 1 warning against broken")


def test_a_report_to_a_process(place: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m probe_cli check bundle broken --output >(cat > {tmp_path}/copy); echo $?; wait $!"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=place)
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert (tmp_path / "copy").read_text().endswith("sources)\n")


def test_a_file_that_is_replaced_keeps_its_mode(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    path.write_text("old")
    path.chmod(0o640)
    assert run(capsys, "bundle", "broken", "--output", str(path))[0] == 1
    assert path.read_text().startswith("bundle: ranks 0,1")
    assert (stat.S_IMODE(path.stat().st_mode), [p.name for p in tmp_path.iterdir()]) == (0o640, [path.name])


def test_an_output_without_a_name_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "bundle", "broken", "--output=")
    assert (code, err.splitlines()[0]) == (2, "error: Invalid value for '--output': no name of a file")


@pytest.mark.parametrize("form", ["json", "sarif", "junit", "markdown", "github", "text"])
def test_programs_get_utf8_whatever_the_locale_is(form: str, place: Path, tmp_path: Path) -> None:
    name = "größe.\U0001f600"
    names = [*json.loads((place / "names.json").read_text()), {"name": name, "dtype": "F32", "shape": [1]}]
    (tmp_path / "names.json").write_text(json.dumps(names))
    command = [sys.executable, "-m", "probe_cli", "check", "bundle", "--wire", str(tmp_path / "names.json")]
    done = subprocess.run(
        [*command, "--format", form],
        capture_output=True,
        cwd=place,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert (done.returncode, done.stderr) == (1, b"")
    if form == "text":
        assert "größe.\\U0001f600: not there" in done.stdout.decode("latin-1")
        return
    text = done.stdout.decode("utf-8")
    if form in ("json", "sarif"):
        text = json.dumps(json.loads(text), ensure_ascii=False)
    assert f"{name}: not there" in text or f"`{name}` not there" in text


def test_the_report_goes_to_a_file_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "report.sarif"
    code, out, _ = run(capsys, "bundle", "broken", "--format", "sarif", "--output", str(path))
    assert (code, out) == (1, "")
    assert json.loads(path.read_text())["runs"][0]["results"][0]["ruleId"] == "PM101"


@pytest.mark.parametrize("output_format", ["text", "json", "sarif", "junit", "github", "markdown"])
def test_every_format_names_what_is_missing(output_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "bundle", "broken", "--format", output_format)
    assert code == 1
    assert NORM in out
    assert "PM101" in out


def test_quiet_prints_errors_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "bundle", "checkpoint", "-q") == (0, "", "")
    code, out, _ = run(capsys, "bundle", "broken", "-q")
    assert (code, out.splitlines()[0]) == (1, f"error PM101 missing-source: {NORM}: missing")


def test_reprobe_without_a_checkpoint_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "bundle", "--reprobe")
    assert code == 2
    assert "--reprobe needs the checkpoint" in err


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-m", "probe_cli", "check", *arguments], capture_output=True, check=False, env=env
    )


def test_neither_torch_nor_an_engine_is_imported() -> None:
    code = (
        "import sys; from probe_cli.cli.main import main; main(['check', 'bundle', 'broken']);"
        "main(['diff', 'bundle', 'bundle']);"
        "bad = {'torch', 'vllm', 'transformers', 'numpy', 'rich', 'huggingface_hub'} & set(sys.modules);"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m probe_cli check bundle broken -v --format json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (b"{", b"")


def test_an_ascii_terminal_gets_escapes(tmp_path: Path) -> None:
    given = corpus.tensors() | {"modèle.poids": ("BF16", (2,), "a.safetensors")}
    corpus.write(tmp_path / "names", given)
    done = process("bundle", str(tmp_path / "names"), PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0
    assert b"mod\\xe8le.poids" in done.stdout


def test_no_color_without_a_terminal_and_color_where_it_is_forced() -> None:
    assert b"\x1b" not in process("bundle", "broken").stdout
    assert b"\x1b[31;1merror\x1b[0m PM101" in process("bundle", "broken", FORCE_COLOR="1").stdout
    assert b"\x1b" not in process("bundle", "broken", FORCE_COLOR="1", NO_COLOR="1").stdout


def test_a_manifest_of_a_newer_major_version_is_trouble(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = Manifest.read("bundle", rank=0).write(tmp_path / "m.json")
    path.write_bytes(path.read_bytes().replace(b'"version":"1.1"', b'"version":"2.0"'))
    code, out, _ = run(capsys, str(path), "checkpoint")
    assert code == 2
    assert "schema version 2.0 is of a newer major version" in out
    assert "    upgrade probe-manifest" in out


def test_select_does_not_hide_what_cannot_be_read(
    place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It ended with "ok" where nothing had been checked."""
    (tmp_path / "names.json").write_text("[")
    code, out, _ = run(capsys, "bundle", "no-such-bundle", "--wire", str(tmp_path / "names.json"), "--select", "PM101")
    assert code == 2
    assert "error PM109 broken-checkpoint" in out and "error PM202 broken-manifest: no-such-bundle" in out


@pytest.mark.parametrize("flag", ["--ignore", "--select"])
def test_a_hidden_finding_that_something_cannot_be_read_is_no_ok(
    flag: str, place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (place / "pyproject.toml").write_text('[tool.probe-manifest.severity]\nPM202 = "off"\n')
    given = ("--ignore", "PM202") if flag == "--ignore" else ("--config", "pyproject.toml", "--select", "PM101")
    code, out, err = run(capsys, "no-such-bundle", "--format", "json", *given)
    assert (code, json.loads(out)["unread"], json.loads(out)["ok"]) == (2, 1, False)
    assert "1 input(s) could not be read, and the findings that say so are turned off" in err
    code, out, _ = run(capsys, "no-such-bundle", *given)
    assert (code, out.splitlines()[-1]) == (2, "0 errors, 1 input could not be read, 1 ignored")


def test_a_checkpoint_beside_a_wire_is_no_manifest(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "bundle", "checkpoint", "--wire", "names.json")
    assert code == 2
    assert "error: checkpoint is no manifest, and --wire says what to check against already" in err
