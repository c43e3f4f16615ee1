"""Memory that moves into huge pages: same addresses, same bytes, also for a reader that never stops."""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from forerun.models.cpu import huge_pages

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux moves pages")
SIZE = 5 * huge_pages.HUGE_PAGE_BYTES + 12345


def mapped(path: Path) -> torch.Tensor:
    path.write_bytes(torch.randint(0, 256, (SIZE,), dtype=torch.uint8).numpy().tobytes())
    with open(path, "rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def in_file(address: int) -> bool:
    """Whether the memory at an address belongs to a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return len(line.split()) > 5
    raise AssertionError("there is no memory at that address")


@pytest.mark.parametrize("kind", ["file", "allocated"])
def test_the_bytes_and_their_address_stay(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "PIECE_BYTES", 2 * huge_pages.HUGE_PAGE_BYTES)
    tensor = mapped(tmp_path / "weights") if kind == "file" else torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    before, address = tensor.clone(), tensor.data_ptr()
    assert huge_pages.move(address, SIZE) >= 4 * huge_pages.HUGE_PAGE_BYTES
    assert tensor.data_ptr() == address and torch.equal(tensor, before)
    if kind == "file":
        assert not in_file(huge_pages._round_up(address)) and in_file(address + SIZE - 1)


def test_a_range_without_a_whole_huge_page_stays(tmp_path: Path) -> None:
    tensor = mapped(tmp_path / "weights")
    assert huge_pages.move(huge_pages._round_up(tensor.data_ptr()) + 1, huge_pages.HUGE_PAGE_BYTES) == 0
    assert in_file(huge_pages._round_up(tensor.data_ptr()))


def test_a_reader_sees_the_same_bytes_all_the_time(tmp_path: Path) -> None:
    tensor = mapped(tmp_path / "weights")
    before, ended, reads, differed = tensor.clone(), threading.Event(), 0, False

    def read() -> None:
        nonlocal reads, differed
        while not ended.is_set():
            differed |= not torch.equal(tensor, before)
            reads += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(20):
            huge_pages.move(tensor.data_ptr(), SIZE)
    finally:
        ended.set()
        reader.join()
    assert reads > 0 and not differed


def test_tensors_move_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "unavailable", lambda size: "")
    tensor = mapped(tmp_path / "weights")
    before = tensor.clone()
    thread = huge_pages.move_in_background([tensor])
    assert thread is not None
    thread.join()
    assert torch.equal(tensor, before) and not in_file(huge_pages._round_up(tensor.data_ptr()))


def test_where_memory_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    monkeypatch.setattr(huge_pages, "SETTING", setting)
    assert "there is no" in huge_pages.unavailable(1)
    setting.write_text("always madvise [never]")
    assert "is never" in huge_pages.unavailable(1)
    setting.write_text("always [madvise] never")
    memory: Any = type("Memory", (), {"available": 4_000_000_000})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert huge_pages.unavailable(1_000_000_000) == ""
    assert "1.1 GB are more than a quarter of the 4.0 GB" in huge_pages.unavailable(1_100_000_000)
    assert huge_pages.move_in_background([torch.empty(1_100_000_000, dtype=torch.uint8)]) is None
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    assert huge_pages.unavailable(1) == "only Linux moves pages"


def test_memory_that_cannot_be_moved_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = mapped(tmp_path / "weights")
    before, libc = tensor.clone(), huge_pages._libc()
    monkeypatch.setattr(libc, "mremap", lambda *given: 0)
    monkeypatch.setattr(huge_pages, "_libc", lambda: libc)
    monkeypatch.setattr(huge_pages, "unavailable", lambda size: "")
    thread = huge_pages.move_in_background([tensor])
    assert thread is not None
    thread.join()
    assert torch.equal(tensor, before) and in_file(huge_pages._round_up(tensor.data_ptr()))
