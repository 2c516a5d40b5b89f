"""The Hub through the real client, against a local server that speaks its API: what travels, is cached, fails how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from header_writer import Tensors, entries, framed
from hub_server import Blob, FakeHub, Repo, serve

from probe_cli.checkpoint import Checkpoint
from probe_cli.checkpoint.header import parse_header
from probe_cli.checkpoint.hub import HubCheckpoint, open_hub, parse_reference
from probe_cli.checkpoint.hub.client import Client
from probe_cli.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = "model.safetensors.index.json"
SHARDS: dict[str, Tensors] = {
    "model-00001-of-00002.safetensors": {"b": ("F32", (4096, 4096)), "a": ("BF16", (4,))},
    "model-00002-of-00002.safetensors": {"c": ("I64", ())},
}


def blob(tensors: Tensors, **metadata: str) -> Blob:
    """A safetensors file with zeros for data."""
    header = framed(json.dumps(entries(tensors, metadata or None), separators=(",", ":")))
    return Blob(header, parse_header(header, file="x").file_size)


def repo(shards: dict[str, Tensors]) -> Repo:
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    files = {file: blob(tensors) for file, tensors in shards.items()}
    files[INDEX] = Blob(json.dumps({"metadata": {}, "weight_map": weight_map}).encode())
    files["config.json"] = Blob(b'{"model_type": "llama"}')
    files["README.md"] = Blob(b"hello")
    return Repo(COMMIT, files)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with serve(FakeHub()) as fake:
        yield fake


@pytest.fixture
def hub(server: FakeHub) -> FakeHub:
    server.reset()
    server.repos["org/name"] = repo(SHARDS)
    return server


class Opener:
    """Opens with the real client and a cache of its own; waits are noted, not waited."""

    def __init__(self, hub: FakeHub, cache: Path) -> None:
        self.endpoint, self.cache = hub.endpoint, cache
        self.waits: list[float] = []

    def __call__(self, text: str = "org/name", *, token: str | None = None, **options: object) -> HubCheckpoint:
        client = Client(endpoint=self.endpoint, token=token, sleep=self.waits.append)
        return open_hub(parse_reference(text), client=client, hub_cache=self.cache, **options)  # type: ignore[arg-type]

    def refusal(self, text: str = "org/name", *, token: str | None = None) -> CheckpointError:
        with pytest.raises(CheckpointError) as caught:
            self(text, token=token)
        message = str(caught.value)
        assert message.isprintable() and len(message) < 400 and caught.value.hint
        assert not list(self.cache.rglob("*.headers")), "a partial result was cached"
        return caught.value


@pytest.fixture
def opener(hub: FakeHub, tmp_path: Path) -> Opener:
    return Opener(hub, tmp_path / "cache")


def names(found: HubCheckpoint) -> list[str]:
    return [source.name for source in found.files.sources]


def test_what_travels(hub: FakeHub, opener: Opener) -> None:
    seen: list[tuple[int, int]] = []
    found = opener(progress=lambda done, of: seen.append((done, of)))
    assert names(found) == ["b", "a", "c"]
    assert (found.repo_id, found.commit, found.config) == ("org/name", COMMIT, {"model_type": "llama"})
    assert [file.size for file in found.files.files] == [hub.repos["org/name"].files[name].size for name in SHARDS]
    assert seen == [(0, 2), (1, 2), (2, 2)]
    files = hub.repos["org/name"].files
    for name in SHARDS:
        ranges = [request.range for request in hub.requests if name in request.path and request.host == "storage"]
        assert ranges == ["bytes=0-7", f"bytes=8-{len(files[name].start) - 1}"]
        assert sum(r.sent for r in hub.of_kind(name) if r.host == "storage") == len(files[name].start)
    assert not hub.of_kind("README")
    assert len(hub.of_kind("/api/models/")) == len(hub.of_kind(INDEX)) == len(hub.of_kind("config.json")) == 1


def test_163_shards_fetch_their_headers_and_nothing_else(hub: FakeHub, opener: Opener) -> None:
    """DeepSeek-V3's layout: 163 files of 4.3 GB."""
    shards: dict[str, Tensors] = {
        f"model-{n + 1:05}-of-00163.safetensors": {
            f"model.layers.{n}.{e}.weight": ("BF16", (2**15, 2**11)) for e in range(32)
        }
        for n in range(163)
    }
    hub.repos["org/big"] = repo(shards)
    found = opener("hf://org/big")
    assert len(found.files.sources) == 163 * 32 and len(found.files.files) == 163
    files = hub.repos["org/big"].files
    from_storage = [request for request in hub.requests if request.host == "storage"]
    assert len(from_storage) == 2 * 163
    assert sum(request.sent for request in from_storage) == sum(len(files[name].start) for name in shards)
    others = [request for request in hub.requests if request.host == "hub"]
    assert len(others) == 163 + 3
    hub.requests.clear()
    assert opener("hf://org/big").files == found.files
    assert len(hub.requests) == 1, "the second run asks for the commit alone"
    hub.requests.clear()
    assert opener(f"hf://org/big@{COMMIT}").files == found.files
    assert not hub.requests, "a cached commit needs no request"


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", COMMIT])
def test_revisions_resolve_to_a_commit(opener: Opener, revision: str) -> None:
    assert opener(f"hf://org/name@{revision}").commit == COMMIT


