"""An OpenAI-compatible server over one `LLM`."""

from forerun.serve.app import create_app
from forerun.serve.config import ServeConfig

__all__ = ["ServeConfig", "create_app"]
