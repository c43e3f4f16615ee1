"""The disk tier's files: whole or not there, bounded, checked, and never in the way of a step."""

from __future__ import annotations

import errno
import logging
import threading
import time
from pathlib import Path

import pytest
import torch

from forerun.cache import disk as disk_module
from forerun.cache import queued
from forerun.cache.disk import DiskTier
from forerun.cache.segments import Damaged, read_header, read_pages, write_segment
from forerun.errors import BadRequest

SHAPE = (2, 8)


def pages(*values: int) -> torch.Tensor:
    return torch.stack([torch.full(SHAPE, float(v)) for v in values])


def key(number: int) -> bytes:
    return bytes([number]) * 16


def read(tier: DiskTier, *numbers: int) -> list[float]:
    out = torch.zeros((len(numbers), *SHAPE))
    count = tier.get([key(n) for n in numbers], out)
    assert all((page == page[0, 0]).all() for page in out[:count])
    return [float(page[0, 0]) for page in out[:count]]


def filled(folder: Path, *numbers: int, limit: int = 1 << 20) -> DiskTier:
    tier = DiskTier(folder, limit, "me")
    for number in numbers:
        tier.put([key(number)], pages(number))
        tier.flush()
    return tier


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_pages_are_read_before_and_after_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()

    def slow(*args: object) -> object:
        gate.wait(60)
        return write_segment(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_module, "write_segment", slow)
    tier = DiskTier(tmp_path, 1 << 20, "me")
    start = time.perf_counter()
    tier.put([key(1), key(2)], pages(1, 2))
    assert time.perf_counter() - start < 20 and not segments(tmp_path)  # no step waits for the disk
    assert read(tier, 1, 2) == [1, 2] and key(1) in tier and len(tier) == 2
    gate.set()
    tier.close()
    again = DiskTier(tmp_path, 1 << 20, "me")
    assert read(again, 1, 2, 3) == [1, 2] and len(segments(tmp_path)) == 1


@pytest.mark.parametrize("at", [0, 9, 60, 200, -1, -60])
def test_a_flipped_byte_is_never_used(tmp_path: Path, at: int):
    tier = filled(tmp_path, 1)
    tier.close()
    path = segments(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    again = DiskTier(tmp_path, 1 << 20, "me")
    assert read(again, 1) == [] and key(1) not in again and again.damaged == 1
    assert not segments(tmp_path)
    again.put([key(1)], pages(1))  # computed again
    again.flush()
    assert read(again, 1) == [1]


def test_a_file_damaged_while_it_is_known_is_not_used_either(tmp_path: Path):
    tier = filled(tmp_path, 1, 2)
    segments(tmp_path)[0].write_bytes(segments(tmp_path)[0].read_bytes()[:-5])
    segments(tmp_path)[1].unlink()
    assert read(tier, 1) == [] and read(tier, 2) == [] and tier.damaged == 1  # one is gone: as if evicted


@pytest.mark.parametrize("length", [0, 4, 30, 300])
def test_a_truncated_file_is_no_segment(tmp_path: Path, length: int):
    segment = write_segment(tmp_path / "a.safetensors", "me", [key(1)], pages(1))
    segment.path.write_bytes(segment.path.read_bytes()[:length])
    with pytest.raises(Damaged):
        read_header(segment.path)


def test_pages_of_another_size_are_no_answer(tmp_path: Path):
    segment = write_segment(tmp_path / "a.safetensors", "me", [key(1)], pages(1))
    with pytest.raises(Damaged, match="pages of 64 bytes"):
        read_pages(segment, [0], torch.zeros(1, 3))


def test_half_precision_survives(tmp_path: Path):
    data = torch.randn(3, 2, 8).to(torch.bfloat16)
    segment = write_segment(tmp_path / "a.safetensors", "me", [key(1), key(2), key(3)], data)
    out = torch.zeros(2, 2, 8, dtype=torch.bfloat16)
    read_pages(segment, [2, 0], out)
    assert torch.equal(out, data[[2, 0]])


def test_the_tier_stays_within_its_bytes(tmp_path: Path):
    tier = filled(tmp_path, 1, 2, 3)
    tier.limit = tier.nbytes // 3 + (1 << 16)  # one file and the header of one that comes
    tier.put([key(5)], pages(5))
    tier.flush()
    assert tier.nbytes <= tier.limit and read(tier, 1) == read(tier, 2) == [] and read(tier, 5) == [5]
    tier.close()
    small = DiskTier(tmp_path, 10, "me")  # a limit below what is there holds at once
    assert small.nbytes == 0 and not segments(tmp_path)


def test_the_least_recently_read_file_goes_first_after_a_restart_too(tmp_path: Path):
    tier = filled(tmp_path, 1, 2)
    assert read(tier, 1) == [1]
    tier.close()
    tier = DiskTier(tmp_path, 1 << 20, "me")
    tier.limit = tier.nbytes
    tier._shrink(1)
    assert read(tier, 1) == [1] and read(tier, 2) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_is_full_or_read_only_is_reported_once_and_harms_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
):
    tier = filled(tmp_path, 1)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr("forerun.cache.segments.save_file", refuse)
    with caplog.at_level(logging.WARNING, "forerun"):
        for number in (2, 3, 4):
            tier.put([key(number)], pages(number))
            tier.flush()
    assert len(caplog.records) == 1 and "refused" in tier.off
    assert read(tier, 1) == [1] and read(tier, 2) == [] and len(tier) == 1
    assert not list(tmp_path.glob("*.tmp"))
    tier.close()


def test_a_folder_that_was_read_only_from_the_start_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    filled(tmp_path, 1).close()
    opened = Path.open

    def refuse(path: Path, mode: str = "r", **rest: object) -> object:
        if mode != "rb":
            raise OSError(errno.EROFS, "read only")
        return opened(path, mode, **rest)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    tier = DiskTier(tmp_path, 1, "me")
    tier.put([key(2)], pages(2))
    tier.flush()
    assert "read only" in tier.off and read(tier, 1) == [1] and read(tier, 2) == [] and len(segments(tmp_path)) == 1


def test_a_path_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="cannot use"):
        DiskTier(tmp_path / "file", 1 << 20, "me")


def test_what_was_never_finished_is_removed(tmp_path: Path):
    (tmp_path / "1.99.tmp").write_text("half")
    DiskTier(tmp_path, 1 << 20, "me").close()
    assert not list(tmp_path.glob("*.tmp"))


def test_a_full_queue_drops_what_was_merely_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queued, "PENDING_BYTES", 150)
    monkeypatch.setattr(DiskTier, "_start", lambda self: None)  # a disk that never comes to it
    tier = DiskTier(tmp_path, 1 << 20, "me")
    tier.put([key(1), key(2), key(3)], pages(1, 2, 3))
    assert tier.dropped == 1 and read(tier, 1, 2, 3) == [1, 2]
    monkeypatch.undo()
    tier.put([key(4), key(5), key(6)], pages(4, 5, 6), wait=True)  # a promise: nothing is dropped
    tier.close()
    assert read(DiskTier(tmp_path, 1 << 20, "me"), 1, 2, 4, 5, 6) == [1, 2, 4, 5, 6]