def test_token_goes_to_the_hub_but_not_to_its_storage(hub: FakeHub, opener: Opener) -> None:
    hub.repos["org/name"].private = True
    opener(token="hf_good")
    assert {request.token for request in hub.requests if request.host == "hub"} == {"Bearer hf_good"}
    assert {request.token for request in hub.requests if request.host == "storage"} == {None}


def test_storage_address_that_expires(hub: FakeHub, opener: Opener) -> None:
    """The second range goes to where the first was redirected to; if that is refused, the Hub is asked again."""
    first = "model-00001-of-00002.safetensors"
    hub.faults[f"{first}?"] = ["none", 403]
    assert names(opener()) == ["b", "a", "c"] and not opener.waits
    assert [(r.host, r.status, r.range) for r in hub.of_kind(first)] == [
        ("hub", 302, "bytes=0-7"),
        ("storage", 206, "bytes=0-7"),
        ("storage", 403, "bytes=8-144"),
        ("hub", 302, "bytes=8-144"),
        ("storage", 206, "bytes=8-144"),
    ]


def test_renamed_repository_answers_by_its_new_name(hub: FakeHub, opener: Opener) -> None:
    hub.renamed["org/old"] = "org/name"
    found = opener("hf://org/old")
    assert found.repo_id == "org/name" and names(found) == ["b", "a", "c"]
    assert not hub.of_kind("/org/old/resolve")
    assert opener("hf://org/old").repo_id == "org/name"


def test_single_file_folder_and_named_file(hub: FakeHub, opener: Opener) -> None:
    one = {
        "model.safetensors": blob({"x": ("U8", (3,))}, format="pt"),
        "sub/model.safetensors": blob({"y": ("U8", (3,))}),
    }
    hub.repos["org/one"] = Repo(COMMIT, {**one, "sub/config.json": Blob(b'{"a": 1}')})
    found = opener("hf://org/one")
    assert names(found) == ["x"] and found.config is None
    assert found.files.metadata == {"model.safetensors": {"format": "pt"}}
    assert names(opener("hf://org/one/sub")) == ["y"] and opener("hf://org/one/sub").config == {"a": 1}
    assert names(opener("hf://org/one@main/sub/model.safetensors")) == ["y"]
    assert "has no file or folder 'gone'" in str(opener_refusal(opener, "hf://org/one/gone"))


