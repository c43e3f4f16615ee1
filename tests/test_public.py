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
    assert own <= set(forerun.__all__)
    assert all(issubclass(kind, ValueError) for kind in (BadRequest, forerun.BadProfile, forerun.BadDrafter))


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


OLD_MODULES = """
import warnings
warnings.simplefilter("error")  # an import of the package itself warns of nothing
import forerun, forerun.llm, forerun.sharing, forerun.recipes, forerun.decode.drafters
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    import forerun.plan, forerun.api, forerun.answers, forerun.sharing.candidates
    from forerun import plan
    from forerun.tokenizer import Tokenizer
    from forerun.decode.drafters import Ask
    from forerun.sharing import Scored, best_of_n
    forerun.sharing.compare
assert forerun.plan is plan is forerun.recipes.plan and plan.solve and forerun.api.LLM is forerun.LLM
assert forerun.answers.Choice is forerun.Choice and Ask is forerun.decode.drafters.DraftRequest
assert forerun.sharing.candidates.best_of_n is forerun.recipes.best_of_n is best_of_n
assert {str(w.message).split(" is now ")[0] for w in caught} == {
    "forerun.plan", "forerun.api", "forerun.answers", "forerun.sharing.candidates", "forerun.tokenizer",
    "forerun.decode.drafters.Ask", "forerun.sharing.Scored", "forerun.sharing.best_of_n", "forerun.sharing.compare",
}
assert all(w.category is DeprecationWarning and w.filename == "<string>" for w in caught), caught
try:
    import forerun.nothing
except ModuleNotFoundError:
    print("ok")
"""


def test_modules_and_names_of_the_last_release_work_with_a_warning() -> None:
    done = subprocess.run([sys.executable, "-c", OLD_MODULES], capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr


def test_old_modules_lead_to_modules_that_exist() -> None:
    from importlib import import_module
    from importlib.util import find_spec

    from forerun.renamed import MODULES

    for old, new in MODULES.items():
        assert import_module(new) and find_spec(old) is not None
