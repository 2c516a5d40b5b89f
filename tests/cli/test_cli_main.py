"""The command as a whole: help, codes, streams. Nothing that a user does ends in a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from probe_cli import __version__
from probe_cli.cli.failures import Terminated, exit_code
from probe_cli.cli.lazy import COMMANDS, LazyGroup
from probe_cli.cli.main import cli
from probe_cli.errors import EngineError, IncompleteUpdate, InputError, UsageError

ROOT = Path(__file__).resolve().parents[2]


def test_version(run) -> None:
    found = run("--version")
    assert (found.code, found.stdout) == (0, f"probe-manifest {__version__}\n")


def test_help_names_every_command_and_the_exit_codes(run) -> None:
    found = run("--help")
    assert found.code == 0
    assert all(f"\n  {name} " in found.stdout for name in COMMANDS)
    assert "3  the engine failed" in found.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_with_examples(run, name: str) -> None:
    found = run(name, "--help")
    assert found.code == 0
    assert f"Usage: probe-manifest {name} " in found.stdout
    assert f"\n  probe-manifest {name} " in found.stdout.partition("Examples:\n")[2].join("\n\n") or name == "textconv"


@pytest.mark.parametrize("name", list(COMMANDS))
def test_flags_are_dashed_and_described(name: str) -> None:
    command = LazyGroup().get_command(click.Context(cli), name)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts} says nothing"
            assert not [opt for opt in parameter.opts if "_" in opt]


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("show", "--help"), ("show", "BUNDLE"), ("explain", "BUNDLE", "lm_head.weight"), ("schema",)],
)
def test_what_needs_no_torch_does_not_import_it(bundle: Path, arguments: tuple[str, ...]) -> None:
    arguments = tuple(str(bundle) if argument == "BUNDLE" else argument for argument in arguments)
    code = (
        "import sys\nfrom probe_cli.cli.main import main\n"
        f"code = main({list(arguments)!r})\n"
        "heavy = {'torch', 'numpy', 'huggingface_hub', 'probe_cli.engines'}.intersection(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_unknown_command_is_told_the_likely_one(run) -> None:
    found = run("bild")
    assert (found.code, found.stdout) == (2, "")
    assert found.stderr.startswith("error: no command 'bild'; did you mean build?\n")


def test_no_arguments_is_help_on_stderr(run) -> None:
    found = run()
    assert (found.code, found.stdout) == (2, "")
    assert "Usage: probe-manifest" in found.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (IncompleteUpdate("x"), 1),
        (UsageError("x"), 2),
        (InputError("x"), 2),
        (EngineError("x"), 3),
        (click.UsageError("x"), 2),
        (FileNotFoundError(2, "x"), 2),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), 2),
        (KeyboardInterrupt(), 130),
        (Terminated(15), 143),
        (BrokenPipeError(), 141),
        (ZeroDivisionError(), 3),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_is_one_line_and_a_hint(run, tmp_path: Path) -> None:
    found = run("show", tmp_path / "absent")
    assert (found.code, found.stdout) == (2, "")
    assert found.stderr == f"error: {tmp_path / 'absent'}: no such file or directory, expected a manifest or a bundle\n"


@pytest.mark.parametrize("arguments", [("check", "", "x"), ("check", "x", ""), ("build", "x", "--output", "")])
def test_an_empty_argument_is_not_the_current_folder(run, arguments: tuple[str, ...]) -> None:
    found = run(*arguments)
    assert found.code == 2 and found.stderr.startswith(f"error: argument {arguments.index('') + 1} is empty")


def test_unexpected_errors_are_a_line_and_debug_shows_where(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probe_cli.report.console.Console.print", lambda *_: 1 / 0)
    found = run("schema")
    assert found.code == 3
    assert found.stderr.startswith(
        "error: unexpected ZeroDivisionError: division by zero\nhint: probe-manifest --debug"
    )
    assert "Traceback" not in found.stderr
    assert "Traceback" in run("--debug", "schema").stderr


def test_control_characters_of_a_hostile_name_do_not_reach_the_terminal(run, tmp_path: Path) -> None:
    found = run("show", tmp_path / "\x1b[2Jgone")
    assert "\x1b" not in found.stderr
    assert "\\x1b[2Jgone" in found.stderr


def test_python_m(spawn) -> None:
    assert spawn("--version").stdout == f"probe-manifest {__version__}\n"


def test_a_closed_pipe_is_quiet() -> None:
    """`probe-manifest schema | head -1`: no traceback, no complaint, and the code that a shell gives for SIGPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "probe_cli", "schema"], stdout=writing, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_closed_stderr_is_no_failure(bundle: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m probe_cli show {bundle} 2>&-"], capture_output=True, cwd=ROOT
    )
    assert done.returncode == 0
    assert b"Qwen3MoeForCausalLM" in done.stdout


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_leave_the_verdict(bundle: Path, checkpoint: Path, closed: str) -> None:
    """`check` in a shell without stdout ended with 1, which means findings."""
    command = f"{sys.executable} -m probe_cli check {bundle} {checkpoint} {closed}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, b"")


