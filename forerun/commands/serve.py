"""`forerun serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import socket
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.commands import options as opt
from forerun.errors import BadRequest, ForerunError
from forerun.options import check_number
from forerun.runtime.threads import run_in_thread

if TYPE_CHECKING:
    from forerun.llm import LLM
    from forerun.ray.cluster import Scale
    from forerun.serve.config import ApiKeys, ServeConfig

KEYS_VARIABLE = "FORERUN_API_KEYS"
LOCAL = ("127.0.0.1", "::1", "localhost")

_listening = functools.partial(opt.shown, rich_help_panel="Listening")
_limiting = functools.partial(opt.shown, rich_help_panel="Limits")
_access = functools.partial(opt.shown, rich_help_panel="Access")
_scaling = functools.partial(opt.shown, rich_help_panel="Replicas")
_observing = functools.partial(opt.shown, rich_help_panel="Observability")


@dataclass(frozen=True)
class ServerOptions:
    """Options of the server; see `ServeConfig`."""

    host: str = _listening("127.0.0.1", help="Address to listen on; 0.0.0.0: all interfaces.")
    port: int = _listening(8000, "--port", "-p", min=0, max=65535, help="0: any free one.")
    name: str | None = _listening(None, help="The model's name for clients; default: as --model.")
    max_num_seqs: int = _limiting(64, min=1, help="Answers that are computed at once.")
    max_queue: int = _limiting(256, min=0, help="Answers that may be queued beside them; more get 429.")
    max_body: float = _limiting(8.0, help="Largest request in MB; larger ones get 413.")
    timeout: float = _limiting(600.0, help="Longest time of a request, queueing included, in seconds.")
    drain: float = _limiting(30.0, help="Seconds for open answers to end after SIGTERM or Ctrl-C.")
    max_sessions: int = _limiting(256, min=1, help="Sessions open at once; with --disk, more are stored there.")
    session_ttl: float = _limiting(3600.0, help="Longest time that sessions may hold K/V in the pool, in seconds.")
    drafter: list[str] | None = _limiting(None, help="A drafter that requests may name; may be repeated.")
    strict: bool = _limiting(False, "--strict", help="Refuse unknown fields of requests; else they are ignored.")
    api_keys: Path | None = _access(
        None, help=f"A file of NAME SHA256 LIMIT weight=W lines; default: ${KEYS_VARIABLE}, else no keys."
    )
    cors: list[str] | None = _access(None, help="An origin whose pages may send requests; may be repeated.")
    allowed_host: list[str] | None = _access(None, help="A host name that requests may use; may be repeated; *: any.")
    replicas: int | None = _scaling(None, min=1, help="So many engines on Ray Serve instead of one in this process.")
    max_replicas: int | None = _scaling(None, min=1, help="Start more while requests are queued, up to so many.")
    ray: str | None = _scaling(None, help="Join the Ray cluster at HOST:PORT (or auto); default: one of its own.")
    traces: str | None = _observing(None, help="OTLP URL for OpenTelemetry traces; default: the OTEL_* variables.")
    kv_events: str | None = _observing(None, help="Publish KV events for routers here, such as tcp://*:5557.")
    kv_events_replay: str | None = _observing(None, help="Replay missed ones here, such as tcp://*:5558.")
    log_format: str = _observing("text", help="text, or json: one object to a line.")
    log_prompts: bool = _observing(False, "--log-prompts", help="Write prompts into the log.")
    show_prompts: bool = _observing(False, "--show-prompts", help="The page shows all clients how cached texts begin.")

    def config(self, model: str) -> ServeConfig:
        from forerun.serve.config import ServeConfig

        check_number("--max-body", self.max_body, 0, 1e6, open_low=True)
        same = ("max_queue", "max_sessions", "strict", "log_prompts", "show_prompts")
        return ServeConfig(
            model_name=self.name or _model_name(model),
            max_body_bytes=int(self.max_body * 1e6),
            max_request_s=self.timeout,
            max_session_ttl=self.session_ttl,
            drain_s=self.drain,
            drafters=tuple(self.drafter or ()),
            keys=api_keys(self.api_keys),
            cors_origins=tuple(self.cors or ()),
            allowed_hosts=self._hosts(),
            **{name: getattr(self, name) for name in same},
        )

    def _hosts(self) -> tuple[str, ...]:
        """On a local address only local names are accepted; on others any, unless names were given."""
        from forerun.serve.config import LOCAL_HOSTS

        named = tuple(host.lower() for host in self.allowed_host or ())
        return (*LOCAL_HOSTS, *named) if named or self.host in LOCAL else ("*",)


@opt.grouped
def serve(opened: opt.ModelOptions, server: ServerOptions) -> None:
    """Serve a model to OpenAI clients, with a web page.

    The address for clients is printed at the start; the page is at its root. Ctrl-C lets open answers end.

    [bold]Examples[/bold]

    forerun serve

    forerun serve --model qwen2.5-coder-1.5b-instruct --draft-model qwen2.5-coder-0.5b-instruct --port 9000

    forerun serve --disk ~/.cache/forerun/kv --disk-bytes 10G

    forerun serve --host 0.0.0.0 --api-keys keys.txt --max-queue 64

    forerun serve --replicas 4 --disk /shared/kv
    """
    check_installed("fastapi", "prometheus_client", "uvicorn")
    from forerun.serve.logs import configure_logs
    from forerun.serve.server import limit_arenas

    limit_arenas()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts are encoded one by one: its threads would be idle
    config = server.config(opened.model)
    configure_logs(server.log_format)
    if hasattr(signal, "SIGHUP"):  # before the model is opened: unhandled, it would end the process
        signal.signal(signal.SIGHUP, lambda *_: _reload(config))
    if server.replicas is None and (server.max_replicas, server.ray) != (None, None):
        raise BadRequest("--max-replicas and --ray are about replicas", "add --replicas N")
    (_run if server.replicas is None else _run_replicas)(opened, server, config)


def _run_replicas(opened: opt.ModelOptions, server: ServerOptions, config: ServeConfig) -> None:
    early = threading.Event()  # SIGUSR1 before there are replicas: unhandled, it would end the process
    signal.signal(signal.SIGUSR1, lambda *_: early.set())
    from forerun.ray.cluster import load_ray
    from forerun.ray.service import replica_service
    from forerun.serve.listening import listen
    from forerun.serve.server import Server

    if (server.kv_events, server.kv_events_replay) != (None, None):
        raise BadRequest("--kv-events are of one engine, for routers outside", "leave them out, or --replicas")
    load_ray()
    scale = _scale(opened, server)
    llm = {name: _absolute(value) for name, value in opened.llm_options().items()}
    llm |= {"max_num_seqs": server.max_num_seqs, "threads": math.ceil(scale.cpus), "quiet": True}
    more = {"log_format": server.log_format, "traces": server.traces}
    with (
        listen(server.host, server.port) as sock,
        replica_service(llm, config, scale, server.ray, **more) as service,
    ):
        signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=service.update, daemon=True).start())
        if early.is_set():  # some may have opened the model as it was before
            signal.raise_signal(signal.SIGUSR1)
        _print_ready(server, config, sock, f"{scale.replicas} replicas of {math.ceil(scale.cpus)} threads each")
        Server(service.app, config).run(sockets=[sock])


def _scale(opened: opt.ModelOptions, server: ServerOptions) -> Scale:
    """A GPU each where there are some, else their part of the cores."""
    import torch

    from forerun.ray.cluster import Scale
    from forerun.runtime.threads import choose_threads

    most = max(server.replicas or 1, server.max_replicas or 0)
    if server.max_replicas is not None and server.max_replicas < (server.replicas or 1):
        raise BadRequest(f"--max-replicas {server.max_replicas} is below --replicas {server.replicas}", "raise it")
    gpus = float(opened.device == "cuda" or (opened.device == "auto" and torch.cuda.is_available()))
    threads = opened.threads or max(1, choose_threads(None)[0] // most)
    return Scale(server.replicas or 1, server.max_replicas, threads, gpus, max(1, server.max_num_seqs // 2))


def _absolute(value: Any) -> Any:
    """A path as other processes find it; a name that is no path stays one."""
    return (
        str(Path(value).expanduser().resolve())
        if isinstance(value, Path) or (isinstance(value, str) and Path(value).exists())
        else value
    )


def _run(opened: opt.ModelOptions, server: ServerOptions, config: ServeConfig) -> None:
    from forerun.serve.app import create_app
    from forerun.serve.kv_events import open_kv_events
    from forerun.serve.listening import listen
    from forerun.serve.observer import RequestObserver
    from forerun.serve.server import Server
    from forerun.serve.tracing import OPERATIONS, open_traces

    traces, host = open_traces(server.traces), server.host
    # A port that is taken is an error before a model is loaded
    with listen(host, server.port) as sock, run_in_thread(lambda: opened.open(max_num_seqs=server.max_num_seqs)) as llm:
        app = run_in_thread(lambda: create_app(llm, config))  # warms up
        if traces is not None:
            app.add_middleware(RequestObserver, report=traces.record, paths=OPERATIONS)
        with open_kv_events(llm, server.kv_events, server.kv_events_replay):
            _print_ready(server, config, sock, _cost(llm))
            Server(app, config).run(sockets=[sock])


def _print_ready(server: ServerOptions, config: ServeConfig, sock: socket.socket, what: str) -> None:
    from rich.console import Console

    console, host = Console(stderr=True, highlight=False), server.host
    where = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    console.print(f"{config.model_name} is ready at {where}/v1, page {where}/, {what}", markup=False, soft_wrap=True)
    if config.keys is None and host not in LOCAL:
        warning = f"any client that can reach {host} may send requests: consider --api-keys"
        console.print(warning, style="yellow", markup=False, soft_wrap=True)


def _cost(llm: LLM) -> str:
    memory = llm.memory_stats()
    total, weights, kv = (f"{memory[name] / 2**30:.2f}" for name in ("resident", "weights", "kv_pool"))
    return f"memory {total} GiB now (weights {weights}, K/V up to {kv} for {llm.engine.config.capacity:,} tokens)"


def _reload(config: ServeConfig) -> None:
    """On SIGHUP: API keys are read again. Open answers go on, those of removed keys too."""
    log = logging.getLogger("forerun.serve")
    try:
        if config.keys is not None:
            config.keys.reload()
            log.info("%d API keys", len(config.keys.keys))
    except ForerunError as error:
        log.error("API keys are as before: %s", error)


def check_installed(*names: str) -> None:
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        message = f"the server needs packages that are not installed: {', '.join(missing)}"
        raise BadRequest(message, "pip install 'forerun[serve]'")


def api_keys(path: Path | None) -> ApiKeys | None:
    from forerun.serve.config import ApiKeys

    if path is not None:
        return ApiKeys.load(path)
    given = os.environ.get(KEYS_VARIABLE)
    return None if given is None else ApiKeys.parse(given, KEYS_VARIABLE)


def _model_name(model: str) -> str:
    """A known name or a hub id as it is; of a path its last part."""
    if not model.strip():
        raise BadRequest("--model is empty", "give a name, a path or a hub id")
    path = Path(model)
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if path.exists() else model
