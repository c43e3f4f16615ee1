"""Metrics for Prometheus at `/metrics`. Knows no more of HTTP than paths and statuses.

Times are observed as answers end. Tokens are read from the engine's own statistics at each scrape, so that cancelled
answers count, too. Label values come from fixed lists: nothing in a request can add one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

import forerun
from forerun.core import Tally, Usage
from forerun.decode.drafters import registered
from forerun.engine.scheduler import Scheduler
from forerun.engine.stats import CACHES, SERVED
from forerun.llm import LLM
from forerun.serve.admission import AdmissionControl

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
RATIO_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5)
LABELLED_PATHS = (
    *(f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "models", "responses")),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/metrics", "/health", "/ready"),
)


def labelled_path(path: str) -> str:
    return path if path in LABELLED_PATHS else "/v1/models" if path.startswith("/v1/models/") else "other"


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, llm: LLM, admission: AdmissionControl) -> None:
        self.registry = made = CollectorRegistry()
        self._requests = Counter("forerun_requests", "Requests by path and status", ["path", "status"], registry=made)
        self.ttft = self._seconds("ttft", "Arrival to first token")
        self.provisional_ttft = self._seconds("provisional_ttft", "Arrival to first provisional token")
        self.duration = self._seconds("request_duration", "Arrival to end of a request for answers")
        self.queued = self._seconds("queue_wait", "Waiting for a place in the batch, by answer")
        self.per_token = self._seconds("time_per_token", "Between tokens, mean over an answer", TOKEN_BUCKETS_S)
        cost = "Work of a drafted prompt over exact prefill"
        self.prefill_cost = Histogram("forerun_prefill_cost_ratio", cost, buckets=RATIO_BUCKETS, registry=made)
        failed = "Drafted prompts whose first check failed: recomputed again, or given up"
        self.check_failures = self._count("check_failures", failed)
        self.provisional = self._count("provisional_tokens", "Tokens shown provisionally")
        self.confirmed = self._count("confirmed_tokens", "Provisional tokens that were confirmed")
        self.ignored_fields = self._count("ignored_fields", "Fields of requests that are not known and had no effect")
        self.unsaved_turns = self._count("unsaved_turns", "Turns of sessions that could not be written to disk")
        self.preemptions = self._count("preemptions", "Answers that were preempted")
        about = {"version": forerun.__version__, "weights": llm.precision.name, "device": llm.decoder.device.type}
        Info("forerun_build", "Version, weights and device", registry=made).info(about)
        pool = llm.engine.pool
        sizes = {"block_size": str(pool.page_size), "num_gpu_blocks": str(pool.num_pages)}  # as gateways read them
        Info("forerun_cache_config", "Tokens of a page, and pages of the KV pool", registry=made).info(sizes)
        made.register(_EngineCollector(llm))
        ProcessCollector(registry=made)
        self._gauges(llm, admission)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS_S) -> Histogram:
        return Histogram(f"forerun_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def _count(self, name: str, text: str) -> Counter:
        return Counter(f"forerun_{name}", text, registry=self.registry)

    def _gauges(self, llm: LLM, admission: AdmissionControl) -> None:
        pool, tree, scheduler = llm.engine.pool, llm.engine.tree, llm.engine.scheduler
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "forerun_answers_open": ("Answers that are not complete, queued ones too", lambda: admission.num_open),
            "forerun_answers_limit": ("Answers that may be open at once; more get 429", lambda: admission.max_open),
            "forerun_sequences_running": ("Sequences that have pages", lambda: len(scheduler.running)),
            "forerun_sequences_waiting": ("Sequences that wait for pages: the queue", lambda: len(scheduler.waiting)),
            "forerun_pages": ("Pages of the KV pool", lambda: pool.num_pages),
            "forerun_pages_used": ("Pages in use, by sequences or caches", lambda: pool.used),
            "forerun_pages_free": ("Pages that are free", lambda: pool.free),
            "forerun_pages_cached": ("Pages of the prefix tree", lambda: tree.num_pages),
            "forerun_pages_pinned": ("Pages that sessions and prompts pin", lambda: scheduler.pins.distinct_pages),
            "forerun_page_references_lost": (
                "References to pages that no cache, pin or sequence has; 0 while nothing runs",
                lambda: _references_lost(llm),
            ),
            "forerun_kv_cache_usage": (
                "Share of pages that sequences hold",
                lambda: _pages_held(scheduler) / pool.num_pages,
            ),
            "forerun_draining": ("1 while shutting down", lambda: float(admission.draining)),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(read)

    def count_request(self, scope: Scope, status: int, *_: object) -> None:
        self._requests.labels(labelled_path(scope["path"]), str(status)).inc()

    def observe_answer(self, usage: Usage) -> None:
        """Observe one answer that ended by itself."""
        self.queued.observe(usage.queued_s)
        if usage.tokens_per_second:
            self.per_token.observe(1 / usage.tokens_per_second)
        self.provisional.inc(usage.provisional)
        self.confirmed.inc(usage.confirmed)
        self.preemptions.inc(usage.preemptions)
        if usage.prefill is not None:
            self.prefill_cost.observe(usage.prefill.cost)
            self.check_failures.inc(int(usage.prefill.rounds > 1 or bool(usage.prefill.fell_back)))

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _references_lost(llm: LLM) -> int:
    engine, scheduler = llm.engine, llm.engine.scheduler
    held = engine.tree.num_pages + engine.approximate.num_pages + scheduler.pins.num_pages
    held += sum(cache.num_pages for cache in tuple(scheduler.text_caches))
    return int(engine.pool.refs.sum()) - held - sum(len(seq.pages) for seq in tuple(scheduler.running))


def _pages_held(scheduler: Scheduler) -> int:
    """Each once; pages that are only cached are free to requests, as gateways count them."""
    return len({page for seq in list(scheduler.running) for page in list(seq.pages)})


class _EngineCollector(Collector):
    """The engine's counts over all answers: finished, cancelled and failed ones."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine

    def collect(self) -> Iterator[Metric]:
        stats, drafters = self._engine.stats, self._engine.speculator.totals.drafters
        yield CounterMetricFamily("forerun_answers", "Answers that ended by themselves", stats.answers)
        yield CounterMetricFamily("forerun_completion_tokens", "Tokens of answers", stats.completion_tokens)
        counts, gauges = partial(_labelled, CounterMetricFamily), partial(_labelled, GaugeMetricFamily)
        served = {name: stats.served[name] for name in SERVED}
        yield counts("prompt_tokens", "Prompt tokens by where their K/V came from", "source", served)
        shares = {name: served[name] / max(1, sum(served.values())) for name in CACHES}
        yield gauges("cache_hit_ratio", "Prompt tokens read from a cache, of all since the start", "tier", shares)
        tallies = {name: Tally() for name in registered()} | drafters
        for what, became in (("drafted", "verified"), ("accepted", "accepted")):
            values = {name: getattr(tally, what) for name, tally in tallies.items()}
            yield counts(f"{what}_tokens", f"Drafted tokens that were {became}", "drafter", values)
        remote = self._engine.speculator.drafter_pool.figures()
        for way in ("sent", "received"):
            moved = {name: int(figures[f"bytes_{way}"]) for name, figures in remote.items()}
            yield counts(f"remote_draft_bytes_{way}", f"Bytes {way} for drafts of other machines", "drafter", moved)
        tiers = self._engine.tiers
        held = {} if tiers is None else tiers.figures()
        for what in ("tokens", "bytes"):
            values = {name: figures[what] for name, figures in held.items()}
            yield gauges(f"tier_{what}", f"K/V in a tier beyond the pool, in {what}", "tier", values)


def _labelled(kind: type[Any], name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = kind(f"forerun_{name}", text, labels=[label])
    for key, number in values.items():
        family.add_metric([key], number)
    return family
