"""An OpenAI-compatible server over one `LLM`. Its packages are an extra: `pip install 'forerun[serve]'`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.serve.config import ServeConfig

if TYPE_CHECKING:
    from forerun.serve.app import create_app

__all__ = ["ServeConfig", "create_app"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from forerun.serve.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
