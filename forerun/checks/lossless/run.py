"""Is speculation lossless, on this machine and with this model? Three parts, finding by finding.

Exact: every drafter with every verifier on four tokens, all outcomes counted. Sampled: the real model at a temperature.
Greedy: the real model, token for token, where a difference is told from this machine's own noise. Each part is a module
of its own beside this one; here they are put in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from forerun.checks import Finding
from forerun.checks.lossless.exact import check_conditional, check_exact
from forerun.checks.lossless.greedy import check_greedy, choose_prompts
from forerun.checks.lossless.sampled import COMPARED_TOKENS, DRAFT_NODES, check_sampled
from forerun.errors import BadRequest
from forerun.llm import LLM
from forerun.options import check_number

MAX_PROMPT_TOKENS = 192  # tokens of a prompt


def check_lossless(
    model: str,
    draft: str | None = None,
    *,
    weights: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    prompts: int = 8,
    tokens: int = 32,
    temperature: float = 0.8,
    samples: int = 256,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Finding]:
    """Findings one by one as they are known; `on_progress` is called with what is being done."""
    check_number("temperature", temperature, 0.0, 100.0, open_low=True, hint="the sampled part draws: use 0.8")
    on_progress("exact: conditional grammars")
    yield check_conditional()
    yield from check_exact(on_progress)
    on_progress("loading")
    # whatever a batch promises by default, here all of it is to be proved
    with LLM(
        model, draft_model=draft, dtype=weights, device=device, threads=threads, batch_invariant=True, quiet=True
    ) as llm:
        context = llm.engine.config.max_model_len
        room = context - max(tokens, COMPARED_TOKENS + DRAFT_NODES) - DRAFT_NODES
        if room < 2:
            hint = "ask for fewer tokens"
            raise BadRequest(f"answers of {tokens} tokens leave no room for a prompt in a context of {context}", hint)
        asked = choose_prompts(llm, prompts, min(MAX_PROMPT_TOKENS, room))
        yield from check_sampled(llm, asked, temperature, samples, on_progress)
        yield from check_greedy(llm, asked, tokens, on_progress)
