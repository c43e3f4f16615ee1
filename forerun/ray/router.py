"""Which replica gets a request: Ray's own prefix-aware router where it can be imported, else the text's rank.

Runs in the front's process; Ray copies this module, so what it is to remember lies in another. Sessions always go by
the rank of their name: they stay with their replica as long as it is there. Ray finds a request's text as the attribute
`prompt` of its argument.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from forerun.ray.call import ReplicaCall, publish_replicas, rank

try:  # not a public module: the public alias of it imports vLLM
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
        PrefixCacheAffinityRouter as _Base,
    )

    PREFIX_AWARE = True
except ImportError:
    _Base, PREFIX_AWARE = RequestRouter, False

FIRST_CHARS = 512  # of a prompt, where only the rank of its text is known: some pages of tokens
MAX_IMBALANCE = 8  # requests open at one replica more than at another: beyond it, load decides and not the text
MAX_TREE_CHARS = 50_000_000  # of prompts in the prefix tree of the front


class ReplicaRouter(_Base):
    def initialize_state(self, **options: Any) -> None:
        if PREFIX_AWARE:
            super().initialize_state(
                imbalanced_threshold=MAX_IMBALANCE,
                do_eviction=True,
                eviction_threshold_chars=MAX_TREE_CHARS,
                eviction_target_chars=MAX_TREE_CHARS * 9 // 10,
            )

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        publish_replicas(self._deployment_id.app_name, [found.unique_id for found in self.curr_replicas])

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        call = _call_of(pending_request)
        if PREFIX_AWARE and (call is None or (call.prompt and not call.session and not call.only)):
            return await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {found.replica_id.unique_id: found for found in candidate_replicas}
        if call is not None and call.only in by_name:
            return [[by_name[call.only]]]
        if call is None or not (call.session or call.prompt):
            return [list(by_name.values())]
        ranked = [by_name[name] for name in rank(call.session or call.prompt[:FIRST_CHARS], list(by_name))]
        return [[ranked[0]]] if call.session else [[found] for found in ranked]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        call = _call_of(pending_request)
        if call is not None and call.prompt and not call.session:
            super().on_request_routed(pending_request, replica_id, result)


def _call_of(pending_request: Any) -> ReplicaCall | None:
    found = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return found if isinstance(found, ReplicaCall) else None
