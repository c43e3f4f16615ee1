"""The server's packages are an extra: the library works without them, and `forerun serve` names what to install."""

from __future__ import annotations

import subprocess
import sys

BLOCK = """
import sys
for name in ("fastapi", "uvicorn", "prometheus_client", "starlette"):
    sys.modules[name] = None
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, timeout=120)


def test_the_library_and_the_other_commands_import_without_them():
    code = """
import forerun, forerun.serve
from forerun.serve import ServeConfig
from forerun.cli import main
assert ServeConfig("x").model_name == "x"
try:
    forerun.serve.create_app
except ImportError as error:
    print("create_app needs", error.name)
try:
    main(["--help"])
except SystemExit as left:
    assert left.code == 0
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "create_app needs fastapi" in done.stdout and "serve" in done.stdout


def test_serve_names_what_to_install():
    done = run("from forerun.cli import main; main(['serve', '-m', 'there-is-no-such-model'])")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    message = " ".join(done.stderr.split())
    assert "not installed: fastapi, prometheus_client, uvicorn" in message and "pip install 'forerun[serve]'" in message


def test_with_them_there_is_an_app():
    code = "from forerun.serve import create_app; print(create_app.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "forerun.serve.app"
