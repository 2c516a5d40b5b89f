"""Settings from the environment, the extra config of the dummy loader, and the releases that are refused. No vLLM needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from probe_cli.engines.vllm.serving.extra_config import take_extra_config
from probe_cli.engines.vllm.serving.points import check_version
from probe_cli.engines.vllm.serving.settings import Settings
from probe_cli.errors import UsageError


def test_without_variables_nothing_is_asked_for() -> None:
    settings = Settings.read({})
    assert not settings.active
    assert settings == Settings(None, None, "refuse", "layer", None, None, True, 60.0, "refuse", "refuse")


def test_every_variable_is_read() -> None:
    settings = Settings.read(
        {
            "PROBE_MANIFEST": "manifests/",
            "PROBE_MANIFEST_DRAFT": "draft/",
            "PROBE_MANIFEST_ON_MISMATCH": "warn",
            "PROBE_MANIFEST_COMMIT": "model",
            "PROBE_MANIFEST_RECEIPTS": "/r",
            "PROBE_MANIFEST_STAGING_BYTES": "1024",
            "PROBE_MANIFEST_AUDIT": "0",
            "PROBE_MANIFEST_VOTE_TIMEOUT": "2.5",
            "PROBE_MANIFEST_ON_UNDEFINED": "serve",
            "PROBE_MANIFEST_ONLINE_QUANTIZATION": "track",
        }
    )
    assert settings == Settings("manifests/", "draft/", "warn", "model", Path("/r"), 1024, False, 2.5, "serve", "track")
    assert settings.active and not settings.refuses
    assert (settings.source("main"), settings.source("draft")) == ("manifests/", "draft/")


def test_a_draft_model_without_a_manifest_of_its_own_is_recorded() -> None:
    assert Settings.read({"PROBE_MANIFEST": "manifests/"}).source("draft") == "record"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PROBE_MANIFEST_ON_MISMATCH", "ignore", "expected one of refuse, warn"),
        ("PROBE_MANIFEST_COMMIT", "all", "expected one of layer, model"),
        ("PROBE_MANIFEST_ON_UNDEFINED", "yes", "expected one of refuse, serve"),
        ("PROBE_MANIFEST_STAGING_BYTES", "2GB", "is not a number"),
        ("PROBE_MANIFEST_STAGING_BYTES", "-1", "more than 0"),
        ("PROBE_MANIFEST_VOTE_TIMEOUT", "soon", "is not a number"),
    ],
)
def test_other_values_are_refused_by_name(name: str, value: str, said: str) -> None:
    with pytest.raises(UsageError) as failure:
        Settings.read({name: value})
    assert name in str(failure.value) and said in str(failure.value)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.0+cpu"])
def test_supported_releases(version: str) -> None:
    assert check_version(version) is None


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0rc1", "1.0", "dev"])
def test_other_releases_are_refused_with_the_list(version: str) -> None:
    assert check_version(version) == f"vLLM {version} is not supported; tested with 0.32.x, 0.33.x"


def config(extra: Any) -> Any:
    return SimpleNamespace(model_loader_extra_config=extra, load_format="dummy")


def test_extra_config_of_others_is_left_alone() -> None:
    given = config({"other": 1})
    assert take_extra_config(given) == (None, given)


def test_our_keys_are_taken_out_of_a_copy() -> None:
    given = config({"enable_load_probe": True, "other": 1})
    asked, rest = take_extra_config(given)
    assert asked is not None and asked.settings(Settings()).source("main") == "record"
    assert rest.model_loader_extra_config == {"other": 1}
    assert given.model_loader_extra_config == {"enable_load_probe": True, "other": 1}


def test_a_manifest_of_the_extra_config_wins() -> None:
    asked, _ = take_extra_config(config({"load_manifest": "mine/"}))
    assert asked is not None and asked.settings(Settings(manifest="theirs/")).source("main") == "mine/"


def test_a_probe_that_is_switched_off_is_none() -> None:
    asked, rest = take_extra_config(config({"enable_load_probe": False}))
    assert asked is None and rest.model_loader_extra_config == {}