def opener_refusal(opener: Opener, text: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        opener(text)
    return caught.value


@pytest.mark.parametrize("length", [99_990, 99_994, 100_000, 100_008, 26_000_000])
def test_headers_that_the_client_cannot_read(hub: FakeHub, opener: Opener, length: int) -> None:
    """huggingface_hub asks for 100,001 bytes and once cut headers just below; it refuses those over 25,000,000."""
    body = json.dumps(entries({"x": ("U8", (3,))}, {"pad": ""}), separators=(",", ":"))
    body = body.replace('"pad":""', '"pad":"' + "p" * (length - len(body)) + '"')
    hub.repos["org/long"] = Repo(COMMIT, {"model.safetensors": Blob(framed(body), 8 + length + 3)})
    assert names(opener("hf://org/long")) == ["x"]
    assert sum(request.sent for request in hub.requests if request.host == "storage") == 8 + length


@pytest.mark.parametrize("fault", [500, 502, 503, 504, 408, "cut"])
@pytest.mark.parametrize("where", ["/api/models", "config.json", INDEX, "model-00002"])
def test_failures_that_pass_are_retried(hub: FakeHub, opener: Opener, where: str, fault: object) -> None:
    hub.faults["model-00002-of-00002.safetensors?" if where.startswith("model-") else where] = [fault, fault]
    assert names(opener()) == ["b", "a", "c"]
    assert opener.waits == [0.5, 1.0]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("cut", "broke off: peer closed connection"),
        ("short", "the Hub sent 7 bytes, expected 8"),
        ("long", "the Hub sent 9 bytes, expected 8"),
        ("shifted", "the Hub sent bytes 1-8, expected 0-7"),
        ("no content-range", "Content-Range is ''"),
        ("other size", "the file has 70 bytes, expected 69 by the listing"),
        ("encoded", "the range came with Content-Encoding 'gzip', expected plain bytes"),
        (503, "the Hub answered with status 503 after 5 tries"),
        (404, "no such file in the repository (404)"),
        (400, "the Hub answered with status 400"),
    ],
)
def test_failures_that_stay(hub: FakeHub, opener: Opener, fault: object, expected: str) -> None:
    hub.faults["model-00002-of-00002.safetensors?"] = [fault] * 20
    message = str(opener.refusal())
    assert message.startswith(f"hf://org/name@{COMMIT[:12]}/model-00002-of-00002.safetensors: ")
    assert expected in message
    assert len(opener.waits) == (0 if fault in (400, 404) else 4)


def test_server_that_ignores_ranges(hub: FakeHub, opener: Opener) -> None:
    """Served all the same: the start of the stream is taken, and the rest (67 MB here) is left."""
    hub.faults = {f"{name}?signature": ["ignore range"] * 2 for name in SHARDS}
    assert names(opener()) == ["b", "a", "c"] and not opener.waits
    assert all(
        request.status == 200 and request.sent < 20_000_000 for request in hub.requests if "?" in request.path[20:]
    )


@pytest.mark.parametrize(
    ("headers", "wait"),
    [({"Retry_After": "7"}, 7), ({"RateLimit": '"api";r=0;t=5'}, 5), ({}, 0.5)],
    ids=["retry-after", "ratelimit", "neither"],
)
def test_rate_limit_is_waited_for(hub: FakeHub, opener: Opener, headers: dict[str, str], wait: float) -> None:
    hub.headers = headers
    hub.faults["model-00001"] = [429]
    assert names(opener()) == ["b", "a", "c"]
    assert opener.waits == [wait]


def test_rate_limit_by_date_and_longer_than_we_wait(hub: FakeHub, opener: Opener) -> None:
    hub.headers = {"Retry_After": "Wed, 21 Oct 2015 07:28:00 GMT"}
    hub.faults["/api/models"] = [429]
    assert names(opener()) == ["b", "a", "c"] and opener.waits == [0.0]
    hub.headers = {"Retry_After": "300"}
    hub.faults["/api/models"] = [429]
    error = opener_refusal(opener, "org/name")
    assert str(error) == "hf://org/name: rate-limited by the Hub (429)"
    assert error.hint == "try again in 300 seconds; with HF_TOKEN set the limit is higher"
    assert opener.waits == [0.0]


def test_missing_private_gated_disabled_and_bad_token(hub: FakeHub, opener: Opener) -> None:
    no_such = f"no such repository at {hub.endpoint}, or it is private"
    assert str(opener.refusal("hf://org/none")) == f"hf://org/none: {no_such}"
    assert str(opener.refusal("hf://org/none", token="hf_good")) == f"hf://org/none: {no_such}"
    error = opener.refusal(token="hf_bad")
    assert str(error) == "hf://org/name: the Hub refused the token (401)" and "HF_TOKEN" in str(error.hint)
    hub.repos["org/name"].gated = True
    error = opener.refusal(token="hf_good")
    assert str(error) == f"hf://org/name@{COMMIT[:12]}/config.json: is gated: the Hub refused access (403)"
    assert str(error.hint).startswith(f"accept the conditions at {hub.endpoint}/org/name, then log in")
    hub.repos["org/name"].gated, hub.repos["org/name"].disabled = False, True
    assert str(opener.refusal()) == "hf://org/name: is disabled by the Hub"
    hub.repos["org/name"].disabled, hub.repos["org/name"].private = False, True
    assert str(opener.refusal()) == f"hf://org/name: {no_such}"
    assert not opener.waits, "none of these gets better by asking again"


