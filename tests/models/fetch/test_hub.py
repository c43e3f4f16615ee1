"""Hub ids, with huggingface_hub's download replaced: local first, clear errors when the hub is out of reach."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from forerun.errors import ModelNotFound
from forerun.models.fetch import hub, store

Serve = Callable[[Path | None, Path | Exception], list[bool]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """`serve(local, remote)` sets what is cached and what the hub answers; the list tells who was asked."""

    def arrange(local: Path | None, remote: Path | Exception) -> list[bool]:
        asked: list[bool] = []

        def snapshot_download(name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
            asked.append(local_files_only)
            answer: Any = (local or LocalEntryNotFoundError("not cached")) if local_files_only else remote
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return asked

    return arrange


def model(folder: Path, shards: int = 0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    names = [f"model-{i}.safetensors" for i in range(shards)] or ["model.safetensors"]
    for name in names:
        (folder / name).write_bytes(b"")
    if shards:
        index = {"weight_map": {str(i): name for i, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_complete_here_asks_no_hub(serve: Serve, tmp_path: Path) -> None:
    folder = model(tmp_path / "m", shards=2)
    asked = serve(folder, RuntimeError("the network was asked"))
    assert store.resolve("org/name") == folder and asked == [True]


def test_incomplete_here_is_fetched(serve: Serve, tmp_path: Path) -> None:
    half, whole = model(tmp_path / "half", shards=2), model(tmp_path / "whole", shards=2)
    (half / "model-1.safetensors").unlink()
    asked = serve(half, whole)
    assert store.resolve("org/name") == whole and asked == [True, False]


def test_without_download(serve: Serve) -> None:
    asked = serve(None, RuntimeError("the network was asked"))
    with pytest.raises(ModelNotFound, match="org/name is not on this machine"):
        store.resolve("org/name", download=False)
    assert asked == [True]


def test_unreachable(serve: Serve) -> None:
    serve(None, ConnectionError("name resolution failed\nmore"))
    with pytest.raises(
        ModelNotFound, match=r"hub could not be reached.*ConnectionError: name resolution failed\)"
    ) as e:
        store.resolve("org/name")
    assert "local model folder" in e.value.hint


def test_no_such_repository(serve: Serve) -> None:
    class RepositoryNotFoundError(Exception):
        """Named as the hub client's own, which needs a live response to make."""

    serve(None, RepositoryNotFoundError("404"))
    with pytest.raises(ModelNotFound, match="the hub has no such model"):
        store.pull("org/name")


def test_weights_of_another_kind(serve: Serve, tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    serve(None, folder)
    with pytest.raises(ModelNotFound, match="no complete safetensors"):
        store.resolve("org/name")


def test_ids() -> None:
    assert hub.is_hub_id("Qwen/Qwen2.5-Coder-1.5B-Instruct")
    assert not any(map(hub.is_hub_id, ["name", "a/b/c", "/abs", "../up", "./here", "org/"]))


def test_remove_what_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path))
    assert hub.fetched() == []
    with pytest.raises(ModelNotFound, match="org/name is not on this machine"):
        hub.remove("org/name")
