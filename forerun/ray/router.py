"""Which replica gets a request: the one that holds most of its prompt, unless others are less loaded by more than that
is worth.

Which replica holds what is read from Ray's own prefix tree, where it can be imported: a detached actor that knows the
prompts that were sent. Else the rank of a prompt's first characters decides. Sessions always go by the rank of their
name: they stay with their replica as long as it is there. Runs in the front's process; Ray copies this module, so what
it is to remember lies in another.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import RequestRouter

from forerun.ray.call import ReplicaCall, count_routed, load_order, open_calls, publish_replicas, rank

try:  # not a public module: the public alias of it imports vLLM
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
        PrefixCacheAffinityRouter as _Base,
    )

    PREFIX_AWARE = True
except ImportError:
    _Base, PREFIX_AWARE = RequestRouter, False

FIRST_CHARS = 512  # of a prompt, where only the rank of its text is known: some pages of tokens
MIN_SHARED_CHARS = 256  # four pages of tokens: less is no reason to prefer a replica
CHARS_PER_OPEN = 1024  # of a shared prompt: about 256 tokens of prefill, worth one more open request at its replica
MAX_IMBALANCE = 8  # requests open at one replica more than at another: beyond it, load decides however much is shared
MAX_TREE_CHARS = 50_000_000  # of prompts in the prefix tree


def allowed_imbalance(shared_chars: int) -> int:
    return min(MAX_IMBALANCE, shared_chars // CHARS_PER_OPEN)


class ReplicaRouter(_Base):
    def initialize_state(self, **options: Any) -> None:
        if PREFIX_AWARE:
            super().initialize_state(
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
        """In the order in which they are tried."""
        call = _call_of(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        by_name = {found.replica_id.unique_id: found for found in candidate_replicas}
        if call is None or not by_name:
            return [list(by_name.values())]
        if call.only in by_name:
            return [[by_name[call.only]]]
        if call.session:
            return [[by_name[rank(call.session, list(by_name))[0]]]]
        by_load = load_order(self._deployment_id.app_name, list(by_name))
        return [[by_name[name]] for name in await self._by_prompt(call.prompt, by_name, by_load)]

    async def _by_prompt(self, prompt: str, by_name: dict[str, Any], by_load: list[str]) -> list[str]:
        """Names, least loaded first, after the one that holds most of the prompt where that is worth its load."""
        if PREFIX_AWARE and prompt:
            ids = {found.replica_id.to_full_id_str(): name for name, found in by_name.items()}
            text, holders = await self._tree_actor.prefix_match.remote(prompt, list(ids))
            shared, names = len(text), [ids[holder] for holder in holders or [] if holder in ids]
        else:
            shared, names = len(prompt), rank(prompt[:FIRST_CHARS], by_load)[:1]
        held = shared >= MIN_SHARED_CHARS
        best = next((name for name in by_load if held and name in names), by_load[0])
        application = self._deployment_id.app_name
        excess = open_calls(application, best) - open_calls(application, by_load[0])
        return by_load if excess > allowed_imbalance(shared) else [best, *(name for name in by_load if name != best)]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        call = _call_of(pending_request)
        if call is None or call.only:
            return
        count_routed(self._deployment_id.app_name, call, replica_id.unique_id)
        if PREFIX_AWARE and call.prompt and not call.session:  # in order: the next request finds it
            self._tree_actor.insert.remote(call.prompt, replica_id.to_full_id_str(), time.time())


def _call_of(pending_request: Any) -> ReplicaCall | None:
    found = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return found if isinstance(found, ReplicaCall) else None
