"""What a start imports on its way to the first token, and how: counted in fresh processes, whatever they take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Installed with us or by users, or our own for other commands; none of them has a part in an answer's first token.
HEAVY = {
    *("fastapi", "gguf", "huggingface_hub", "llama_cpp", "llguidance", "matplotlib", "openai", "pandas", "ray"),
    *("prometheus_client", "requests", "rich", "scipy", "sklearn", "starlette", "sympy", "transformers", "triton"),
    *("uvicorn", "vllm", "websockets", "yaml", "zmq", "torch._dynamo", "torch._inductor"),
    *("forerun.checks", "forerun.ray", "forerun.recipes", "forerun.serve", "forerun.sharing", "forerun.train"),
    *("forerun.models.cuda", "forerun.prefill.calibration", "forerun.vllm", "forerun_research"),
}
LIBRARY = """
import json, sys
from forerun import LLM
with LLM(sys.argv[1], quiet=True, threads=1) as llm:
    assert len(next(iter(llm.stream("The lamp turns", max_tokens=1, ignore_eos=True))).token_ids) == 1
print(json.dumps(list(sys.modules)))
"""
COLLECTIONS = """
import gc, json, weakref
import forerun
class Cycle: pass
lost = Cycle()
lost.itself, found = lost, weakref.ref(lost)
del lost
searches = []
gc.callbacks.append(lambda phase, info: searches.append(phase))
forerun.LLM
during = len(searches)
gc.collect()
print(json.dumps([during, gc.isenabled(), gc.get_freeze_count(), found() is None]))
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True, env=environment)


def heavy(modules: list[str]) -> list[str]:
    return [name for name in modules if any(name == root or name.startswith(f"{root}.") for root in HEAVY)]


def test_the_library_imports_nothing_heavy(tiny_folder: Callable[[str], Path]) -> None:
    modules = json.loads(run("-c", LIBRARY, str(tiny_folder("llama"))).stdout)
    assert "forerun.engine.engine" in modules and "torch" in modules
    assert not heavy(modules)
    assert "typer" not in modules and "pydantic" not in modules  # the command's own


def test_the_command_imports_nothing_heavy(tiny_folder: Callable[[str], Path]) -> None:
    """As Python itself reports imports, those that failed or were undone among them."""
    asked = ("generate", "The lamp turns", "--raw", "--max-tokens", "1", "--threads", "1")
    done = run("-X", "importtime", "-m", "forerun", *asked, "--model", str(tiny_folder("llama")))
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    modules = [line.rpartition("|")[2].strip() for line in lines]
    assert "forerun.engine.engine" in modules and "torch" in modules and done.stdout.strip()
    # commands are listed with their options, and those of other subcommands are light
    assert not [name for name in heavy(modules) if name != "forerun.serve.config"]


def test_a_heavy_module_would_be_found() -> None:
    assert heavy(["torch", "torch._dynamo_utils", "torch._dynamo.config", "rich"]) == ["torch._dynamo.config", "rich"]


def test_nothing_is_searched_for_cycles_while_torch_is_imported() -> None:
    """And what was garbage before is still found afterwards."""
    during, enabled, frozen, found = json.loads(run("-c", COLLECTIONS).stdout)
    assert (during, enabled, frozen, found) == (0, True, 0, True)