def test_one_failure_ends_the_others_waits(hub: FakeHub, tmp_path: Path) -> None:
    """A gated or missing shard is reported at once, not after the last retry of its neighbours."""
    hub.headers = {"Retry_After": "30"}
    hub.faults = {"model-00001": [503] * 5, "model-00002": [404]}
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="no such file in the repository"):
        open_hub(parse_reference("org/name"), client=Client(endpoint=hub.endpoint), hub_cache=tmp_path)
    assert time.monotonic() - started < 10


def test_missing_revision(opener: Opener) -> None:
    assert str(opener.refusal("hf://org/name@v9")).startswith("hf://org/name@v9: no such revision")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("not json", "answered with something that is not the Hub's API"),
        ("not an object", "answered with something that is not the Hub's API"),
        ("no commit", "at commit '../../x', expected a name and 40 hexadecimal digits"),
    ],
)
def test_something_else_than_the_hub(hub: FakeHub, opener: Opener, fault: str, expected: str) -> None:
    hub.faults["/api/models"] = [fault] * 5
    assert expected in str(opener.refusal())


def test_nobody_at_the_endpoint(opener: Opener) -> None:
    opener.endpoint = "http://127.0.0.1:9"
    assert "cannot reach http://127.0.0.1:9: " in str(opener.refusal())
    assert len(opener.waits) == 4
    opener.endpoint = "http://[bad"
    opener.refusal()


def test_repository_that_lacks_what_its_index_names(hub: FakeHub, opener: Opener) -> None:
    del hub.repos["org/name"].files["model-00002-of-00002.safetensors"]
    assert str(opener.refusal()) == (
        f"hf://org/name@{COMMIT[:12]}: {INDEX} names 1 of 2 files that are not in the repository: "
        "'model-00002-of-00002.safetensors'"
    )


def test_cut_upload_and_lfs_pointer(hub: FakeHub, opener: Opener) -> None:
    file = "model-00002-of-00002.safetensors"
    whole = hub.repos["org/name"].files[file]
    hub.repos["org/name"].files[file] = Blob(whole.start, whole.size - 1)
    assert "bytes on the Hub, expected" in str(opener.refusal())
    hub.repos["org/name"].files[file] = Blob(b"version https://git-lfs.github.com/spec/v1\n")
    assert "is a Git LFS pointer" in str(opener.refusal())


def test_repository_without_safetensors(hub: FakeHub, opener: Opener) -> None:
    hub.repos["org/bin"] = Repo(COMMIT, {"pytorch_model.bin": Blob(b"x"), "config.json": Blob(b"{}")})
    assert "has 'pytorch_model.bin' but no safetensors file" in str(opener.refusal("org/bin"))


def test_damaged_cache_is_fetched_again(hub: FakeHub, opener: Opener) -> None:
    found = opener()
    (saved,) = opener.cache.rglob("*.headers")
    content = bytearray(saved.read_bytes())
    content[-1] ^= 1
    saved.write_bytes(content)
    hub.requests.clear()
    assert opener().files == found.files
    assert len(hub.requests) > 5


def test_read_only_cache_is_done_without(hub: FakeHub, opener: Opener) -> None:
    opener.cache.write_text("a file where the folder should be")
    assert names(opener()) == ["b", "a", "c"]


def test_cache_folder_is_in_order_for_the_client(opener: Opener) -> None:
    from huggingface_hub import scan_cache_dir

    opener()
    info = scan_cache_dir(opener.cache)
    assert not info.warnings and [found.repo_id for found in info.repos] == ["org/name"]


def test_complete_download_is_read_where_it_lies(hub: FakeHub, opener: Opener) -> None:
    snapshot = opener.cache / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    files = hub.repos["org/name"].files
    for name in ("config.json", INDEX, "model-00002-of-00002.safetensors"):
        (snapshot / name).write_bytes(files[name].read(0, files[name].size))
    assert opener().snapshot is None, "half a download is not a checkpoint"
    first = "model-00001-of-00002.safetensors"
    (snapshot / first).write_bytes(files[first].start)
    found = opener()
    assert found.snapshot == snapshot and found.commit == COMMIT


