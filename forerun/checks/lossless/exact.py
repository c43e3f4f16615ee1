"""Exact part of `forerun check lossless`: every registered drafter with every lossless verifier, on four tokens.

Real drafters propose (those that run a model run a tiny random one), every outcome of drafting and verifying is weighed
by its probability, and the law of the answer is compared with the target's own. Targets are tables in float64, shaped
as real ones are: temperature, top-k, top-p, penalties, a grammar. Knows no real model.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import tokenizers
import torch

from forerun.cache.pool import PagePool
from forerun.checks import Finding
from forerun.checks.enumeration import (
    MAX_DIFFERENCE,
    VOCAB,
    Law,
    MakeDraft,
    TinyTarget,
    Tokens,
    difference,
    outcomes,
    output_distribution,
    target_distribution,
    tiny_logits,
)
from forerun.checks.lossless.remote import LyingRemoteDrafter
from forerun.core import Draft
from forerun.decode.draft_context import DraftContext, DraftModel
from forerun.decode.drafters import Drafter, DraftRequest, registered
from forerun.decode.grammar import AnswerGrammar, GrammarCompiler
from forerun.decode.language import Languages
from forerun.decode.rejection_draws import Prefix, RejectionDraws
from forerun.decode.sampling import Constraint, Context, Rng
from forerun.decode.trie import TokenTrie
from forerun.decode.trie_answer import ConditionalAnswer, score_nodes
from forerun.decode.verifiers import LOSSLESS, Verifier
from forerun.models.build import build_decoder
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.execution.runner import Runner, Span
from forerun.models.formats.checkpoint import expected_shapes
from forerun.models.formats.dequant import as_stored
from forerun.models.formats.hf_writer import hf_values
from forerun.models.formats.hidden_drafter import HiddenDrafterWeights
from forerun.models.formats.pard import ParallelDrafting
from forerun.models.hidden_draft import build_hidden_draft
from forerun.params import Grammar, SamplingParams
from forerun.text.tokenizer import Tokenizer

TINY_PROMPT = (0, 1, 2, 0, 1, 0, 0, 1)  # repeats itself, so that drafters that copy find something
COMPARED_TOKENS = 3  # tokens of an answer whose law is compared
DRAFT_DEPTH = 3  # of a draft
PAGE_TOKENS = 4
END_IDS = (3,)
REJECTION_TOKENS = 3  # of an answer drawn by rejection, its end included: tries are enumerated in all their orders
MAX_CONTEXT = 256
CPU = torch.device("cpu")
_ids = itertools.count()


# ---- a tiny world ----


class _TinyCheckpoint:
    """A random decoder of four tokens. Weights are large enough that tokens are not all equally likely."""

    quantised = False
    files: tuple[Path, ...] = ()

    def __init__(self, seed: int) -> None:
        self.config = ModelConfig(
            family="llama",
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            intermediate_size=32,
            max_context=MAX_CONTEXT,
        )
        self.source, self._seed = f"random {seed}", seed
        self._shapes = expected_shapes(self.config)

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        if name.endswith("norm"):
            return torch.ones(self._shapes[name])
        draw = torch.Generator().manual_seed(self._seed * 1000 + list(self._shapes).index(name))
        return torch.empty(self._shapes[name]).normal_(0.0, 0.25, generator=draw)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        return self.tensor(name)[ids]

    def stored(self, name: str) -> tuple[str, torch.Tensor]:
        return as_stored(self.tensor(name))

    def tokenizer(self) -> Tokenizer:
        return tiny_tokenizer()

    def release(self) -> None:
        """Nothing is mapped."""


def _decoder(seed: int) -> Decoder:
    return build_decoder(_TinyCheckpoint(seed), CPU, "float32", MAX_CONTEXT, quiet=True)[0]


def tiny_tokenizer(first: str = "a", second: str = "b") -> Tokenizer:
    """Two letters, both of them together, and an end; any other letter is the first one, so that no text is empty."""
    vocab = {first: 0, second: 1, first + second: 2, "<end>": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [(first, second)], unk_token=first))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_ids=[3], source="four tokens")


@cache
def tiny_worlds() -> tuple[DraftContext, ...]:
    """What an engine would offer: with a draft model of the same tokens, and of others."""
    worlds = []
    for same in (True, False):
        target, draft = _decoder(1), _decoder(2)
        pool = PagePool(target.config, MAX_CONTEXT // PAGE_TOKENS, PAGE_TOKENS, torch.float32, CPU)
        mine = tiny_tokenizer()
        theirs = mine if same else tiny_tokenizer("b", "a")
        parallel = ParallelDrafting(mask_token=2, tokens=DRAFT_DEPTH) if same else None
        model = DraftModel(draft, theirs, same, "a tiny draft", parallel)
        worlds.append(DraftContext.build(pool, Runner(target, pool, MAX_CONTEXT), mine, MAX_CONTEXT, model))
    return (*worlds, *(_hidden_world(kind) for kind in ("heads", "dspark", "eagle3")))


def _hidden_world(kind: str) -> DraftContext:
    """With a random drafter on the target's hidden states."""
    checkpoint, target = _TinyCheckpoint(1), _decoder(1)
    family = "qwen3" if kind == "dspark" else "llama"
    layers = replace(checkpoint.config, family=family, num_layers=1, qk_norm=kind == "dspark")
    config = {
        "speculators_model_type": kind,
        "transformer_layer_config": hf_values(layers),
        "aux_hidden_state_layer_ids": [1, 2],
        "block_size": DRAFT_DEPTH,
        "mask_token_id": 2,
        "markov_rank": 4,
        "enable_confidence_head": True,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": DRAFT_DEPTH}]},
    }
    weights = HiddenDrafterWeights(config, {}, f"a tiny {kind}")
    draw = torch.Generator().manual_seed(7)
    for name, shape in weights.shapes(target.config).items():
        random = torch.empty(shape).normal_(0.0, 0.25, generator=draw)
        weights.tensors[name] = random + 1.0 if name.endswith("norm.weight") else random
    pool = PagePool(target.config, MAX_CONTEXT // PAGE_TOKENS, PAGE_TOKENS, torch.float32, CPU)
    model = build_hidden_draft(weights, checkpoint, target, MAX_CONTEXT)
    return DraftContext.build(pool, Runner(target, pool, MAX_CONTEXT), tiny_tokenizer(), MAX_CONTEXT, model)


def tiny_targets() -> list[TinyTarget]:
    """One of each kind that shapes a distribution, greedy included."""
    ask, more = SamplingParams, partial(TinyTarget, prompt=TINY_PROMPT)
    return [
        more("temperature", tiny_logits(0.3), ask(temperature=0.6), nodes=5),
        more("top-k", tiny_logits(0.7), ask(temperature=1.4, top_k=2)),
        more("top-p", tiny_logits(0.4), ask(temperature=0.9, top_p=0.9), nodes=3),
        more("penalties", tiny_logits(0.5), ask(1.0, frequency_penalty=1.5, repetition_penalty=1.3), nodes=3),
        more("grammar", tiny_logits(0.9), ask(1.0), _grammar, nodes=3),
        more("conditional", tiny_logits(1.1), ask(0.75), _conditional(ask(0.75), tiny_logits(1.1)), nodes=3),
        more("greedy", tiny_logits(0.2), ask(temperature=0.0)),
    ]


@cache
def _compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer(), VOCAB)


