"""Replicas that are to be replaced: what cannot start leaves those that run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.errors import ForerunError
from forerun.ray import cluster
from forerun.ray.cluster import Scale
from forerun.ray.replica import ReplicaSettings
from forerun.ray.service import ReplicaService, front_limits
from forerun.serve import ServeConfig


class Deployments:
    """In place of `cluster.deploy`: notes generations, and fails for those named."""

    def __init__(self, failing: set[int]) -> None:
        self.generations, self.failing = list[int](), failing

    def __call__(self, settings: ReplicaSettings, scale: Scale) -> cluster.RayReplicas:
        self.generations.append(settings.generation)
        if settings.generation in self.failing:
            raise ForerunError("the replicas did not start: no memory", "buy some")
        return object.__new__(cluster.RayReplicas)


def service(model: Path) -> ReplicaService:
    config, scale = ServeConfig("tiny"), Scale(2)
    return ReplicaService(ReplicaSettings({"model": str(model)}, config, 4), scale, front_limits(config, scale, 2))


def test_each_update_is_another_generation(monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path]):
    monkeypatch.setattr(cluster, "deploy", deployed := Deployments(set()))
    made = service(tiny_folder("qwen3"))
    made.update()
    made.update()
    assert deployed.generations == [0, 1, 2]


def test_replicas_that_cannot_be_replaced_are_restored(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(cluster, "deploy", deployed := Deployments({1}))
    made = service(tiny_folder("qwen3"))
    with caplog.at_level(logging.ERROR, "forerun.serve"):
        made.update()
    assert deployed.generations == [0, 1, 0]
    assert "not replaced: the replicas did not start: no memory; buy some" in caplog.text
    deployed.failing.clear()
    made.update()
    assert deployed.generations[3:] == [1]


def test_what_cannot_be_restored_is_said(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(cluster, "deploy", deployed := Deployments(set()))
    made = service(tiny_folder("qwen3"))
    deployed.failing |= {0, 1}
    with caplog.at_level(logging.ERROR, "forerun.serve"):
        made.update()
    assert "cannot be started again" in caplog.text and "not replaced" in caplog.text


def test_a_file_that_is_no_model_any_more_stops_no_replica(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(cluster, "deploy", deployed := Deployments(set()))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF, half of it")
    with caplog.at_level(logging.ERROR, "forerun.serve"):
        service(file).update()
    assert deployed.generations == [0] and "the replicas are not replaced" in caplog.text
