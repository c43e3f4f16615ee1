"""Replicas on Ray Serve: starts or joins a cluster, deploys, reaches replicas, replaces them, and ends what it started.

The one place that opens Ray, when replicas are asked for. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from typing import Any

from starlette.types import Message

from forerun.errors import BadRequest, ForerunError
from forerun.ray.call import ReplicaCall, count_ended, get_call, known_replicas
from forerun.ray.front import ReplicaLost
from forerun.ray.outbox import Batch, Outboxes
from forerun.ray.replica import EngineReplica, ReplicaSettings

log = logging.getLogger("forerun.serve")

OLDEST_RAY, NEXT_RAY = (2, 60), (3, 0)  # the oldest is the one that tests run with
APPLICATION, DEPLOYMENT = "forerun", "EngineReplica"
CONNECT_TIMEOUT_S = 5.0
HTTP2_SETTINGS = 4  # type of a frame
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, HTTP2_SETTINGS, 0, 0, 0, 0, 0])
FIRST_ASKED = "/ray.rpc.NodeInfoGcsService/GetClusterId"  # of a head, by every driver
OBJECT_STORE_BYTES = 100 << 20  # nothing large is stored there; Ray's least is 75 MB
QUIET_LOGS = {"log_level": "WARNING", "enable_access_log": False}
START_LOGS = QUIET_LOGS | {"log_level": "CRITICAL"}  # of a Ray of our own: why replicas do not start is one error
# What Ray prints of a controller that has ended as it was asked to: it had been asked more than once
ENDED = r"Task ServeController\.\w+ failed\..* killed by `ray\.kill`"
LOG_SETTINGS = {  # of lines of replicas in the log of the front
    "RAY_DISABLE_WORKER_LOG_PREFIX": "1",  # those of replicas have their name, and may be JSON
    "RAY_DEDUP_LOGS_ALLOW_REGEX": f"^(?!{ENDED})",  # else only one of those that differ in numbers is printed
    "RAY_DEDUP_LOGS_SKIP_REGEX": f"^{ENDED}",
}
MAX_START_TRIES = 3  # of a replica that cannot open its model
LOOK_BACK_S = 15.0  # that open requests are averaged over; Ray counts them every 10 s
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 30.0


@dataclass(frozen=True)
class Scale:
    """How many replicas there are, and what each gets of the cluster."""

    replicas: int
    max_replicas: int | None = None  # more are started while requests are queued
    cpus: float = 1.0
    gpus: float = 0.0
    target_open: int = 32  # requests open at each replica, beyond which more replicas are started
    upscale_s: float = 5.0  # how long it must have been so, beside the window that Ray averages over
    downscale_s: float = 120.0  # and for fewer: a replica's cache ends with it


def load_ray() -> tuple[Any, Any]:
    """Ray and its Serve; an error that names the way out where there is none, or another one."""
    for name, value in LOG_SETTINGS.items():
        os.environ.setdefault(name, value)  # read when Ray is imported
    try:
        ray, serve = import_module("ray"), import_module("ray.serve")
    except ImportError as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadRequest(
            f"replicas need Ray Serve, which cannot be imported: {why}", "pip install 'forerun[ray]'"
        ) from None
    found = str(getattr(ray, "__version__", "of no known version"))  # another module may have the name
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not OLDEST_RAY <= (int(numbers[1]), int(numbers[2])) < NEXT_RAY:
        wanted = f"{'.'.join(map(str, OLDEST_RAY))} up to below {'.'.join(map(str, NEXT_RAY))}"
        raise BadRequest(f"Ray {found} is installed, replicas need {wanted}", "pip install 'forerun[ray]'")
    return ray, serve


@contextmanager
def cluster(address: str | None, cpus: float, gpus: float = 0.0) -> Iterator[None]:
    """The cluster at an address, or one of our own with so many CPUs and GPUs, which ends with the block."""
    ray, serve = load_ray()
    own_signals, before = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGTERM)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # Ray's 15 leaves a replica 3% of a core that another program uses
    try:
        if address is None:
            ray.init(
                address="local",  # without it Ray joins a cluster that runs here, or that RAY_ADDRESS names
                num_cpus=max(1, math.ceil(cpus)),
                num_gpus=math.ceil(gpus),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                logging_level="error",
                namespace="forerun",
            )
        else:
            _check_address(address)
            ray.init(address=address, logging_level="error", namespace="forerun")
    except BadRequest:
        raise
    except Exception as error:
        with suppress(Exception):
            ray.shutdown()
        where = "start Ray here" if address is None else f"join the Ray cluster at {address}"
        hint = "see what Ray printed; versions of Ray and Python must be the same on all machines"
        if address == "auto" and isinstance(error, ConnectionError):  # what Ray raises where `auto` finds none
            hint = "start one with `ray start --head`, or leave --ray out"
        raise ForerunError(f"cannot {where}: {str(error).strip().splitlines()[0]}", hint) from error
    if own_signals:  # only the main thread can have them
        # Until a server has its own: Ray's aborts, with a trace of its stack, and what it started is left for a while
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="Disabled", logging_config=START_LOGS if address is None else QUIET_LOGS)
        if address is not None and APPLICATION in serve.status().applications:
            hint = "end that server, or remove what one that was killed has left: `serve shutdown`"
            raise BadRequest(f"the Ray cluster at {address} has an application {APPLICATION!r} already", hint)
        yield
    finally:
        with suppress(Exception):
            if address is None:
                serve.shutdown()
        ray.shutdown()
        if own_signals:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def show_warnings() -> None:
    """What Ray's controller has to say once replicas run: of those that fail their health checks, for instance."""
    load_ray()
    with suppress(ImportError, AttributeError, TypeError):  # not public; without it that is in no log
        configure = import_module("ray.serve.context")._get_global_client().update_global_logging_config
        configure(import_module("ray.serve.schema").LoggingConfig(**QUIET_LOGS))