def _grammar(answer: Tokens) -> AnswerGrammar:
    """Letters whose beginning is certain but can be spelt in two ways."""
    constraint = _compiler().constraint(Grammar("regex", "ab(a|b)b*"))
    constraint.advance(answer)
    return constraint


@cache
def _language() -> TokenTrie:
    """One text begins another, and two share a token that the model likes for the sake of one of them."""
    trie = Languages(_compiler()).trie(Grammar("regex", "ab(a|bb|ab)?|bba", "conditional"))
    assert trie is not None
    return trie


def _conditional(params: SamplingParams, logits: Callable[[Tokens], torch.Tensor]) -> Callable[[Tokens], Constraint]:
    """The model conditioned on a finite language, as a look ahead with these logits would find it."""
    trie, parents = _language(), _language().parents()
    paths: list[Tokens] = [()]
    for node in range(1, len(trie)):
        paths.append((*paths[parents[node]], int(trie.tokens[node])))
    scale = params.temperature or 1.0
    rows = ((n, torch.log_softmax(logits((*TINY_PROMPT, *path)) / scale, -1)) for n, path in enumerate(paths))
    scores = score_nodes(trie, END_IDS, rows, best=params.greedy)

    def constraint(answer: Tokens) -> ConditionalAnswer:
        made = ConditionalAnswer(trie, VOCAB, END_IDS, scores)
        made.advance(answer)
        return made

    return constraint


