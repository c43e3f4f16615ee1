"""Metrics of the front, and those of all replicas in one place: every sample gets its replica's name as a label."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import Scope

from forerun.serve.admission import AdmissionControl
from forerun.serve.metrics import labelled_path


class FrontMetrics:
    """Requests that were refused or failed here; a replica counts those that it answers."""

    def __init__(self, names: Callable[[], list[str]], admission: AdmissionControl) -> None:
        self.registry = made = CollectorRegistry()
        self._requests = Counter("forerun_requests", "Requests by path and status", ["path", "status"], registry=made)
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "forerun_replicas": ("Replicas that requests may be sent to", lambda: len(names())),
            "forerun_answers_open": ("Answers that are not complete, queued ones too", lambda: admission.num_open),
            "forerun_answers_limit": ("Answers that may be open at once; more get 429", lambda: admission.max_open),
            "forerun_draining": ("1 while shutting down", lambda: float(admission.draining)),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=made).set_function(read)

    def count_request(self, scope: Scope, status: int, *_: object) -> None:
        if not scope["state"].get("forwarded"):
            self._requests.labels(labelled_path(scope["path"]), str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _MergedMetrics(Collector):
    def __init__(self, texts: dict[str, bytes]) -> None:
        self._texts = texts

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text.decode()):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels=sample.labels | {"replica": replica}))
        return list(families.values())


def merged_metrics(texts: dict[str, bytes]) -> bytes:
    """`texts`: what each replica has at `/metrics`, by its name."""
    registry = CollectorRegistry()
    registry.register(_MergedMetrics(texts))
    return generate_latest(registry)
