"""Replicas and their front together, for `forerun serve --replicas`: opened, updated one by one, and ended. Knows no
socket."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from forerun.cache.disk import make_folder
from forerun.cache.store import parse_address, reach_master
from forerun.errors import ForerunError
from forerun.loading import opened
from forerun.models.formats.adapter import open_draft
from forerun.prefill.open_profile import open_profile
from forerun.ray import cluster
from forerun.ray.front import create_front
from forerun.ray.replica import ReplicaSettings
from forerun.serve.admission import AdmissionControl
from forerun.serve.config import ServeConfig

log = logging.getLogger("forerun.serve")


class ReplicaService:
    """`app` is the front's; `update` replaces the replicas while it serves."""

    def __init__(self, settings: ReplicaSettings, scale: cluster.Scale, admission: AdmissionControl) -> None:
        self._settings, self._scale = settings, scale
        self._updating = threading.Lock()
        self.app: FastAPI = create_front(cluster.deploy(settings, scale), settings.config, admission)

    def update(self) -> None:
        """Replace all replicas, one after another: a changed model file, another version of the package. Where that
        fails, those that were not replaced yet stay."""
        if not self._updating.acquire(blocking=False):
            log.warning("replicas are being replaced already")
            return
        try:
            opened(self._settings.llm["model"])  # a file that is no model any more is an error before one is stopped
            following = replace(self._settings, generation=self._settings.generation + 1)
            try:
                cluster.deploy(following, self._scale)
            except ForerunError:
                self._restore()
                raise
            self._settings = following
            log.info("all replicas are replaced")
        except ForerunError as error:
            log.error("the replicas are not replaced: %s; %s", error, error.hint)
        finally:
            self._updating.release()

    def _restore(self) -> None:
        """Those that have not been replaced stay, and those that were stopped are started as they were."""
        try:
            cluster.deploy(self._settings, self._scale)
        except ForerunError as error:
            log.error("a replica that was stopped cannot be started again: %s; %s", error, error.hint)


def front_limits(config: ServeConfig, scale: cluster.Scale, max_num_seqs: int) -> AdmissionControl:
    """As many answers as all replicas compute at once, and the queue beside them."""
    return AdmissionControl(max_num_seqs * (scale.max_replicas or scale.replicas), config.max_queue, config.keys)


def _check(llm: dict[str, Any]) -> None:
    """What a replica would fail with is an error before Ray is started, as far as it is known without the model."""
    target, draft = opened(llm["model"]), llm.get("draft_model")
    if draft is not None and not str(draft).startswith("remote:"):
        open_draft(draft, target, search=False)
    if (profile := llm.get("prefill_profile")) is not None:
        open_profile(profile, target, any_source=True)
    if llm.get("disk") is not None:
        make_folder(Path(llm["disk"]).expanduser())
    if llm.get("store") is not None:
        reach_master(parse_address(llm["store"]))


@contextmanager
def replica_service(
    llm: dict[str, Any], config: ServeConfig, scale: cluster.Scale, address: str | None, **more: Any
) -> Iterator[ReplicaService]:
    """`llm`: keyword arguments of `LLM`; `more`: other fields of `ReplicaSettings`."""
    _check(llm)
    admission = front_limits(config, scale, llm["max_num_seqs"])
    most = scale.max_replicas or scale.replicas
    with cluster.cluster(address, scale.cpus * most, scale.gpus * most):
        if address is not None:
            cluster.warn_of_little_room(scale)
        try:
            service = ReplicaService(ReplicaSettings(llm, config, admission.max_open, **more), scale, admission)
            if address is None:
                cluster.show_warnings()
            yield service
        finally:
            cluster.close()