# ---- drafting, every outcome of it ----


def _propose(drafter: Drafter, ctx: DraftContext, target: TinyTarget, answer: Tokens, sampled: bool, rng: Rng) -> Draft:
    tokens = [*target.prompt, *answer]
    constraint = target.constraint(answer) if target.constraint is not None else None
    context = Context(target.params, tokens, len(target.prompt), seed=0, constraint=constraint)
    with ctx.pool.borrow(len(tokens) + target.nodes + 1) as pages:
        request = DraftRequest(next(_ids), context, DRAFT_DEPTH, target.nodes, pages, sampled=sampled, rng=rng)
        try:
            if not drafter.free:  # it may read what the target has computed
                ctx.runner.forward([Span(tokens[:-1], 0, pages, (), prompt=True)])
            draft = drafter.propose([request])[0]
        finally:
            drafter.finish(request.seq_id, tokens, len(target.prompt))
    problem = draft.problem(VOCAB)
    if problem is not None:
        raise AssertionError(f"drafter {drafter.name!r}: {problem}")
    return draft


class Proposals:
    """A real drafter as the enumeration wants it. What it can propose is found out once for each answer."""

    def __init__(self, drafter: Drafter, ctx: DraftContext) -> None:
        self.drafter, self.ctx = drafter, ctx
        self.drafts = 0  # different ones, empty ones not counted
        self._laws: dict[tuple[str, bool, Tokens], tuple[torch.Tensor, list[Draft]]] = {}

    def of(self, target: TinyTarget, sampled: bool) -> MakeDraft:
        def make(tokens: list[int], rng: Rng) -> Draft:
            weights, drafts = self._law(target, sampled, tuple(tokens[len(target.prompt) :]))
            return drafts[rng.pick(weights)] if len(drafts) > 1 else drafts[0]

        return make

    def _law(self, target: TinyTarget, sampled: bool, answer: Tokens) -> tuple[torch.Tensor, list[Draft]]:
        key = (target.name, sampled, answer)
        if key not in self._laws:
            law = list(outcomes(lambda rng: _propose(self.drafter, self.ctx, target, answer, sampled, rng)))
            self.drafts += sum(len(draft) > 0 for _, draft in law)
            self._laws[key] = torch.tensor([c for c, _ in law], dtype=torch.float64), [draft for _, draft in law]
        return self._laws[key]


# ---- conditional sampling against the model's own answers ----


def conditional_law(logits: Callable[[Tokens], torch.Tensor], temperature: float, answers: Iterable[Tokens]) -> Law:
    """By definition: the model's probability of each whole answer, over their sum."""
    weights = {}
    for answer in answers:
        prob = 1.0
        for at, token in enumerate(answer):
            after = torch.softmax(logits((*TINY_PROMPT, *answer[:at])) / temperature, -1)
            prob *= float(after[token])
        weights[answer] = prob
    total = sum(weights.values())
    return {answer: weight / total for answer, weight in weights.items()}


def check_conditional() -> Finding:
    """A finite language through its trie, and a larger one by rejection, against the definition."""
    logits, temperature, longest = tiny_logits(1.1), 0.75, 4
    trie = _language()
    texts = [tuple(_compiler().vocabulary.tokenizer.encode(trie.name(item))) for item in range(trie.num_items)]
    target = TinyTarget("", logits, SamplingParams(temperature), _conditional(SamplingParams(temperature), logits))
    sampled = target_distribution(replace(target, prompt=TINY_PROMPT), longest)
    cut: Law = defaultdict(float)
    for answer, prob in sampled.items():  # ends follow an end
        cut[(*itertools.takewhile(lambda token: token not in END_IDS, answer), *END_IDS)] += prob
    finite = difference(cut, conditional_law(logits, temperature, [(*text, *END_IDS) for text in texts]))
    drawn: Law = defaultdict(float)
    for prob, found in outcomes(lambda rng: _rejection(logits, temperature).draw(rng)):
        drawn[tuple(found)] += prob
    whole = [a for n in range(REJECTION_TOKENS) for a in itertools.product(range(3), repeat=n) if _accepted(a)]
    rejected = difference(drawn, conditional_law(logits, temperature, [(*answer, *END_IDS) for answer in whole]))
    worst, figures = max(finite, rejected), {"finite": finite, "rejection": rejected, "allowed": MAX_DIFFERENCE}
    detail = f"{trie.num_items} texts scored: {finite:.1g}; {len(whole)} token sequences by rejection: {rejected:.1g}"
    detail += f"; allowed {MAX_DIFFERENCE:.0e}"
    return Finding("exact", "conditional grammar", worst < MAX_DIFFERENCE, detail, True, figures)


