"""`forerun serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import functools
import logging
import os
import signal
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.commands import options as opt
from forerun.errors import BadRequest, ForerunError
from forerun.options import check_number
from forerun.runtime.threads import run_in_thread

if TYPE_CHECKING:
    from forerun.llm import LLM
    from forerun.serve.config import ApiKeys, ServeConfig

KEYS_VARIABLE = "FORERUN_API_KEYS"
LOCAL = ("127.0.0.1", "::1", "localhost")

_listening = functools.partial(opt.shown, rich_help_panel="Listening")
_limiting = functools.partial(opt.shown, rich_help_panel="Limits")
_access = functools.partial(opt.shown, rich_help_panel="Access")
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
    traces: str | None = _observing(None, help="OTLP URL for OpenTelemetry traces; default: the OTEL_* variables.")
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
    """
    check_installed("fastapi", "prometheus_client", "uvicorn")
    from forerun.serve.logs import configure_logs

    config = server.config(opened.model)
    configure_logs(server.log_format)
    _run(opened, server, config)


def _run(opened: opt.ModelOptions, server: ServerOptions, config: ServeConfig) -> None:
    from rich.console import Console

    from forerun.serve.app import create_app
    from forerun.serve.observer import RequestObserver
    from forerun.serve.server import Server, listen
    from forerun.serve.tracing import OPERATIONS, open_traces

    console, traces, host = Console(stderr=True, highlight=False), open_traces(server.traces), server.host
    # A port that is taken is an error before a model is loaded
    with listen(host, server.port) as sock, run_in_thread(lambda: opened.open(max_num_seqs=server.max_num_seqs)) as llm:
        app = run_in_thread(lambda: create_app(llm, config))  # warms up
        if traces is not None:
            app.add_middleware(RequestObserver, report=traces.record, paths=OPERATIONS)
        where = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, lambda *_: _reload(config))
        ready = f"{config.model_name} is ready at {where}/v1, page {where}/, {_cost(llm)}"
        console.print(ready, markup=False, soft_wrap=True)
        if config.keys is None and host not in LOCAL:
            warning = f"any client that can reach {host} may send requests: consider --api-keys"
            console.print(warning, style="yellow", markup=False, soft_wrap=True)
        Server(app, config).run(sockets=[sock])


def _cost(llm: LLM) -> str:
    memory = llm.memory_stats()
    total, weights, kv = (f"{memory[name] / 2**30:.2f}" for name in ("resident", "weights", "kv_pool"))
    return f"memory {total} GiB (weights {weights}, K/V {kv} for {llm.engine.config.capacity:,} tokens)"


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
