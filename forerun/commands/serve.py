"""`forerun serve`: an OpenAI-compatible server on this machine."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forerun.commands import options as opt
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from forerun.serve.config import ServeConfig
    from forerun.serve.keys import Keys

KEYS_VARIABLE = "FORERUN_API_KEYS"
LOCAL = ("127.0.0.1", "::1", "localhost")


@opt.grouped
def serve(
    opened: opt.ModelOptions,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0: for everybody.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="0: any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="The model as clients call it; default: as --model.")
    ] = None,
    max_queue: Annotated[int, typer.Option("--max-queue", min=0, help="Answers that may wait; more get 429.")] = 256,
    max_body: Annotated[float, typer.Option("--max-body", help="Largest request in MB.")] = 8.0,
    timeout: Annotated[float, typer.Option("--timeout", help="Longest time for an answer, in seconds.")] = 600.0,
    drain: Annotated[float, typer.Option("--drain", help="Seconds for open answers to end after SIGTERM.")] = 30.0,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help="A drafter that requests may name; may be repeated.")
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", help=f"A file of NAME SHA256 LIMIT lines; default: ${KEYS_VARIABLE}, else none."),
    ] = None,
    cors: Annotated[list[str] | None, typer.Option("--cors", help="An origin that may ask; may be repeated.")] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write what people ask into the log.")] = False,
) -> None:
    """Serve a model to OpenAI clients: /v1/chat/completions, /v1/completions, /v1/models; /metrics, /health, /ready.

    [bold]Examples[/bold]

    forerun serve

    forerun serve --model qwen2.5-coder-1.5b-instruct --draft qwen2.5-coder-0.5b-instruct --port 9000

    forerun serve --host 0.0.0.0 --api-keys keys.txt --max-queue 64
    """
    from forerun.serve.config import ServeConfig

    config = ServeConfig(
        model_name=name or _model_name(opened.model),
        max_body_bytes=int(max_body * 1e6),
        max_queue=max_queue,
        max_request_s=timeout,
        drain_s=drain,
        drafters=tuple(drafter or ()),
        keys=_keys(api_keys),
        cors_origins=tuple(cors or ()),
        log_prompts=log_prompts,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    _run(opened, config, host, port)


def _run(opened: opt.ModelOptions, config: ServeConfig, host: str, port: int) -> None:
    from forerun.serve.app import create_app
    from forerun.serve.server import Server, listen

    console = Console(stderr=True, highlight=False)
    with listen(host, port) as sock, opened.open() as llm:  # a port that is taken is told before a model is loaded
        where = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
        console.print(f"{config.model_name} at {where}/v1 · Ctrl-C lets open answers end", markup=False)
        if config.keys is None and host not in LOCAL:
            console.print(f"everybody who can reach {host} may ask: consider --api-keys", style="yellow", markup=False)
        Server(create_app(llm, config), config).run(sockets=[sock])


def _keys(path: Path | None) -> Keys | None:
    from forerun.serve.keys import Keys

    if path is not None:
        return Keys.load(path)
    given = os.environ.get(KEYS_VARIABLE)
    return None if given is None else Keys.parse(given, KEYS_VARIABLE)


def _model_name(model: str) -> str:
    """A known name or a hub id as it is; of a path its last part."""
    if not model.strip():
        raise BadRequest("--model is empty", "give a name, a path or a hub id")
    path = Path(model)
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if path.exists() else model
