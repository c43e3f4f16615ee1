"""The store tier: exact pages in Mooncake's store, memory of several machines behind one master, over TCP.

A page is an object named by its key, with a checksum before its bytes. What does not agree with it is removed and
counts as absent. A master that does not answer costs one failed call and a line in the log; requests go on without the
store, and it is asked again later. Knows no tokens and no pool; only `open_mooncake` imports Mooncake.
"""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from forerun.cache.queued import WRITE_BYTES, QueuedTier, log
from forerun.errors import BadRequest

SCHEME = "mooncake://"
CONNECT_TIMEOUT_S = 1.0
RETRY_S = 15.0  # after a call that failed: a call to a master that is gone blocks for 4 s, all but the first
BUFFER_BYTES = 2 * WRITE_BYTES  # of the client, for pages on their way
CHECKSUM_BYTES = 4
RPC_FAILED = -900  # Mooncake's code for a master that did not answer


class StoreClient(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`."""

    def put_batch(self, keys: list[str], values: list[Any]) -> int: ...
    def get_batch(self, keys: list[str]) -> list[bytes]: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def remove(self, key: str) -> int: ...
    def close(self) -> int: ...


class StoreTier(QueuedTier):
    name = "store"

    def __init__(self, address: tuple[str, int], nbytes: int, client: StoreClient) -> None:
        """`nbytes`: of this process's own memory that the store uses."""
        super().__init__(max(nbytes, WRITE_BYTES))
        self._address, self._client = address, client
        self._failed_at: float | None = None
        self._written = self._written_bytes = 0

    def __len__(self) -> int:
        """Pages that this process has written; how many all have is the master's."""
        return self._written

    @property
    def nbytes(self) -> int:
        return self._written_bytes

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        with self._changed:
            there = [key in self._pending for key in keys]
        asked = [i for i, found in enumerate(there) if not found]
        if asked and self._reachable():
            codes = self._client.batch_is_exist([_name(keys[i]) for i in asked])
            self._check(min(codes, default=0))
            for i, code in zip(asked, codes, strict=True):
                there[i] = code == 1
        return there

    def __contains__(self, key: bytes) -> bool:
        return self.held([key])[0]

    def get(self, keys: Sequence[bytes], out: Tensor) -> int:
        done, at_once = 0, max(1, WRITE_BYTES // out[0].nbytes)
        while done < len(keys):
            with self._changed:
                waiting = self._pending.get(keys[done])
            if waiting is not None:
                out[done] = waiting
                done += 1
                continue
            if not self._reachable():
                break
            part = keys[done : done + at_once]
            sound = self._copy(part, self._client.get_batch([_name(key) for key in part]), out[done:])
            done += sound
            if sound < len(part):
                break
        return done

    def _copy(self, keys: Sequence[bytes], values: Sequence[bytes], out: Tensor) -> int:
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            if not value:
                return i
            page = memoryview(value)[CHECKSUM_BYTES:]
            if len(page) != out[i].nbytes or zlib.crc32(page) != int.from_bytes(value[:CHECKSUM_BYTES], "little"):
                log.warning("a page of %s is not used: it does not agree with its checksum", self._where_it_is())
                self.damaged += 1
                self._client.remove(_name(key))
                return i
            out[i].view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(page), dtype=torch.uint8))
        return len(keys)

    def _known(self, key: bytes) -> bool:
        return False  # the store itself ignores a page that it has

    def _write(self, keys: list[bytes], data: Tensor) -> None:
        if not self._reachable():
            self.dropped += len(keys)
            return
        values = []
        for page in data:
            raw = page.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            values.append(zlib.crc32(raw).to_bytes(CHECKSUM_BYTES, "little") + raw)
        names = [_name(key) for key in keys]
        code = self._client.put_batch(names, values)
        if code and self._check(code):  # full, and all of it in use: some may be there
            there = sum(found == 1 for found in self._client.batch_is_exist(names))
        else:
            there = 0 if code else len(keys)
        self.dropped += len(keys) - there
        self._written += there
        self._written_bytes += there * data[0].nbytes

    def _reachable(self) -> bool:
        """Whether to call the master: after a failure only where it accepts a connection, and not at once."""
        if self._failed_at is None:
            return True
        if time.monotonic() - self._failed_at < RETRY_S:
            return False
        try:
            socket.create_connection(self._address, CONNECT_TIMEOUT_S).close()
        except OSError:
            self._failed_at = time.monotonic()
            return False
        self._failed_at = None
        return True

    def _check(self, code: int) -> bool:
        if code == RPC_FAILED:
            self._failed_at = time.monotonic()
            log.warning("the store at %s does not answer: requests go on without it", self._where_it_is())
        return code != RPC_FAILED

    def _where_it_is(self) -> str:
        return f"{SCHEME}{self._address[0]}:{self._address[1]}"

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._client.close()


def _name(key: bytes) -> str:
    return f"forerun-{key.hex()}"


def parse_address(text: object) -> tuple[str, int]:
    host, _, port = text.removeprefix(SCHEME).rpartition(":") if isinstance(text, str) else ("", "", "")
    if not str(text).startswith(SCHEME) or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        hint = f"give {SCHEME}HOST:PORT of a mooncake_master (its rpc_port)"
        raise BadRequest(f"store is {text!r:.80}, which is no store", hint)
    return host.strip("[]"), int(port)


def reach_master(address: tuple[str, int]) -> str:
    """This machine's address on the way to a master that accepts connections."""
    try:
        with socket.create_connection(address, CONNECT_TIMEOUT_S) as connected:  # Mooncake itself tries for 90 s
            return str(connected.getsockname()[0])
    except OSError as error:
        where = f"{SCHEME}{address[0]}:{address[1]}"
        hint = "start one: mooncake_master --rpc_port PORT; and check that this machine can reach it"
        raise BadRequest(f"no Mooncake master answers at {where}: {error}", hint) from None


def open_mooncake(address: tuple[str, int], nbytes: int) -> StoreTier:
    """Join the store whose master is there, with so many bytes of this process's memory."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        made: Any = import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        hint = "pip install 'forerun[mooncake]'; it needs libibverbs (Debian: apt install libibverbs1), for TCP too"
        raise BadRequest(f"the store tier needs Mooncake, which cannot be imported: {error}", hint) from None
    here = reach_master(address)
    code = made.setup(here, "P2PHANDSHAKE", nbytes, BUFFER_BYTES, "tcp", "", f"{address[0]}:{address[1]}")
    if code:
        hint = "see what Mooncake printed"
        raise BadRequest(f"cannot join the store of {address[0]}:{address[1]}: code {code}", hint)
    return StoreTier(address, nbytes, made)
