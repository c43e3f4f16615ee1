"""What is not part of the core: the bridge to `forerun_research`, and the extra that brings a missing package.

`forerun_research` stands outside this package and may not be installed. This is the one place that imports it, when a
command that needs it runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

EXTRAS = {  # top-level module: the extra that installs it
    "forerun_research": "research",
    "matplotlib": "research",
    "yaml": "research",
    "transformers": "research",
    "fastapi": "serve",
    "prometheus_client": "serve",
    "pydantic": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "opentelemetry": "otel",
    "llama_cpp": "llama-cpp",
    "msgpack": "events",
    "ray": "ray",
    "zmq": "events",
}


def research(module: str) -> Any:
    """The module `forerun_research.<module>`."""
    return import_module(f"forerun_research.{module}")


def install_hint(missing: str | None) -> str:
    """The command that installs a module that was not found; empty where no extra brings it."""
    extra = EXTRAS.get((missing or "").split(".")[0])
    return f'pip install "forerun[{extra}]"' if extra is not None else ""
