"""The K/V connector: vLLM's scheduler and worker on one side, drafted prompts on the other.

A request that carries `kv_transfer_params: {"forerun": {...}}` waits with its blocks while the worker drafts its prompt
between steps; then vLLM computes the tail and the answer. Its blocks are hashed under a salt of its own, so that no
other request can read approximate K/V. A prompt that is not worth drafting or whose checks fail is reported as a failed
load: it gets its own hashes back and is computed like any other. All other requests are untouched.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import ForerunError
from forerun.params import Prefill
from forerun.vllm import version_problem

if (_problem := version_problem()) is not None:
    raise _problem  # before names are imported that another version does not have

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)

from forerun.vllm.drafting import DraftResults, PromptDrafter, PromptToDraft
from forerun.vllm.settings import KEY, checked_settings, read_prefill, too_short


@dataclass
class DraftWork(KVConnectorMetadata):
    """From the scheduler to the worker, once a step."""

    prompts: list[PromptToDraft] = field(default_factory=list)
    alone: bool = False  # whether vLLM itself computes nothing in this step


@dataclass
class DraftLabels(KVConnectorWorkerMetadata):
    """From the worker to the scheduler, once a step."""

    results: DraftResults

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self  # there is one worker


@dataclass
class _Asked:
    """A request that asked for a drafted prompt."""

    label: dict[str, Any]
    settings: Prefill | None = None  # None: it is computed exactly, or is drafted already
    salt: str | None = None  # the request's own
    request: Any = None


class ForerunConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = checked_settings(vllm_config)
        self._asked: dict[str, _Asked] = {}  # scheduler
        self._work = DraftWork()  # scheduler
        self._drafter: PromptDrafter | None = None  # worker

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        given = request.kv_transfer_params
        if not isinstance(given, dict) or KEY not in given:
            return
        try:
            settings, problem = read_prefill(given[KEY]), self._problem(request)
        except ForerunError as error:
            settings, problem = None, f"{error} ({error.hint})"
        if settings is None or problem:
            self._asked[request.request_id] = _Asked({"approximate": False, "fell_back": problem})
            return
        self._asked[request.request_id] = _Asked({}, settings, request.cache_salt, request)
        _salt(request, f"{KEY} {uuid.uuid4()} {request.cache_salt or ''}")

    def _problem(self, request: Any) -> str:
        """Why a prompt is computed exactly, as far as that is known before it is scheduled."""
        if request.prompt_token_ids is None or request.mm_features or request.prompt_is_token_ids is not None:
            return "only prompts of tokens can be drafted"
        if request.skip_reading_prefix_cache:
            return "log-probabilities of the prompt need exact prefill"
        return too_short(request.num_prompt_tokens, self._settings.policy)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked = self._asked.get(request.request_id)
        count = request.num_prompt_tokens - self._settings.policy.tail - num_computed_tokens
        if asked is None or asked.settings is None or count <= 0:
            return 0, False
        return count, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        asked = self._asked.get(request.request_id)
        if asked is None or asked.settings is None or not num_external_tokens:
            return
        (own,) = blocks.get_block_ids()
        end = request.num_prompt_tokens - self._settings.policy.tail
        tokens = list(request.prompt_token_ids)
        self._work.prompts.append(PromptToDraft(request.request_id, tokens, own, end, asked.settings))
        asked.settings = None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        work, self._work = self._work, DraftWork()
        work.alone = not scheduler_output.total_num_scheduled_tokens
        return work

    def update_connector_output(self, connector_output: Any) -> None:
        found = connector_output.kv_connector_worker_meta
        if not isinstance(found, DraftLabels):
            return
        for request_id, label in (found.results.done | found.results.failed).items():
            if (asked := self._asked.get(request_id)) is None:
                continue
            asked.label = label
            if request_id in found.results.failed:
                _salt(asked.request, asked.salt)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        asked = self._asked.pop(request.request_id, None)
        return False, None if asked is None else {KEY: asked.label}

    # -- worker --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        (group,) = self._kv_cache_config.kv_cache_groups
        self._drafter = PromptDrafter(self._vllm_config, group.kv_cache_spec, self._settings)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        work = self._get_connector_metadata()
        assert self._drafter is not None and isinstance(work, DraftWork)
        self._drafter.add(work.prompts)
        self._drafter.step(work.alone)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._drafter is not None
        dropped = {request_id for request_id in finished_req_ids if self._drafter.drop(request_id)}
        self._found = found = self._drafter.results()
        return KVConnectorTransferResults(
            finished_recving=dropped | set(found.done) | set(found.failed), failed_recving=set(found.failed)
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return DraftLabels(self._found) if self._found.done or self._found.failed else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # prompts are loaded between steps, whole

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def _salt(request: Any, salt: str | None) -> None:
    """Hash the blocks of a request that has none yet under this salt."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
