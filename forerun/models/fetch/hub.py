"""The model hub, through huggingface_hub: whole models by id (`org/name`), and single files whose sha256 is known.

What is complete here is used without asking the network. A hub that does not answer within seconds counts as absent.

Does not know file formats beyond which files make a folder complete.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ModelNotFound

_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

HUB_ANSWER_S = 2.0  # until the hub counts as absent; name servers included, which HTTP clients do not limit


@dataclass(frozen=True)
class HubFile:
    """A file of a model repository. The hub names a large file's sha256 without sending it."""

    repo: str
    file: str

    def sha256(self) -> str:
        """Of what the hub has under this name, empty where that is nothing; raises what keeps it from answering."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

        answers: list[str | Exception] = []

        def ask() -> None:
            try:
                found = get_hf_file_metadata(hf_hub_url(self.repo, self.file), timeout=HUB_ANSWER_S)
                answers.append(found.etag or "")
            except (EntryNotFoundError, RepositoryNotFoundError):
                answers.append("")
            except Exception as error:  # the hub client's, its HTTP library's or the system's
                answers.append(error)

        thread = threading.Thread(target=ask, name="forerun-hub", daemon=True)
        thread.start()
        thread.join(HUB_ANSWER_S)
        answer = answers[0] if answers else TimeoutError(f"no answer within {HUB_ANSWER_S:g} s")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def download(self, sha256: str, folder: Path) -> Path:
        """Fetch it into a folder and check it."""
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(self.repo, self.file, local_dir=folder))
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise ValueError(f"its sha256 is {found}, expected {sha256}")
        return path


def is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name))


def snapshot(name: str, *, download: bool) -> Path:
    """The folder of a hub model, fetched where it is not complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_PATTERNS, local_files_only=True))
        if _complete(folder):
            return folder
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass
    if not download:
        raise ModelNotFound(f"{name} is not on this machine", f"fetch it: forerun models pull {name}")
    try:
        folder = Path(snapshot_download(name, allow_patterns=_PATTERNS))
    except Exception as error:  # the hub client raises errors of its own, of its HTTP library and of the system
        raise _failure(name, error) from error
    if not _complete(folder):
        hint = "choose its safetensors version, or download its .gguf file and give the file"
        raise ModelNotFound(f"hub model {name} has no complete safetensors weights with config.json", hint)
    return folder


def _failure(name: str, error: Exception) -> ModelNotFound:
    kind = type(error).__name__
    detail = (str(error).strip().splitlines() or [""])[0]
    if kind in ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError"):
        hint = "check the id; for a gated model, accept its terms and log in with `hf auth login`"
        return ModelNotFound(f"no folder {name!r} here, and the hub has no such model for you ({kind})", hint)
    return ModelNotFound(
        f"no folder {name!r} here, and the hub could not be reached or read ({kind}: {detail})",
        "check the network, or give a local model folder, a .gguf file or a known name (forerun models list)",
    )


def _complete(folder: Path) -> bool:
    if not (folder / "config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return any(folder.glob("*.safetensors"))
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError):
        return False
    return all((folder / shard).exists() for shard in shards)


def fetched() -> list[tuple[str, Path, int]]:
    """Name, folder and bytes of each model repository in the hub's cache that Forerun could run."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    found = [
        (repo.repo_id, revision.snapshot_path, repo.size_on_disk)
        for repo in repos
        for revision in list(repo.revisions)[:1]
        if repo.repo_type == "model" and _complete(revision.snapshot_path)
    ]
    return sorted(found)


def remove(name: str) -> None:
    """Delete every revision of a hub model from the hub's cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
        commits = [rev.commit_hash for repo in cache.repos if repo.repo_id == name for rev in repo.revisions]
    except CacheNotFound:
        commits = []
    if not commits:
        raise ModelNotFound(f"{name} is not on this machine", "see `forerun models list`")
    cache.delete_revisions(*commits).execute()
