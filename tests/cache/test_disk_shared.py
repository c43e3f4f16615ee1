"""A folder of the disk tier in several processes: each finds what the others wrote, and reads whole pages only."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from forerun.cache import disk as disk_module
from forerun.cache.disk import DiskTier
from forerun.cache.file_lock import FileLock
from forerun.cache.segments import read_header, write_segment
from tests.cache.test_disk import filled, key, pages, read, segments


@pytest.fixture(autouse=True)
def no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look finds what there is."""
    monkeypatch.setattr(disk_module, "LIST_INTERVAL_S", 0.0)


def test_pages_written_by_one_are_found_by_the_other(tmp_path: Path):
    one, two = filled(tmp_path, 1), DiskTier(tmp_path, 1 << 20, "me")
    assert read(two, 1) == [1]
    two.put([key(2)], pages(2))
    two.flush()
    one.put([key(3)], pages(3))
    one.flush()
    assert key(2) in one and key(3) in two and key(4) not in one
    assert read(one, 1, 2, 3) == read(two, 1, 2, 3) == [1, 2, 3]
    assert one.nbytes == two.nbytes
    one.close()
    two.close()
    assert not list(tmp_path.glob("*.writer"))


def test_a_change_within_the_tick_of_the_folders_time_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    one, two = filled(tmp_path, 1), DiskTier(tmp_path, 1 << 20, "me")
    assert key(2) not in two
    frozen = tmp_path.stat().st_mtime_ns
    one.put([key(2)], pages(2))
    one.flush()
    monkeypatch.setattr(type(tmp_path), "stat", lambda *_, **__: type("Stat", (), {"st_mtime_ns": frozen})())
    assert key(2) in two  # its time has not changed, but it may have
    two._changed_at = float("-inf")
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda self: pytest.fail("listed again for nothing"))
    assert key(3) not in two


def test_a_page_is_written_once(tmp_path: Path):
    one, two = DiskTier(tmp_path, 1 << 20, "me"), DiskTier(tmp_path, 1 << 20, "me")
    for tier in (one, two):
        tier.put([key(1), key(2)], pages(1, 2))
        tier.flush()
    assert len(segments(tmp_path)) == 1 and read(two, 1, 2) == [1, 2]


def test_a_file_that_another_evicted_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    one, two = filled(tmp_path, 1), DiskTier(tmp_path, 1 << 20, "me")
    one._remove(segments(tmp_path)[0])
    assert read(two, 1) == [] and two.damaged == 0 and not caplog.records
    two.put([key(1)], pages(1))  # computed again
    two.flush()
    assert read(one, 1) == [] and key(1) in one and read(one, 1) == [1]


def test_all_together_stay_within_the_bytes_and_evict_what_none_uses(tmp_path: Path):
    one = filled(tmp_path, 1, 2, 3)
    limit = one.limit = one.nbytes + (1 << 16)
    two = DiskTier(tmp_path, limit, "me")
    assert read(one, 1) == [1]  # used by one: it is not the first to go when two needs room
    for number in (4, 5):
        two.put([key(number)], pages(number))
        two.flush()
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= limit
    assert read(two, 1) == [1] and read(two, 2) == []


def test_clocks_that_differ_do_not_make_the_newest_file_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fast = filled(tmp_path, 1, 2)
    real = time.time_ns
    slow = DiskTier(tmp_path, fast.nbytes + (1 << 16), "me")
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3600 * 10**9)
    slow.put([key(3)], pages(3))
    slow.flush()
    slow._shrink(slow.limit - fast.nbytes // 2)  # room for one file
    assert read(slow, 3) == [3] and read(slow, 1) == read(slow, 2) == []


def test_unfinished_files_go_when_their_writer_is_gone(tmp_path: Path):
    alive = DiskTier(tmp_path, 1 << 20, "me")
    mine, gone = tmp_path / f"1.{alive._alive.path.stem}.tmp", tmp_path / "2.0123456789ab.tmp"
    mine.write_text("half")
    gone.write_text("half")
    (tmp_path / "0123456789ab.writer").write_text("")  # killed: the file is there, the lock is free
    DiskTier(tmp_path, 1 << 20, "me").close()
    assert (
        mine.exists()
        and not gone.exists()
        and [path.stem for path in tmp_path.glob("*.writer")] == [alive._alive.path.stem]
    )


def test_a_stopped_process_that_holds_the_lock_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_module, "WRITE_LOCK_S", 0.02)
    stopped = FileLock(tmp_path / "lock")
    assert stopped.acquire()
    tier = filled(tmp_path, 1)
    assert read(tier, 1) == [1] and len(segments(tmp_path)) == 1