def warn_of_little_room(scale: Scale) -> None:
    """Ray waits without a word for CPUs and GPUs that a cluster does not have; one that grows may get them."""
    there = load_ray()[0].cluster_resources()
    for name, each in (("CPU", scale.cpus), ("GPU", scale.gpus)):
        if there.get(name, 0.0) < each * scale.replicas:
            text = "the cluster has %g %ss and %d replicas want %g each: those without wait until it has more"
            log.warning(text, there.get(name, 0.0), name, scale.replicas, each)


def _check_address(address: str) -> None:
    """Ray itself waits for minutes."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")  # which Ray takes then
        if not address:
            return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:  # ray:// has no Serve that could be reached from here
        raise BadRequest(
            f"--ray {address!r:.80} is no address", "give HOST:PORT as `ray start --head` prints it, or auto"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as connection:
            plain = os.environ.get("RAY_USE_TLS") != "1"
            if plain and not _speaks_http2(connection):
                raise OSError("what listens there is no Ray")
        if plain and not _knows_ray(address):
            raise OSError("what listens there is no head of a Ray cluster")
    except (OSError, OverflowError) as error:
        hint = "check the address that `ray start --head` printed, and that this machine can reach it"
        raise BadRequest(f"no Ray cluster answers at {address}: {error}", hint) from None


def _speaks_http2(connection: socket.socket) -> bool:
    """As all of Ray's servers do: the answer to a preface begins with a frame of settings."""
    connection.sendall(HTTP2_PREFACE)
    head = connection.recv(9)
    return len(head) > 3 and head[3] == HTTP2_SETTINGS