_INFINITE = Grammar("regex", "(ab)+")


def _accepted(answer: Tokens) -> bool:
    constraint = _compiler().constraint(_INFINITE)
    return constraint.accepts((), answer) == len(answer) and bool(constraint.allowed(answer)[list(END_IDS)].any())


@cache
def _allowed(path: Tokens) -> torch.Tensor:
    return _compiler().constraint(_INFINITE).allowed(path)


def _rejection(logits: Callable[[Tokens], torch.Tensor], temperature: float) -> RejectionDraws:
    def logprobs(prefixes: list[Prefix]) -> torch.Tensor:
        rows = [logits((*TINY_PROMPT, *prefix.path)) for prefix in prefixes]
        return torch.log_softmax(torch.stack(rows) / temperature, -1)

    return RejectionDraws(lambda path: _allowed(tuple(path)), logprobs, END_IDS, REJECTION_TOKENS, look_ahead_rows=2)


# ---- the check ----


def check_exact(
    on_progress: Callable[[str], None] = lambda text: None, drafters: Sequence[str] | None = None
) -> Iterator[Finding]:
    """One finding for each drafter (default: all there are): with every lossless verifier, over all targets."""
    tiny = tiny_targets()
    plain = {target.name: target_distribution(target, COMPARED_TOKENS) for target in tiny}
    known = registered() | {LyingRemoteDrafter.name: LyingRemoteDrafter}
    for name in known if drafters is None else drafters:
        kind = known[name]
        on_progress(f"exact: every outcome of {name}")
        ctx = next((world for world in tiny_worlds() if kind.problem(world) is None), None)
        if ctx is None:
            yield Finding("exact", name, True, "cannot work on four tokens", checked=False)
            continue
        try:
            yield _finding(Proposals(kind(ctx), ctx), tiny, plain)
        except Exception as error:  # an engine would go on without it; here it is a finding
            yield Finding("exact", name, False, f"failed on four tokens: {type(error).__name__}: {error}")


def _finding(proposals: Proposals, targets: list[TinyTarget], plain: dict[str, Law]) -> Finding:
    found = {name: _differences(proposals, make(), targets, plain) for name, make in LOSSLESS.items()}
    worst = {name: max(differences.values()) for name, differences in found.items()}
    wrong = [name for name in worst if worst[name] >= MAX_DIFFERENCE]
    largest = f"largest difference of a probability {max(worst.values()):.1g}, allowed {MAX_DIFFERENCE:.0e}"
    if wrong:
        where = [max(found[name], key=lambda target: found[name][target]) for name in wrong]
        named = (f"with {n}: {worst[n]:.2g} ({t})" for n, t in zip(wrong, where, strict=True))
        detail = "; ".join([*named, largest])
    else:
        detail = f"with {', '.join(found)}: {largest}"
    figures = {"differences": found, "allowed": MAX_DIFFERENCE, "drafts": proposals.drafts}
    return Finding("exact", proposals.drafter.name, not wrong, detail, proposals.drafts > 0, figures)


def _differences(
    proposals: Proposals, verifier: Verifier, targets: list[TinyTarget], plain: dict[str, Law]
) -> dict[str, float]:
    """By target: the largest difference in the probability of any answer."""
    found: dict[str, float] = {}
    for target in targets:
        sampled = verifier.uses_proposals and not target.params.greedy
        # The many drafts of one that samples are followed for one step; what others propose changes as the answer grows
        drafter = proposals.drafter
        steps = 1 if sampled and (drafter.can_sample or not drafter.free) else 2
        law = output_distribution(proposals.of(target, sampled), target, verifier, COMPARED_TOKENS, steps)
        found[target.name] = difference(law, plain[target.name])
    return found
