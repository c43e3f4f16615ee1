"""Packed weights on disk: the same tensors come back, and nothing else ever does."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.models import build, packed_cache
from forerun.models.cpu import library
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.models.packed_cache import BLOCK_BYTES, PackedKey, PackedWriter, entries, load

KEY = PackedKey("f" * 64, "int8", "this cpu", "this code")
TENSORS = {
    "levels": torch.arange(-100, 100, dtype=torch.int8).view(20, 10),
    "scales": torch.linspace(0, 1, 7),
    "large": torch.arange(3 * BLOCK_BYTES, dtype=torch.int64).to(torch.uint8),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_HOME", str(tmp_path))
    monkeypatch.delenv(packed_cache.LIMIT_VARIABLE, raising=False)
    monkeypatch.setattr(build, "MIN_KEPT_BYTES", 0)
    return tmp_path


def store(key: PackedKey = KEY, tensors: dict[str, torch.Tensor] = TENSORS, files: tuple[Path, ...] = ()) -> Path:
    writer = PackedWriter(key, "a model", files)
    for name, tensor in tensors.items():
        writer.add(name, tensor, ["about", name])
    writer.commit()
    return key.path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_same_tensors_come_back_mapped() -> None:
    store()
    found = load(KEY)
    assert found is not None
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        assert found[name].data_ptr() % packed_cache.ALIGNMENT == 0
        assert found.about(name) == ["about", name]
    mapped = Path("/proc/self/maps").read_text()
    assert str(KEY.path) in mapped  # views of the file, no copies
    found.release()
    assert torch.equal(found["large"], TENSORS["large"])


@pytest.mark.parametrize("field", ["model", "weights", "cpu", "code"])
def test_other_weights_cpus_and_versions_have_other_files(field: str) -> None:
    path = store()
    other = replace(KEY, **{field: "another"})
    assert load(other) is None
    other.path.write_bytes(path.read_bytes())  # even under its name
    assert load(other) is None and not other.path.exists()
    assert load(KEY) is not None


@pytest.mark.parametrize("at", ["first", "middle", "last tensor", "table", "trailer"])
def test_one_wrong_bit_is_found_and_the_file_removed(at: str, caplog: pytest.LogCaptureFixture) -> None:
    path = store()
    size, table = path.stat().st_size, load(KEY)
    assert table is not None
    end = table._end
    offset = {"first": 0, "middle": end // 2, "last tensor": end - 1, "table": end + 20, "trailer": size - 3}[at]
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    assert packed_cache.verify(path)
    assert load(KEY) is None and not path.exists()
    assert len(caplog.messages) == 1 and "damaged" in caplog.text


@pytest.mark.parametrize("size", [0, 5, 4096, -1])
def test_a_truncated_file_is_removed(size: int) -> None:
    path = store()
    os.truncate(path, path.stat().st_size - 1 if size < 0 else size)
    assert packed_cache.verify(path)
    assert load(KEY) is None and not path.exists()


def test_a_start_checks_some_blocks_and_others_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(packed_cache, "CHECKED_BLOCKS", 4)
    path = store(tensors={"large": torch.zeros(40 * 4096, dtype=torch.uint8)})
    data = bytearray(path.read_bytes())
    data[20 * 4096] = 1
    path.write_bytes(data)
    assert packed_cache.verify(path)  # reads all
    loaded = 0
    while load(KEY) is not None:  # two of 38 blocks between the first and the last: found sooner or later
        loaded += 1
        assert loaded < 1000
    assert not path.exists()


def test_nothing_appears_before_it_is_whole(home: Path) -> None:
    writer = PackedWriter(KEY, "a model", ())
    writer.add("levels", TENSORS["levels"])
    assert load(KEY) is None and not KEY.path.exists()
    assert len(names(home / "packed")) == 1
    writer.discard()
    assert names(home / "packed") == set()
    writer.commit()  # too late
    assert load(KEY) is None


def test_what_a_killed_process_left_goes_with_the_next_write(home: Path) -> None:
    (home / "packed").mkdir()
    dead = multiprocessing.get_context("spawn").Process(target=int)
    dead.start()
    dead.join()
    (home / "packed" / f".part-{dead.pid}-abc").write_bytes(b"half")
    alive = home / "packed" / f".part-{os.getppid()}-abc"
    alive.write_bytes(b"half")
    store()
    assert names(home / "packed") == {KEY.path.name, alive.name}


def _store_many(folder: str, barrier: object) -> None:
    os.environ["FORERUN_HOME"] = folder
    barrier.wait()  # type: ignore[attr-defined]
    for _ in range(10):
        store()
        found = load(KEY)
        assert found is not None and all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_two_processes_at_once_leave_one_whole_file(home: Path) -> None:
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads as they are
    barrier = context.Barrier(2)
    both = [context.Process(target=_store_many, args=(str(home), barrier)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert names(home / "packed") == {KEY.path.name} and packed_cache.verify(KEY.path) == ""


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_costs_one_line(
    call: str, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":
        monkeypatch.setattr(PackedWriter, "_write", full)
    else:
        monkeypatch.setattr(os, call, full)
    store()
    assert len(caplog.messages) == 1 and "No space left" in caplog.text
    assert names(home / "packed") == set()
    assert load(KEY) is None


def test_the_disk_is_not_filled_to_the_brim(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(packed_cache, "MIN_FREE_BYTES", 1 << 60)
    store()
    assert not KEY.path.exists() and len(caplog.messages) == 1 and "left free" in caplog.text


def test_a_folder_that_cannot_be_written_costs_one_line(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "packed").write_text("a file where the folder should be")
    store()
    assert len(caplog.messages) == 1 and "cannot write" in caplog.text
    assert load(KEY) is None


def test_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [replace(KEY, model=name) for name in "abc"]
    sizes = [store(key).stat().st_size for key in keys[:2]]
    for age, key in enumerate(keys[:2]):
        os.utime(key.path, (1000 - age, 1000 - age))
    assert [e.path for e in entries()] == [keys[0].path, keys[1].path]
    assert load(keys[1]) is not None  # used just now
    monkeypatch.setenv(packed_cache.LIMIT_VARIABLE, str(2.5 * sizes[0] / 1e9))
    store(keys[2])
    assert [key.path.exists() for key in keys] == [False, True, True]


def test_the_limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store()
    monkeypatch.setenv(packed_cache.LIMIT_VARIABLE, "0")
    assert load(KEY) is None
    store(replace(KEY, model="off"))
    assert caplog.messages == [] and len(entries()) == 1
    monkeypatch.setenv(packed_cache.LIMIT_VARIABLE, "0.001")
    store(replace(KEY, model="too large"))
    assert "larger than" in caplog.text and len(entries()) == 1
    monkeypatch.setenv(packed_cache.LIMIT_VARIABLE, "plenty")
    assert packed_cache.limit_bytes() == 8_000_000_000 and "plenty" in caplog.text


# -- with a model ------------------------------------------------------------------------------------------------------

MODES = ["int8", *(["file"] if library.library() is not None else [])]


def answers(path: Path, mode: str) -> list[int]:
    with LLM(path, quantization=mode, quiet=True) as llm:
        assert llm.precision.name == mode
        return list(llm.generate([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids)


@pytest.mark.parametrize("mode", MODES)
def test_a_second_start_packs_nothing_and_answers_the_same(
    mode: str, tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf("llama", "Q8_0")
    first = answers(path, mode)
    [entry] = entries()
    assert entry.model == path.name and entry.weights == mode and entry.files == (str(path),)

    def packed_again(*_: object) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr(build.PackedInt8, "quantise", packed_again)
    monkeypatch.setattr(build.PackedBlocks, "__init__", packed_again)
    assert answers(path, mode) == first
    assert [e.path for e in entries()] == [entry.path]


@pytest.mark.parametrize("mode", MODES)
def test_damage_another_cpu_and_other_code_are_packed_again(
    mode: str, tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf("llama", "Q8_0")
    first = answers(path, mode)
    [entry] = entries()
    data = bytearray(entry.path.read_bytes())
    data[len(data) // 2] ^= 1
    entry.path.write_bytes(data)
    assert answers(path, mode) == first and packed_cache.verify(entry.path) == ""
    monkeypatch.setattr(build, "cpu_kind", lambda: "another")
    assert answers(path, mode) == first and len(entries()) == 2
    monkeypatch.setattr(build, "PACKING_CODE", ("build.py",))
    assert answers(path, mode) == first and len(entries()) == 3


def test_a_draft_model_has_a_file_of_its_own(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama", "Q8_0")
    for _ in range(2):
        LLM(path, draft_model=path, quantization="int8", quiet=True).close()
    assert {entry.weights for entry in entries()} == {"int8", "int8 of a draft model"}


def test_weights_that_are_not_packed_are_not_kept(tiny_folder: Callable[[str], Path]) -> None:
    LLM(tiny_folder("llama"), dtype="float32", quiet=True).close()
    assert entries() == []


def test_an_interrupted_start_leaves_nothing(
    home: Path, tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: object, i: int) -> None:
        if i == 2:
            raise KeyboardInterrupt
        return layer(self, i)

    layer = build.LayerBuilder.layer
    monkeypatch.setattr(build.LayerBuilder, "layer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build.build_decoder(open_checkpoint(tiny_gguf("llama", "Q8_0")), torch.device("cpu"), "int8", 64, quiet=True)
    assert not (home / "packed").exists() or names(home / "packed") == set()


def test_a_read_only_home_does_not_stop_a_start(
    home: Path, tiny_gguf: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    (home / "packed").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert answers(tiny_gguf("llama", "Q8_0"), "int8")
    assert len(caplog.messages) == 1
