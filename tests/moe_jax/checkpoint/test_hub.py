"""Resolving names: local directories, and hub ids against a local server that speaks the hub's API."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from safetensors.numpy import save

from moe_jax.checkpoint import Checkpoint, resolve
from moe_jax.errors import CheckpointError

SHA = "0123456789abcdef0123456789abcdef01234567"
TENSORS = {f"w{i}": np.full((2, 3), i, np.float32) for i in range(2)}
SHARDS = {f"model-0000{i + 1}-of-00002.safetensors": {f"w{i}": TENSORS[f"w{i}"]} for i in range(2)}
SHARDED = {name: save(tensors) for name, tensors in SHARDS.items()} | {
    "config.json": b'{"model_type": "test"}',
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {tensor: file for file, tensors in SHARDS.items() for tensor in tensors}}
    ).encode(),
    "tokenizer.model": b"sp",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ x }}",
    # Not wanted: other layouts of the same weights, and files of no use here.
    "original/model.safetensors": b"never",
    "consolidated.safetensors": b"never",
    "pytorch_model.bin": b"never",
    "README.md": b"# card",
}


class Hub:
    """The part of the hub's HTTP API that a snapshot download uses. `log` holds (method, path) of each request."""

    def __init__(self):
        self.repos = {"lab/sharded": SHARDED, "lab/pickled": {"config.json": b"{}", "pytorch_model.bin": b"PK"}}
        self.gated = {"lab/gated"}
        self.broken = False
        self.log: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self, body=True)

            def do_HEAD(self):
                hub.answer(self, body=False)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request, body):
        path = unquote(urlsplit(request.path).path)
        self.log.append((request.command, path))
        status, headers, content = self.route(path)
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if body:
            request.wfile.write(content)

    def route(self, path):
        if self.broken:
            return 500, {}, b"{}"
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/.*)?", path)
        if match is None:
            match = re.fullmatch(r"/([^/]+/[^/]+)/(resolve)/([^/]+)/(.+)", path)
        if match is None:
            return 404, {}, b"{}"
        repo, kind, revision = match[1], match[2], match[3]
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if repo not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if revision not in (None, "main", SHA):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = self.repos[repo]
        if kind == "resolve":
            if match[4] not in files:
                return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
            content = files[match[4]]
            return 200, {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, content
        if kind == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        about = {"id": repo, "sha": SHA, "private": False, "siblings": [{"rfilename": name} for name in files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(about).encode()


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def message_of(*args, **kwargs):
    with pytest.raises(CheckpointError) as raised:
        resolve(*args, **kwargs)
    return str(raised.value)


def test_local_directory_is_returned_without_asking_the_hub(tmp_path, hub):
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    assert hub.log == []


def test_sharded_download_opens_as_a_checkpoint(tmp_path, hub):
    directory = resolve("lab/sharded", cache_dir=tmp_path)
    with Checkpoint.open(directory) as checkpoint:
        assert checkpoint.names() == ["w0", "w1"] and checkpoint.config == {"model_type": "test"}
        for name, array in TENSORS.items():
            np.testing.assert_array_equal(checkpoint.view(name), array)
    assert {file.name for file in directory.iterdir()} == {
        *SHARDS,
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    }


def test_second_time_reads_no_file_again_and_works_offline(tmp_path, hub):
    first = resolve("lab/sharded", cache_dir=tmp_path)
    hub.log.clear()
    assert resolve("lab/sharded", cache_dir=tmp_path) == first
    assert not [path for method, path in hub.log if "/resolve/" in path and method == "GET"]
    hub.server.shutdown()
    hub.server.server_close()
    assert resolve("lab/sharded", cache_dir=tmp_path) == first


def test_revision_is_passed_on(tmp_path, hub):
    assert resolve("lab/sharded", revision=SHA, cache_dir=tmp_path).name == SHA
    message = message_of("lab/sharded", revision="v9", cache_dir=tmp_path)
    assert "not revision 'v9'" in message and hub.url in message


def test_unknown_model_is_named_with_a_near_local_folder(tmp_path, hub, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "qwen3_moe").mkdir(parents=True)
    message = message_of("lab/qwen3-moe", cache_dir=tmp_path / "cache")
    assert "lab/qwen3-moe is no local directory" in message and "has no such model" in message
    assert "Did you mean lab/qwen3_moe?" in message
    assert "Did you mean" not in message_of("lab/other", cache_dir=tmp_path / "cache")


def test_gated_model_asks_for_the_token(tmp_path, hub):
    assert "set HF_TOKEN" in message_of("lab/gated", cache_dir=tmp_path)


def test_repository_without_safetensors(tmp_path, hub):
    message = message_of("lab/pickled", cache_dir=tmp_path)
    assert "lab/pickled" in message and "no safetensors weights" in message


def test_unreachable_and_failing_hub(tmp_path, hub, monkeypatch):
    hub.broken = True
    assert "could not be reached" in message_of("lab/sharded", cache_dir=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nobody listens
    message = message_of("lab/sharded", cache_dir=tmp_path)
    assert "http://127.0.0.1:9 could not be reached" in message and "HF_ENDPOINT" in message


def test_file_that_vanishes_while_downloading(tmp_path, hub):
    class Vanishing(dict):
        def __contains__(self, name):
            return name != "config.json" and super().__contains__(name)

    hub.repos["lab/sharded"] = Vanishing(SHARDED)
    assert "lab/sharded" in message_of("lab/sharded", cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["a/b/c", "./demo", "~/demo", "../demo", "has space"])
def test_names_that_can_be_no_hub_id(tmp_path, hub, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    message = message_of(name)
    assert "no such directory, and it cannot be a hub id" in message
    assert hub.log == []


def test_empty_name_is_not_the_current_directory():
    assert "name is empty" in message_of("")


def test_near_matches_and_missing_parent_of_a_path(tmp_path):
    (tmp_path / "OLMoE-1B-7B").mkdir()
    (tmp_path / "OLMoE-notes.txt").write_text("")
    message = message_of(tmp_path / "OLMoE-1B-7b")
    assert f"Did you mean {tmp_path / 'OLMoE-1B-7B'}?" in message and "notes" not in message
    assert f"folder {tmp_path / 'nothing'} does not exist" in message_of(tmp_path / "nothing" / "model")


def test_file_and_revision_of_a_local_directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert f"is a file: give {tmp_path}" in message_of(tmp_path / "config.json")
    assert "leave it out" in message_of(tmp_path, revision="main")
