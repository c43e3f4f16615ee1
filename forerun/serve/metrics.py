"""Figures for Prometheus at `/metrics`. Knows no more of HTTP than paths and statuses.

Times are observed as answers end. Tokens are read from the engine's own books when somebody looks, so that cancelled
answers count, too. Labels only have values from lists that are known beforehand: nothing a client sends can add one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Scope

import forerun
from forerun.core import Tally, Usage
from forerun.decode.drafters import registered
from forerun.engine.stats import CACHES, SERVED
from forerun.llm import LLM
from forerun.serve.gate import Gate
from forerun.serve.outcome import Outcome

if TYPE_CHECKING:
    from forerun.serve.answer import Answer

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5)
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/metrics", "/health", "/ready")


class Metrics:
    """The figures of one server; each has a registry of its own."""

    def __init__(self, llm: LLM, gate: Gate) -> None:
        self.registry = made = CollectorRegistry()
        self._requests = Counter("forerun_requests", "Requests by path and status", ["path", "status"], registry=made)
        self.ttft = self._seconds("ttft", "Arrival to first token")
        self.first_shown = self._seconds("provisional_ttft", "Arrival to first provisional token")
        self.duration = self._seconds("request_duration", "Arrival to end of a request for answers")
        self.queued = self._seconds("queue_wait", "Waiting for a place in the batch, by answer")
        self.per_token = self._seconds("time_per_token", "Between tokens, mean of an answer", PER_TOKEN)
        self.prefill_cost = Histogram(
            "forerun_prefill_cost_ratio", "Work of a drafted prompt over exact prefill", buckets=RATIOS, registry=made
        )
        self.check_failures = Counter(
            "forerun_check_failures", "Drafted prompts that were repaired again or given up", registry=made
        )
        self.provisional = Counter("forerun_provisional_tokens", "Tokens shown provisionally", registry=made)
        self.confirmed = Counter("forerun_confirmed_tokens", "Provisional tokens that stood", registry=made)
        self.preemptions = Counter("forerun_preemptions", "Answers that gave way to others for a while", registry=made)
        about = {"version": forerun.__version__, "weights": llm.precision.name, "device": llm.decoder.device.type}
        Info("forerun_build", "What runs here", registry=made).info(about)
        made.register(_Books(llm))
        ProcessCollector(registry=made)
        self._gauges(llm, gate)

    def _seconds(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(f"forerun_{name}_seconds", text, buckets=buckets, registry=self.registry)

    def _gauges(self, llm: LLM, gate: Gate) -> None:
        pool, tree, scheduler = llm.engine.pool, llm.engine.tree, llm.engine.scheduler
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "forerun_answers_open": ("Answers in the making, waiting ones too", lambda: gate.open),
            "forerun_answers_limit": ("Answers that may be open at once; more get 429", lambda: gate.limit),
            "forerun_sequences_running": ("Sequences that have pages", lambda: len(scheduler.running)),
            "forerun_sequences_waiting": ("Sequences that wait for pages: the queue", lambda: len(scheduler.waiting)),
            "forerun_pages": ("Pages of the KV pool", lambda: pool.num_pages),
            "forerun_pages_used": ("Pages in use, by sequences or caches", lambda: pool.used),
            "forerun_pages_free": ("Pages that nobody uses", lambda: pool.free),
            "forerun_pages_cached": ("Pages that the prefix tree knows", lambda: tree.num_pages),
            "forerun_pages_pinned": ("Pages that sessions keep in the pool", lambda: scheduler.pins.distinct_pages),
            "forerun_draining": ("1 while shutting down", lambda: float(gate.draining)),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(read)

    def request(self, path: str, status: int) -> None:
        """Count a request by what was answered."""
        known = path if path in PATHS else "/v1/models" if path.startswith("/v1/models/") else "other"
        self._requests.labels(known, str(status)).inc()

    def answered(self, usage: Usage) -> None:
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


class _Books(Collector):
    """What the engine has counted, of all answers: finished, cancelled and failed ones."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine

    def collect(self) -> Iterator[Metric]:
        stats, guesses = self._engine.stats, self._engine.speculator.totals.drafters
        yield _counter("answers", "Answers that came to their end", stats.answers)
        yield _counter("completion_tokens", "Tokens of answers", stats.completion_tokens)
        served = {name: stats.served[name] for name in SERVED}
        yield _counter("prompt_tokens", "Prompt tokens by where their K/V came from", served, "source")
        shares = {name: served[name] / max(1, sum(served.values())) for name in CACHES}
        yield _gauge("cache_hit_ratio", "Prompt tokens read from a cache, of all since the start", shares, "tier")
        tallies = {name: guesses.get(name, Tally()) for name in registered()}
        drafted = {name: tally.drafted for name, tally in tallies.items()}
        accepted = {name: tally.accepted for name, tally in tallies.items()}
        yield _counter("drafted_tokens", "Guessed tokens that were checked", drafted, "drafter")
        yield _counter("accepted_tokens", "Guessed tokens that stood", accepted, "drafter")
        tiers = self._engine.tiers
        held = {} if tiers is None else tiers.figures()
        for what in ("tokens", "bytes"):
            values = {name: figures[what] for name, figures in held.items()}
            yield _gauge(f"tier_{what}", f"What a tier beyond the pool holds, in {what}", values, "tier")


def _counter(name: str, text: str, value: float | dict[str, int], label: str = "") -> Metric:
    if not isinstance(value, dict):
        return CounterMetricFamily(f"forerun_{name}", text, value=value)
    made = CounterMetricFamily(f"forerun_{name}", text, labels=[label])
    for key, number in value.items():
        made.add_metric([key], number)
    return made


def _gauge(name: str, text: str, values: dict[str, float], label: str) -> Metric:
    made = GaugeMetricFamily(f"forerun_{name}", text, labels=[label])
    for key, number in values.items():
        made.add_metric([key], number)
    return made


class Counted(Outcome):
    """Counts every request by its outcome."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        super().__init__(app)
        self.metrics = metrics

    def ended(self, scope: Scope, status: int, arrived: float, answer: Answer | None) -> None:
        self.metrics.request(scope["path"], status)
