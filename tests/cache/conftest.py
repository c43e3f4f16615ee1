"""The store tier on a real Mooncake needs its wheel and libibverbs, which `make test-ray` installs."""

from __future__ import annotations

import importlib

try:
    importlib.import_module("mooncake.store")
    collect_ignore = []
except ImportError:
    collect_ignore = ["test_store_mooncake.py"]


def pytest_report_header() -> list[str]:
    return ["tests/cache/test_store_mooncake.py is left out: no Mooncake (make test-ray)"] if collect_ignore else []
