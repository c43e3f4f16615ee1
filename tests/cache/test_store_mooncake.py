"""The store tier on a real Mooncake over TCP: a master and two processes, of which one is killed, then the master."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mooncake
import pytest

MASTER = str(Path(mooncake.__file__).parent / "mooncake_master")
WORKER = """
import json, sys
from forerun.cache.tiers import TierConfig
from tests.cache.test_tiers import World
made = World(64, TierConfig(store=sys.argv[1], store_bytes=int(sys.argv[2])))
for line in sys.stdin:
    texts, spill = json.loads(line)
    served = [made.ask(text) for text in texts]  # compares every page that is read
    if spill:
        made.spill_all()
        made.tiers.outer[0].flush()
    print(json.dumps([served, made.tiers.figures()["store"]]), flush=True)
made.tiers.close(made.tree)
print("closed", flush=True)
"""


def start_master() -> tuple[subprocess.Popen[bytes], str]:
    while True:  # it takes no port 0; where another process was faster, the next port
        with socket.socket() as rpc, socket.socket() as metrics:
            rpc.bind(("127.0.0.1", 0))
            metrics.bind(("127.0.0.1", 0))
            ports = [found.getsockname()[1] for found in (rpc, metrics)]
        command = [MASTER, "--rpc_address=127.0.0.1", f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"]
        process = subprocess.Popen([*command, "--client_ttl=2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", ports[0]), 1).close()
                return process, f"mooncake://127.0.0.1:{ports[0]}"
            except OSError:
                continue


@pytest.fixture
def master() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process, address = start_master()
    yield process, address
    process.kill()
    process.wait()


class Worker:
    def __init__(self, address: str, nbytes: int) -> None:
        command = [sys.executable, "-c", WORKER, address, str(nbytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, texts: list[list[int]], spill: bool = False) -> tuple[list[dict[str, int]], dict[str, Any]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([texts, spill]) + "\n")
        self.process.stdin.flush()
        served, figures = json.loads(self.process.stdout.readline())
        return served, figures

    def end(self) -> None:
        out, _ = self.process.communicate()
        assert out == "closed\n" and self.process.returncode == 0


def texts(first: int, count: int = 8) -> list[list[int]]:
    return [[(first + number) * 50 + i for i in range(12)] for number in range(count)]


def test_two_processes_share_pages_and_outlive_each_other_and_the_master(master: Any):
    process, address = master
    one, two = Worker(address, 32 << 20), Worker(address, 32 << 20)
    served, figures = one.ask(texts(0), spill=True)
    assert all(found["store"] == 0 for found in served) and figures["tokens"] == 8 * 12 and not figures["dropped_pages"]
    served, _ = two.ask(texts(0), spill=True)
    assert [found["store"] for found in served] == [12] * 8
    one.process.kill()
    one.process.wait()
    served, figures = two.ask([*texts(0), *texts(8)], spill=True)  # what lay in its memory is computed again
    assert not figures["off"]
    served, _ = two.ask(texts(8))
    assert sum(found["store"] for found in served) >= 12
    process.kill()
    process.wait()
    two.ask([*texts(0), *texts(16)], spill=True)
    two.end()