def _knows_ray(address: str) -> bool:
    """Whether a server of gRPC has the service that drivers ask first: other processes of Ray have not. Where it wants
    a token, Ray is told to send the one there is: for an address that is named it does not."""
    try:
        import grpc  # type: ignore[import-untyped]
    except ImportError:  # Ray brings it
        return True
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(FIRST_ASKED)(b"", timeout=CONNECT_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED and not _send_token():
                hint = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to what `ray get-auth-token` prints on its head"
                raise BadRequest(f"the Ray cluster at {address} wants a token", hint) from None
            return error.code() is not grpc.StatusCode.UNIMPLEMENTED
    return True


def _send_token() -> bool:
    """Whether Ray sends a token from now on: one in RAY_AUTH_TOKEN or in its file."""
    try:
        setup = import_module("ray._private.authentication.authentication_token_setup")
        logging.getLogger(setup.__name__).setLevel(logging.ERROR)  # it says that there are tokens
        return bool(setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False))
    except (ImportError, AttributeError, TypeError):  # not public; without it RAY_AUTH_MODE decides
        return os.environ.get("RAY_AUTH_MODE") == "token"


@dataclass
class _OpenCall:
    parts: asyncio.Queue[Any]  # messages of its response; None: it has ended; an exception: it was lost
    name: str = ""  # of its replica, once that has it


class RayReplicas:
    """Replicas behind a handle of their deployment. Parts of responses come through one stream of each replica."""

    def __init__(self, handle: Any, application: str = APPLICATION) -> None:
        self._handle, self._application = handle.options(stream=True), application
        self._ray, _ = load_ray()
        self._lost = (self._ray.exceptions.RayActorError, self._ray.exceptions.WorkerCrashedError)
        self._numbers = count()
        self._open: dict[int, _OpenCall] = {}
        self._listeners: dict[str, asyncio.Task[None]] = {}  # by replica
        self._front = ""  # the name under which replicas send
        self._loop: asyncio.AbstractEventLoop | None = None

    def names(self) -> list[str]:
        return known_replicas(self._application)

    async def stream(self, call: ReplicaCall) -> AsyncIterator[tuple[str, list[Message]]]:
        if self._loop is not asyncio.get_running_loop():  # what an earlier loop has not read is not this one's
            self._loop, self._front, self._listeners = asyncio.get_running_loop(), uuid.uuid4().hex, {}
        number, own = next(self._numbers), _OpenCall(asyncio.Queue())
        self._open[number] = own
        response = self._handle.respond.remote(call, self._front, number)
        ended = False
        try:
            own.name = await anext(response)
            self._listen(own.name)
            while (part := await own.parts.get()) is not None:
                if isinstance(part, Exception):
                    raise part
                yield own.name, part
            async for _ in response:  # raises what the replica's own code raised
                pass
            ended = True
        except self._lost as error:
            ended = True
            raise ReplicaLost from error
        finally:
            del self._open[number]
            count_ended(self._application, call)
            if not ended:
                response.cancel()

    def _listen(self, name: str) -> None:
        if name not in self._listeners:
            # In a context of its own: Ray Serve cancels what was called in that of a request whose client leaves
            self._listeners[name] = asyncio.create_task(self._hand_out(name), context=Context())

    async def _hand_out(self, name: str) -> None:
        """Parts of all requests at a replica, to each its own, until it has none open."""
        failed: Exception | None = None
        try:
            async for sender, batch in self._handle.batches.remote(get_call("/").to(name), self._front):
                if sender != name:
                    raise ReplicaLost  # it is gone, and another one got this call
                for number, part in batch:
                    if number in self._open:
                        self._open[number].parts.put_nowait(part)
        except (Exception, asyncio.CancelledError) as error:  # a call that was cancelled raises the latter, too
            failed = ReplicaLost()
            if not isinstance(error, (ReplicaLost, asyncio.CancelledError, *self._lost)):
                log.exception("the stream of replica %s failed", name)
        del self._listeners[name]
        own = [found for found in self._open.values() if found.name == name]
        for found in own if failed is not None else []:
            found.parts.put_nowait(failed)
        if own and failed is None:  # one came as it ended
            self._listen(name)

    async def warm_up(self) -> None:
        """The first request makes the router, which then knows the replicas."""
        async for _ in self.stream(get_call("/health")):
            pass