def test_a_folder_that_stops_answering_harms_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tier = filled(tmp_path, 1)

    def stale(*_: object, **__: object) -> object:
        raise OSError(errno.ESTALE, "stale file handle")

    monkeypatch.setattr(type(tmp_path), "stat", stale)
    assert key(9) not in tier
    monkeypatch.setattr(type(tmp_path), "open", stale)
    assert read(tier, 1) == [] and tier.damaged == 0


def test_a_lock_is_of_the_file_that_has_the_name(tmp_path: Path):
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire() and not second.acquire()
    first.remove()
    assert not (tmp_path / "lock").exists() and second.acquire() and not first.acquire()


WORKER = """
import hashlib, random, sys, torch
from pathlib import Path
from forerun.cache import disk, queued
queued.WRITE_BYTES, disk.LIST_INTERVAL_S = 1 << 14, 0.001

def page(number):
    return torch.frombuffer(bytearray(hashlib.sha256(b"%d" % number).digest() * 64), dtype=torch.uint8)

def key(number):
    return number.to_bytes(16, "little")

folder, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tier, rng, served = disk.DiskTier(folder, 200_000, "me"), random.Random(seed), 0
print("open", flush=True)
for _ in range(rounds):
    first = rng.randrange(200)
    numbers = range(first, first + rng.randrange(1, 12))
    out = torch.zeros(len(numbers), 2048, dtype=torch.uint8)
    found = tier.get([key(n) for n in numbers], out)
    assert all(torch.equal(out[i], page(n)) for i, n in zip(range(found), numbers)), "a torn or wrong page"
    served += found
    tier.put([key(n) for n in numbers], torch.stack([page(n) for n in numbers]), wait=True)
    key(1000 + seed) in tier
tier.flush()
assert not tier.off and not tier.damaged, (tier.off, tier.damaged)
tier.close()
print("served", served, flush=True)
"""


def test_processes_that_read_write_and_evict_at_once_see_whole_pages_only(tmp_path: Path):
    def start(seed: int, rounds: int) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", WORKER, str(tmp_path), str(seed), str(rounds)]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    killed, *others = start(0, 10**9), start(1, 300), start(2, 300)
    try:
        assert killed.stdout is not None and killed.stdout.readline() == "open\n"
        ended = [process.communicate(timeout=100) for process in others]
    finally:
        killed.kill()
        killed.wait()
    for (out, error), process in zip(ended, others, strict=True):
        assert process.returncode == 0, error
        assert int(out.split()[-1]) > 0
    tier = DiskTier(tmp_path, 200_000, "me")  # after a kill in the middle of anything
    assert tier.nbytes <= 200_000 and not list(tmp_path.glob("*.tmp")) and not tier.damaged
    found = [number for number in range(200) if number.to_bytes(16, "little") in tier]
    out = torch.zeros(1, 2048, dtype=torch.uint8)
    assert found and all(tier.get([n.to_bytes(16, "little")], out) == 1 for n in found)
    assert [path.stem for path in tmp_path.glob("*.writer")] == [tier._alive.path.stem]


def test_a_segment_is_not_there_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr("forerun.cache.segments.os.replace", lambda *names: seen.append(segments(tmp_path)))
    with pytest.raises(FileNotFoundError):
        write_segment(tmp_path / "a.safetensors", "me", [key(1)], pages(1), "writer")
    assert seen == [[]] and [path.name for path in tmp_path.iterdir()] == ["a.writer.tmp"]
    monkeypatch.undo()
    assert read_header(write_segment(tmp_path / "a.safetensors", "me", [key(1)], pages(1)).path).keys == [key(1)]
