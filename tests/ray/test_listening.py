"""Parts of responses come through one call for each replica: what happens to it must not be a request's own fate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.ray import cluster
from forerun.ray.call import get_call
from forerun.ray.cluster import RayReplicas
from forerun.ray.front import ReplicaLost

REQUEST: ContextVar[str] = ContextVar("request", default="none")  # as Ray Serve keeps a request's own


class LostActor(Exception):
    pass


class Response:
    """A call of Ray Serve that streams."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items

    def __anext__(self) -> Any:
        return self._items.__anext__()

    def cancel(self) -> None:
        pass


class Handle:
    """Of one replica, whose parts are what `batches` yields."""

    def __init__(self, batches: Callable[[int], AsyncIterator[Any]]) -> None:
        self.heard: list[str] = []  # the request in whose context each listening call was made
        self.respond, self.batches = SimpleNamespace(remote=self._respond), SimpleNamespace(remote=self._listen)
        self._batches = batches
        self.asked: list[int] = []

    def options(self, **_: Any) -> Handle:
        return self

    def _respond(self, call: Any, front: str, number: int) -> Response:
        self.asked.append(number)

        async def named() -> AsyncIterator[str]:
            yield "one"

        return Response(named())

    def _listen(self, call: Any, front: str) -> Response:
        self.heard.append(REQUEST.get())
        return Response(self._batches(len(self.heard)))


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = SimpleNamespace(RayActorError=LostActor, WorkerCrashedError=LostActor)
    monkeypatch.setattr(cluster, "load_ray", lambda: (SimpleNamespace(exceptions=exceptions), None))


async def answered(replicas: RayReplicas) -> list[Any]:
    return [part async for _, part in replicas.stream(get_call("/"))]


@pytest.mark.usefixtures("no_ray")
async def test_listening_is_not_part_of_the_request_that_began_it():
    async def batches(_: int) -> AsyncIterator[Any]:
        yield "one", [(handle.asked[-1], "part"), (handle.asked[-1], None)]

    handle = Handle(batches)
    REQUEST.set("the one whose client leaves")
    assert await asyncio.wait_for(answered(RayReplicas(handle)), 10) == ["part"]
    assert set(handle.heard) == {"none"}


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("error", [asyncio.CancelledError, LostActor, RuntimeError])
async def test_a_call_that_fails_ends_its_requests_and_the_next_one_listens_again(error: type[BaseException]):
    async def batches(times: int) -> AsyncIterator[Any]:
        if times == 1:
            await asyncio.sleep(0.01)
            raise error
        yield "one", [(handle.asked[-1], "part"), (handle.asked[-1], None)]

    handle = Handle(batches)
    replicas = RayReplicas(handle)
    with pytest.raises(ReplicaLost):
        await asyncio.wait_for(answered(replicas), 10)
    assert await asyncio.wait_for(answered(replicas), 10) == ["part"]