CLIENT = """
import sys
from probe_cli.checkpoint import Checkpoint
from probe_cli.errors import ProbeManifestError
try:
    checkpoint = Checkpoint.open(sys.argv[1], revision=sys.argv[2] or None)
    print(checkpoint.names(), checkpoint.repo_id, checkpoint.revision, checkpoint.digest, checkpoint.root)
except ProbeManifestError as error:
    print(type(error).__name__, error, f"({error.hint})")
"""


def run_client(hub: FakeHub, cache: Path, text: str, revision: str = "", **variables: str) -> str:
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith("HF_") and "proxy" not in name.lower()
        },
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(cache),
        "HF_HOME": str(cache / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **variables,
    }
    command = [sys.executable, "-c", CLIENT, text, revision]
    result = subprocess.run(command, env=environment, cwd=cache.parent, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout.strip()


def test_a_token_that_cannot_be_sent(hub: FakeHub, opener: Opener) -> None:
    error = opener.refusal(token="hf_größe")
    assert str(error) == "hf://org/name: the token has characters that no token has"
    assert "HF_TOKEN" in str(error.hint) and "größe" not in str(error.hint)
    assert (opener.waits, hub.requests) == ([], [])


def test_environment_variables_of_the_client(hub: FakeHub, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE, read at import, so in a process of its own."""
    hub.repos["org/name"].private = True
    cache = tmp_path / "cache"
    assert run_client(hub, cache, "org/name") == (
        f"CheckpointError hf://org/name: no such repository at {hub.endpoint}, or it is private "
        "(there is no folder org/name either; if you meant the repository: check the name; for a private repository "
        "log in with `hf auth login` or set HF_TOKEN)"
    )
    online = run_client(hub, cache, "org/name", HF_TOKEN="hf_good")
    assert online.startswith(f"('b', 'a', 'c') org/name {COMMIT} sha256:") and online.endswith(" None")
    hub.requests.clear()
    assert run_client(hub, cache, "hf://org/name@main", HF_HUB_OFFLINE="1") == online
    # What huggingface_hub has downloaded is found offline too, and has its data.
    other = tmp_path / "other"
    snapshot = other / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", INDEX):
        (snapshot / name).write_bytes(hub.repos["org/name"].files[name].start)
    for name, tensors in SHARDS.items():
        (snapshot / name).write_bytes(blob(tensors).start)
    (other / "models--org--name" / "refs").mkdir()
    (other / "models--org--name" / "refs" / "main").write_text(COMMIT)
    assert run_client(hub, other, "org/name", HF_HUB_OFFLINE="1") == online.replace(" None", f" {snapshot}")
    assert run_client(hub, cache, "hf://org/name", COMMIT, HF_HUB_OFFLINE="1") == online
    assert run_client(hub, cache, "hf://org/name", "v1.0", HF_HUB_OFFLINE="1") == (
        "CheckpointError hf://org/name@v1.0: is not in the cache, and HF_HUB_OFFLINE is set "
        "(run once online, or unset HF_HUB_OFFLINE)"
    )
    assert not hub.requests


def test_proxy_variables_of_the_client(hub: FakeHub, tmp_path: Path) -> None:
    """A plain HTTP proxy is sent the whole URL: our server sees it where the path should be."""
    out = run_client(
        hub, tmp_path / "cache", "hf://org/name", HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=hub.endpoint, NO_PROXY=""
    )
    # It goes on to the storage, which this proxy does not serve.
    assert out.startswith(f"CheckpointError hf://org/name@{COMMIT[:12]}/model-0000")
    assert hub.requests[0].path == "http://hub.invalid/api/models/org/name?blobs=true"


def test_local_folder_comes_before_the_hub(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from header_writer import write

    (tmp_path / "org" / "name").mkdir(parents=True)
    write(tmp_path / "org" / "name" / "model.safetensors", {"local": ("U8", (1,))})
    monkeypatch.chdir(tmp_path)
    assert Checkpoint.open("org/name").names() == ("local",)
