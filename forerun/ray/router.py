"""Which replica gets a request: the one that holds most of its prompt, unless others are less loaded by more than that
is worth.

Which replica holds what is read from Ray's own prefix tree, where it can be imported: a detached actor that knows the
prompts that were sent. Else the rank of a prompt's first characters decides. Sessions always go by the rank of their
name: they stay with their replica as long as it is there. Runs in the front's process; Ray copies this module, so what
it is to remember lies in another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ray.serve.request_router import RequestRouter

from forerun.ray.call import ReplicaCall, count_chosen, order_replicas, publish_replicas, rank, replica_loads

_root = logging.getLogger()
_log_handlers, _log_level = _root.handlers, _root.level
try:  # not a public module: the public alias of it imports vLLM
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
        PrefixCacheAffinityRouter as _Base,
    )

    PREFIX_AWARE = True
except ImportError:
    _Base, PREFIX_AWARE = RequestRouter, False
finally:  # importing it replaces the process's log handlers by one of Ray's, which writes JSON
    _root.handlers = _log_handlers
    _root.setLevel(_log_level)

FIRST_CHARS = 512  # of a prompt, where only the rank of its text is known: some pages of tokens
MAX_TREE_CHARS = 50_000_000  # of prompts in the prefix tree


class ReplicaRouter(_Base):
    def initialize_state(self, **options: Any) -> None:
        self._choosing = asyncio.Lock()
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
        application = self._deployment_id.app_name
        if call.session:
            chosen = rank(call.session, list(by_name))[:1]
            count_chosen(application, call, chosen[0])
        else:
            async with self._choosing:  # of requests that come at once, each knows where those before it went
                holders, shared = await self._holders(call.prompt, by_name)
                chosen = order_replicas(replica_loads(application, by_name), holders, shared)
                self._remember(call, by_name[chosen[0]].replica_id)
                count_chosen(application, call, chosen[0])
        return [[by_name[name]] for name in chosen]

    async def _holders(self, prompt: str, by_name: dict[str, Any]) -> tuple[list[str], int]:
        """Replicas that hold most of a prompt, and how many of its characters."""
        if not PREFIX_AWARE or not prompt:
            return rank(prompt[:FIRST_CHARS], list(by_name))[:1], len(prompt)
        ids = {found.replica_id.to_full_id_str(): name for name, found in by_name.items()}
        text, holders = await self._tree_actor.prefix_match.remote(prompt, list(ids))
        return [ids[holder] for holder in holders or [] if holder in ids], len(text)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        call = _call_of(pending_request)
        if call is None or call.only:
            return
        if call.counted.replica == replica_id.unique_id:
            return
        count_chosen(self._deployment_id.app_name, call, replica_id.unique_id)
        self._remember(call, replica_id)

    def _remember(self, call: ReplicaCall, replica_id: Any) -> None:
        """That a replica gets this prompt. In order: the next question to the tree finds it."""
        if PREFIX_AWARE and call.prompt and not call.session:
            self._tree_actor.insert.remote(call.prompt, replica_id.to_full_id_str(), time.time())


def _call_of(pending_request: Any) -> ReplicaCall | None:
    found = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return found if isinstance(found, ReplicaCall) else None
