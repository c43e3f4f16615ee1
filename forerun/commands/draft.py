"""`forerun draft`: drafts for models on other machines."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import typer

from forerun.commands import options as opt
from forerun.commands.serve import KEYS_VARIABLE, LOCAL, api_keys, check_installed
from forerun.errors import BadRequest
from forerun.runtime.threads import run_in_thread

# Options of a model that act on its own answers, and a draft server writes none
OF_ANSWERS = ("draft_model", "prefill_profile", "disk", "host_bytes", "store")

app = typer.Typer(no_args_is_help=True, help="Drafts for models on other machines.")

_listening = functools.partial(opt.shown, rich_help_panel="Listening")
_limiting = functools.partial(opt.shown, rich_help_panel="Limits")


@app.callback()
def group() -> None:
    """Drafts for models on other machines."""


@dataclass(frozen=True)
class DraftServerOptions:
    """Options of the draft server; see `DraftServeConfig`."""

    host: str = _listening("127.0.0.1", help="Address to listen on; 0.0.0.0: all interfaces.")
    port: int = _listening(8100, "--port", "-p", min=0, max=65535, help="0: any free one.")
    max_sequences: int = _limiting(256, min=1, help="Sequences open at once, of all targets.")
    max_connections: int = _limiting(64, min=1, help="Targets connected at once.")
    max_body: float = _limiting(8.0, help="Largest frame in MB: a prompt takes 2 or 3 bytes a token.")
    api_keys: Path | None = opt.shown(
        None,
        rich_help_panel="Access",
        help=f"A file of NAME SHA256 LIMIT lines, LIMIT in sequences; default: ${KEYS_VARIABLE}, else no keys.",
    )
    log_format: str = opt.shown("text", rich_help_panel="Observability", help="text, or json: one object to a line.")


@app.command()
@opt.grouped
def serve(opened: opt.ModelOptions, server: DraftServerOptions) -> None:
    """Draft for targets that name this machine: `forerun serve --draft-model remote:HOST:PORT`.

    The address for targets is printed at the start. A target sends its key from FORERUN_DRAFT_KEY.

    [bold]Examples[/bold]

    forerun draft serve --model qwen2.5-coder-0.5b-instruct

    forerun draft serve --model qwen2.5-coder-0.5b-instruct --host 0.0.0.0 --api-keys keys.txt --threads 4
    """
    check_installed("websockets")
    from rich.console import Console

    from forerun.options import check_number
    from forerun.serve.draft_server import DraftServeConfig, DraftServer
    from forerun.serve.draft_worker import DraftingLLM
    from forerun.serve.listening import listen
    from forerun.serve.logs import configure_logs

    for name in OF_ANSWERS:
        if getattr(opened, name):
            option = f"--{name.replace('_', '-')}"
            raise BadRequest(f"{option} is about answers, and a draft server writes none", f"leave {option} out")
    check_number("--max-body", server.max_body, 0, 1e6, open_low=True)
    limits = (server.max_sequences, server.max_connections, int(server.max_body * 1e6))
    config = DraftServeConfig(*limits, keys=api_keys(server.api_keys))
    configure_logs(server.log_format)
    console = Console(stderr=True, highlight=False)
    with listen(server.host, server.port) as sock, run_in_thread(lambda: DraftingLLM(**opened.llm_options())) as llm:
        made = run_in_thread(lambda: DraftServer(llm, config))
        host = f"[{server.host}]" if ":" in server.host else server.host
        port = sock.getsockname()[1]
        console.print(f"{llm.model} drafts for targets at remote:{host}:{port}", markup=False, soft_wrap=True)
        if config.keys is None and server.host not in LOCAL:
            warning = f"any target that can reach {server.host} may have drafts: consider --api-keys"
            console.print(warning, style="yellow", markup=False, soft_wrap=True)
        made.run(sock)
