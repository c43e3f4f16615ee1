"""Figures for Prometheus at `/metrics`: counted as answers end, gauges read when somebody looks. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from forerun.api import LLM
from forerun.core import Usage
from forerun.serve.gate import Gate

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5)


class Metrics:
    """The figures of one server; each has a registry of its own."""

    def __init__(self, llm: LLM, gate: Gate) -> None:
        self.registry = made = CollectorRegistry()
        self.requests = Counter("forerun_requests", "Requests by path and status", ["path", "status"], registry=made)
        self.ttft = Histogram("forerun_ttft_seconds", "Arrival to first token", buckets=SECONDS, registry=made)
        self.first_shown = Histogram(
            "forerun_provisional_ttft_seconds", "Arrival to first provisional token", buckets=SECONDS, registry=made
        )
        self.per_token = Histogram(
            "forerun_time_per_token_seconds", "Between tokens, mean of an answer", buckets=PER_TOKEN, registry=made
        )
        self.duration = Histogram("forerun_request_seconds", "Arrival to end", buckets=SECONDS, registry=made)
        self.queued = Histogram("forerun_queued_seconds", "Waiting for a place", buckets=SECONDS, registry=made)
        self.prompt = Counter(
            "forerun_prompt_tokens", "Prompt tokens by where their K/V came from", ["source"], registry=made
        )
        self.completion = Counter("forerun_completion_tokens", "Tokens of answers", registry=made)
        self.drafted = Counter("forerun_drafted_tokens", "Guessed tokens", ["drafter"], registry=made)
        self.accepted = Counter("forerun_accepted_tokens", "Guessed tokens that stood", ["drafter"], registry=made)
        self.provisional = Counter("forerun_provisional_tokens", "Tokens shown provisionally", registry=made)
        self.confirmed = Counter("forerun_confirmed_tokens", "Provisional tokens that stood", registry=made)
        self.prefill_cost = Histogram(
            "forerun_prefill_cost_share", "Work of a drafted prompt over exact prefill", buckets=SHARES, registry=made
        )
        self.check_failures = Counter(
            "forerun_check_failures", "Drafted prompts that were repaired again or given up", registry=made
        )
        self._cached = self._asked = 0
        self._gauges(llm, gate)

    def _gauges(self, llm: LLM, gate: Gate) -> None:
        pool, scheduler = llm.engine.pool, llm.engine.scheduler
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "forerun_answers_open": ("Answers in the making", lambda: gate.open),
            "forerun_sequences_running": ("Sequences that have pages", lambda: len(scheduler.running)),
            "forerun_sequences_waiting": ("Sequences that wait for pages", lambda: len(scheduler.waiting)),
            "forerun_pages": ("Pages of the KV pool", lambda: pool.num_pages),
            "forerun_pages_used": ("Pages in use, by sequences or caches", lambda: pool.used),
            "forerun_cached_share": ("Prompt tokens read from a cache, of all", self._share),
            "forerun_draining": ("1 while shutting down", lambda: float(gate.draining)),
        }
        for name, (text, read) in gauges.items():
            Gauge(name, text, registry=self.registry).set_function(read)

    def _share(self) -> float:
        return self._cached / self._asked if self._asked else 0.0

    def answered(self, usage: Usage) -> None:
        """Count one answer that ended by itself."""
        self._cached += usage.cached_tokens
        self._asked += usage.prompt_tokens
        served = usage.served or {"pool": usage.cached_tokens, "computed": usage.computed_tokens}
        for source, tokens in served.items():
            self.prompt.labels(source).inc(tokens)
        self.completion.inc(usage.completion_tokens)
        self.queued.observe(usage.queued_s)
        if usage.tokens_per_second:
            self.per_token.observe(1 / usage.tokens_per_second)
        for name, tally in usage.drafters.items():
            self.drafted.labels(name).inc(tally.drafted)
            self.accepted.labels(name).inc(tally.accepted)
        self.provisional.inc(usage.provisional)
        self.confirmed.inc(usage.confirmed)
        if usage.prefill is not None:
            self.prefill_cost.observe(usage.prefill.cost)
            self.check_failures.inc(int(usage.prefill.rounds > 1 or bool(usage.prefill.fell_back)))

    def text(self) -> bytes:
        return generate_latest(self.registry)