def deploy(settings: ReplicaSettings, scale: Scale) -> RayReplicas:
    """Start replicas and wait until all have opened the model; where there are some of other settings, they are
    replaced one by one, each after its open requests have ended."""
    _, serve = load_ray()
    target = deployment(settings, scale).bind(settings)
    try:
        handle = serve.run(target, name=APPLICATION, route_prefix=None, logging_config=QUIET_LOGS)
    except Exception as error:
        why, hint = _first_cause(serve) or (str(error).strip().splitlines()[0], "see what they printed")
        raise ForerunError(f"the replicas did not start: {why}", hint) from error
    replicas = RayReplicas(handle)
    asyncio.run(replicas.warm_up())
    return replicas


def _first_cause(serve: Any) -> tuple[str, str] | None:
    """What a replica failed with, and its hint: from the last lines of its traceback."""
    with suppress(Exception):
        lines = serve.status().applications[APPLICATION].deployments[DEPLOYMENT].message.splitlines()
        return cause_in(lines)
    return None


def cause_in(lines: list[str]) -> tuple[str, str] | None:
    found = [i for i, line in enumerate(lines) if re.match(r"(?!hint)[\w.]+(Error|Request|Exception)?: ", line)]
    if not found:
        return None
    after = lines[found[-1] + 1] if found[-1] + 1 < len(lines) else ""
    hint = after.removeprefix("hint: ") if after.startswith("hint: ") else "see what they printed"
    return lines[found[-1]].split(": ", 1)[1], hint


def close() -> None:
    """End the replicas, each after its open requests have ended."""
    _, serve = load_ray()
    with suppress(Exception):
        serve.delete(APPLICATION)


def deployment(settings: ReplicaSettings, scale: Scale) -> Any:
    """Ray's description of the replicas; `bind` it to their settings."""
    _, serve = load_ray()
    from ray.serve.config import RequestRouterConfig

    from forerun.ray.router import ReplicaRouter

    count: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.max_replicas is not None:
        limits: dict[str, Any] = {"min_replicas": scale.replicas, "max_replicas": scale.max_replicas}
        limits |= {"target_ongoing_requests": scale.target_open, "look_back_period_s": LOOK_BACK_S}
        delays = {"upscale_delay_s": scale.upscale_s, "downscale_delay_s": scale.downscale_s}
        count = {"autoscaling_config": limits | delays}
    return serve.deployment(
        RayReplica,
        name=DEPLOYMENT,
        max_ongoing_requests=settings.max_open + 64,  # the front has the limits; and what is no answer
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        request_router_config=RequestRouterConfig(request_router_class=ReplicaRouter),
        graceful_shutdown_timeout_s=settings.config.max_request_s,  # no open request is cut
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=MAX_START_TRIES,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        **count,
    )


class RayReplica:
    """An engine under the name that Ray gives it."""

    def __init__(self, settings: ReplicaSettings) -> None:
        _, serve = load_ray()
        self._engine = EngineReplica(settings, serve.get_replica_context().replica_id.unique_id)
        self._outboxes = Outboxes()

    async def respond(self, call: ReplicaCall, front: str, number: int) -> AsyncIterator[str]:
        """This replica's name; the response itself comes through `batches`."""
        yield self._engine.name
        await self._outboxes.fill(front, number, self._engine.respond(call))

    async def batches(self, call: ReplicaCall, front: str) -> AsyncIterator[tuple[str, Batch]]:
        """Parts of all responses to a front. `call` only decides the replica."""
        async for batch in self._outboxes.batches(front):
            yield self._engine.name, batch

    def check_health(self) -> None:
        self._engine.check_health()

    def __del__(self) -> None:
        """Ray calls it when the replica is to end and its requests have ended, also where it has never begun."""
        if hasattr(self, "_engine"):
            self._engine.close()
