"""Mail from another thread: complete, in order, with few wake-ups."""

from __future__ import annotations

import asyncio
import threading

import pytest

from forerun.runtime.threads import Mailbox


async def test_everything_arrives_in_order_from_several_threads() -> None:
    mailbox: Mailbox[tuple[int, int]] = Mailbox(asyncio.get_running_loop())
    inboxes: list[asyncio.Queue[tuple[int, int]]] = [asyncio.Queue() for _ in range(4)]

    def send(number: int) -> None:
        for i in range(2000):
            mailbox.put(inboxes[i % 4], (number, i))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for place, inbox in enumerate(inboxes):
        got = [await asyncio.wait_for(inbox.get(), 10) for _ in range(1500)]
        for number in range(3):
            assert [i for sender, i in got if sender == number] == list(range(place, 2000, 4))
    for thread in threads:
        thread.join()


async def test_one_wake_up_for_all_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, calls = asyncio.get_running_loop(), []
    call = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda f: calls.append(call(f)))
    mailbox: Mailbox[int] = Mailbox(loop)
    inbox: asyncio.Queue[int] = asyncio.Queue()
    for step in range(2):
        for i in range(64):
            mailbox.put(inbox, i)
        assert [await inbox.get() for _ in range(64)] == list(range(64)) and len(calls) == step + 1


def test_a_closed_loop_is_an_error_every_time() -> None:
    loop = asyncio.new_event_loop()
    mailbox: Mailbox[int] = Mailbox(loop)
    loop.close()
    inbox: asyncio.Queue[int] = asyncio.Queue()
    for _ in range(2):  # an error each time: the sender can end its request
        with pytest.raises(RuntimeError):
            mailbox.put(inbox, 1)
