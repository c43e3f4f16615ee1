"""The public names: all can be imported, none drags torch in before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import forerun
from forerun.errors import BadRequest, ForerunError


def test_all_public_names_exist() -> None:
    assert set(forerun.__all__) <= set(dir(forerun))
    for name in forerun.__all__:
        assert getattr(forerun, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        forerun.LMM  # noqa: B018


def test_every_error_is_exported() -> None:
    def errors(kind: type) -> set[str]:
        return {kind.__name__}.union(*(errors(child) for child in kind.__subclasses__()))

    own = {name for name in errors(ForerunError) if hasattr(forerun.errors, name)}  # type: ignore[attr-defined]
    assert own <= set(forerun.__all__) and issubclass(BadRequest, ValueError)


def test_importing_forerun_imports_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "fastapi", "uvicorn", "prometheus_client", "matplotlib", "yaml", "pydantic"]
    code = f"""
import sys
import forerun
from forerun import BadRequest, Grammar, Prefill, SamplingParams, Speculation
import forerun.cli
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_answers_need_no_extra() -> None:
    """A model answers where neither the server's packages nor those of research are installed."""
    code = """
import sys
for name in ("fastapi", "starlette", "uvicorn", "prometheus_client", "matplotlib", "yaml", "pydantic", "transformers"):
    sys.modules[name] = None  # importing it fails
import forerun.llm, forerun.commands.generate, forerun.commands.chat, forerun.sharing.session, forerun.recipes
import forerun.prefill.prefiller, forerun.checks
"""
    subprocess.run([sys.executable, "-c", code], check=True)