def test_colour_only_where_it_is_wanted(spawn, bundle: Path) -> None:
    arguments = ("show", bundle, "--gaps")
    assert "\x1b" not in spawn(*arguments).stdout
    assert "\x1b[1mrank 0" in spawn(*arguments, FORCE_COLOR="1").stdout
    assert "\x1b" not in spawn(*arguments, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_utf8_off(spawn, checkpoint: Path, tmp_path: Path) -> None:
    """Names that the terminal cannot spell are escaped."""
    found = spawn("show", tmp_path / "größe", PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert found.code == 2
    assert "gr\\xf6\\xdfe: no such file" in found.stderr


def test_narrow_terminal_gets_records_not_broken_columns(spawn, bundle: Path) -> None:
    wide, narrow = spawn("show", bundle), spawn("show", bundle, COLUMNS="60")
    assert "\nrank  place" in wide.stdout
    assert "\n- rank          0\n  place         tp 0, ep 0\n" in narrow.stdout


def test_every_flag_has_an_environment_twin(spawn, bundle: Path) -> None:
    found = spawn("show", bundle, PROBE_MANIFEST_SHOW_FORMAT="json", PROBE_MANIFEST_SHOW_RANK="1")
    assert [entry["rank"] for entry in found.json["ranks"]] == [1]


def test_shell_completion(spawn) -> None:
    found = spawn(_PROBE_MANIFEST_COMPLETE="bash_source")
    assert found.code == 0
    assert "_probe_manifest_completion" in found.stdout
    words = spawn(_PROBE_MANIFEST_COMPLETE="bash_complete", COMP_WORDS="probe-manifest sho", COMP_CWORD="1")
    assert "show" in words.stdout


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_switch_can_be_turned_on_and_off_by_its_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = LazyGroup().get_command(click.Context(cli), name)
    assert command is not None

    def value(option: click.Option) -> object:
        return command.make_context(name, [], resilient_parsing=True).params[str(option.name)]

    for option in command.params:
        if not isinstance(option, click.Option) or not option.is_flag or option.name == "help":
            continue
        assert isinstance(option.envvar, list)
        for variable in option.envvar:
            for text, expected in (("0", False), ("1", True), ("false", False), ("yes", True)):
                monkeypatch.setenv(variable, text)
                assert value(option) is expected, f"{variable}={text}"
            monkeypatch.delenv(variable)
            assert value(option) is False


def _left(script: str) -> subprocess.CompletedProcess[str]:
    code = f"import atexit, threading, time\nfrom probe_cli.cli.main import leave\n{script}\nleave(7)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_leaving_prints_what_was_printed_and_runs_what_is_due() -> None:
    done = _left("atexit.register(lambda: print('due', flush=True))\nprint('said', end=' ')")
    assert (done.returncode, done.stdout) == (7, "said due\n")


def test_leaving_waits_for_threads() -> None:
    done = _left("threading.Thread(target=lambda: (time.sleep(0.3), print('done'))).start()")
    assert (done.returncode, done.stdout) == (7, "done\n")


def test_leaving_takes_nothing_apart() -> None:
    """Objects that end with the interpreter are not called."""
    done = _left("class Large:\n def __del__(self): print('taken apart')\nkept = Large()")
    assert (done.returncode, done.stdout) == (7, "")
