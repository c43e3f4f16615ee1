"""What the plugin is started with and what it refuses: read from vLLM's configuration, checked before anything runs.

Options are keys of `kv_connector_extra_config`. Imports nothing of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from forerun.errors import BadRequest, ForerunError, OutOfPages, UnsupportedModel
from forerun.inputs import DTYPES
from forerun.params import Prefill
from forerun.prefill.plan import Policy
from forerun.vllm import ARCHITECTURES, version_problem

KEY = "forerun"  # of kv_transfer_params, in requests and answers
CONNECTOR_MODULE = "forerun.vllm.connector"  # kv_connector_module_path
FLOAT_DTYPES = ("auto", "float16", "bfloat16", "float32", "float")  # of vLLM's K/V cache that rows can be written to


@dataclass(frozen=True)
class PluginSettings:
    """Values of `kv_connector_extra_config`."""

    profile: str | None = None  # of `forerun calibrate`; None: the model's packaged one, else only chunks are reused
    draft_model: str | None = None  # for profiles of the source `draft`
    draft_weights: str = "auto"  # how it is held, as `--dtype` has it
    piece_tokens: int = 512  # of a prompt drafted between two steps of vLLM, in tokens of the target's prefill
    staging_tokens: int = 0  # whose K/V is staged for prompts being drafted and chunks; 0: twice vLLM's longest prompt
    min_prompt_tokens: int = Policy.shortest  # fewer are computed exactly

    @classmethod
    def read(cls, given: dict[str, Any]) -> PluginSettings:
        _only(given, [f.name for f in fields(cls)], "kv_connector_extra_config")
        found = cls(**given)
        for name in ("piece_tokens", "staging_tokens", "min_prompt_tokens"):
            value = getattr(found, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < (name != "staging_tokens"):
                raise BadRequest(f"kv_connector_extra_config: {name} is {value!r:.80}", "give a whole number above 0")
        for name in ("profile", "draft_model"):
            value = getattr(found, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise BadRequest(f"kv_connector_extra_config: {name} is {value!r:.80}", "give a name or a path")
        mode = DTYPES.get(str(found.draft_weights))
        if mode is None:
            problem = f"kv_connector_extra_config: draft_weights is {found.draft_weights!r:.80}"
            raise BadRequest(problem, "use auto, float32, float16, bfloat16 or int8")
        return replace(found, draft_weights=mode)

    @property
    def policy(self) -> Policy:
        return Policy(shortest=self.min_prompt_tokens, runs_tail=False)


def staging_pages(asked: int, context: int, page_size: int, page_bytes: int, free: int) -> int:
    """Pages of as many tokens as are asked for, or of twice the longest prompt; raises where memory, of which so many
    bytes are free, cannot hold them."""
    pages, most = -(-(asked or 2 * context) // page_size), free // page_bytes
    if pages > most:
        where = "" if asked else f", twice the longest prompt ({context})"
        problem = f"kv_connector_extra_config: staging_tokens is {asked or 2 * context}{where}: "
        problem += f"{pages * page_bytes / 1e9:.1f} GB of K/V, {free / 1e9:.1f} GB of memory are free"
        raise OutOfPages(problem, f"give at most {most * page_size}; longer prompts are computed exactly")
    return pages


def read_prefill(given: Any) -> Prefill:
    """The options of one request: those of `Prefill`, with `speculative` as the default mode."""
    if not isinstance(given, dict):
        raise BadRequest(f"kv_transfer_params: {KEY} is {given!r:.80}", 'give an object, such as {"forerun": {}}')
    _only(given, [f.name for f in fields(Prefill) if f.name != "allow_exact"], KEY)
    if given.get("mode") == "provisional":
        raise BadRequest(f"{KEY}: mode is 'provisional', vLLM streams no provisional answers", "use speculative")
    values: dict[str, Any] = {"mode": "speculative"} | given
    found = Prefill(**values)
    return found if found.exact else replace(found, allow_exact=True)


def too_short(tokens: int, policy: Policy) -> str:
    """Why nothing of a prompt of so many tokens can be drafted, if so: it is all tail, which vLLM computes."""
    return f"{tokens} tokens are too few: the last {policy.tail} are never drafted" if tokens <= policy.tail else ""


def _only(given: dict[str, Any], known: list[str], where: str) -> None:
    if unknown := sorted(set(given) - set(known)):
        raise BadRequest(f"{where}: {', '.join(unknown)} is no option", f"use {', '.join(known)}")


def is_used(config: Any) -> bool:
    """Whether a vLLM of this configuration (a VllmConfig) is started with the plugin's connector."""
    given = config.kv_transfer_config
    return given is not None and given.kv_connector_module_path == CONNECTOR_MODULE


def checked_settings(config: Any) -> PluginSettings:
    """The plugin's options in a vLLM of this configuration; raises where it cannot run there."""
    if (problem := refusal(config)) is not None:
        raise problem
    return PluginSettings.read(dict(config.kv_transfer_config.kv_connector_extra_config))


def refusal(config: Any) -> ForerunError | None:
    """Why the plugin cannot run in a vLLM of this configuration."""
    if (problem := version_problem()) is not None:
        return problem
    parallel, model, cache = config.parallel_config, config.model_config, config.cache_config
    names = list(getattr(model.hf_config, "architectures", None) or [])
    refused = [
        (
            parallel.pipeline_parallel_size > 1,
            f"pipeline parallelism ({parallel.pipeline_parallel_size})",
            "use its size 1",
        ),
        (
            parallel.tensor_parallel_size > 1,
            f"tensor parallelism ({parallel.tensor_parallel_size})",
            "use 1: its ranks could choose different rows to recompute",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "context parallelism",
            "use decode_context_parallel_size 1",
        ),
        (bool(model.use_mla), "MLA, whose K/V is compressed", "choose a model with plain K and V"),
        (model.is_hybrid, "a hybrid model, some of whose layers have no K/V", "choose a model with attention only"),
        (not set(names) & set(ARCHITECTURES), f"the architecture {names}", f"choose one of {', '.join(ARCHITECTURES)}"),
        (cache.cache_dtype not in FLOAT_DTYPES, f"K/V in {cache.cache_dtype}", "use --kv-cache-dtype auto"),
        (config.lora_config is not None, "LoRA adapters", "start without --enable-lora"),
    ]
    for wrong, what, hint in refused:
        if wrong:
            return UnsupportedModel(f"forerun.vllm cannot draft prompts with {what}", hint)
    if (failures := config.kv_transfer_config.kv_load_failure_policy) != "recompute":
        return BadRequest(
            f"kv_load_failure_policy is {failures!r}: prompts whose drafts fail their checks would end in errors",
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config',
        )
    return None
