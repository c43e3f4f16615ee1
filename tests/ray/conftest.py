"""Tests of replicas on a real Ray need Ray, which `make test-ray` installs; all others run without."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("ray") else ["test_real_ray.py", "test_real_deploy.py"]


def pytest_report_header() -> list[str]:
    return ["tests/ray/test_real_*.py are left out: Ray is not installed (make test-ray)"] if collect_ignore else []
