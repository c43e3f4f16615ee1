"""From requests to sequences: what is refused before anything is touched, and all that an answer starts with.

Knows no pages and no steps.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from forerun.core import SamplingParams
from forerun.decode.edit_answer import EditAnswer
from forerun.decode.grammar import AnswerGrammar, GrammarCompiler
from forerun.decode.language import Languages
from forerun.decode.remote.protocol import vocabulary_digest
from forerun.decode.speculator import Speculator
from forerun.decode.trie import TokenTrie, open_trie
from forerun.decode.trie_answer import TrieAnswer
from forerun.engine.config import EngineConfig
from forerun.engine.sequence import Request, Sequence
from forerun.engine.speculative_prefill import SpeculativePrefill
from forerun.errors import BadRequest, OutOfPages
from forerun.models.config import ModelConfig
from forerun.params import Grammar
from forerun.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Intake:
    """Checks requests against one engine's limits and models, and makes their sequences."""

    model: ModelConfig
    tokenizer: Tokenizer | None
    config: EngineConfig
    speculator: Speculator
    speculative_prefill: SpeculativePrefill
    _grammars: GrammarCompiler | None = None
    _languages: Languages | None = None

    def receive(self, request: Request) -> None:
        """Check a request, once; raises where it cannot be answered."""
        if request.packed is None:
            request.packed = self.check(request.prompt_ids, request.params)

    def check(self, prompt_ids: list[int], params: SamplingParams) -> array[int]:
        """Raise where a request cannot be answered; the prompt's tokens, packed."""
        vocab, limit = self.model.vocab_size, self.config.max_model_len
        if not prompt_ids:
            raise BadRequest("the prompt is empty", "give at least one token of text")
        if len(prompt_ids) >= limit:
            larger = ", or load the model with a larger max_model_len" if limit < self.model.max_context else ""
            problem = f"the prompt has {len(prompt_ids)} tokens, the context holds {limit} with the answer"
            raise BadRequest(problem, f"shorten the prompt{larger}")
        if len(prompt_ids) >= self.config.capacity:
            raise OutOfPages(
                f"the prompt has {len(prompt_ids)} tokens, the KV pool holds {self.config.capacity} with the answer",
                "shorten the prompt, or raise kv_cache_tokens",
            )
        if params.stop and self.tokenizer is None:
            raise BadRequest("stop strings need a tokenizer, this engine has none", "use stop_token_ids")
        if (params.speculation.drafter, params.speculation.verify) != ("off", "auto"):
            self.speculator.check(params)
        if not params.prefill.exact:
            self.speculative_prefill.check(params.prefill, len(prompt_ids))
        if params.grammar is not None and params.grammar.kind == "trie":
            TrieAnswer(self.open_trie(params.grammar.source), vocab, self.end_ids)
        elif params.grammar is not None and params.grammar.kind == "edit":
            self.constraint(params.grammar)
        elif params.grammar is not None:
            self.grammars.compile(params.grammar)
        packed = _packed(prompt_ids, vocab)  # fast for long prompts: one by one only to name what is wrong
        check_token_ids((*(prompt_ids if packed is None else ()), *params.logit_bias, *params.prediction), vocab)
        return array("i", prompt_ids) if packed is None else packed

    def sequences(self, request: Request) -> list[Sequence]:
        """One for each of the request's answers, after its provisional sequence, where it has one."""
        seed = request.params.seed if request.params.seed is not None else random.getrandbits(63)
        made: list[Sequence] = []
        for index in range(request.params.n):
            seq = Sequence(request, index, seed + index)
            if not request.params.speculation.off:
                seq.spec_state = self.speculator.open(seq.id, seq.sampling_context, seq.usage)
            if seq.spec_state is not None:
                seq.verifier = seq.spec_state.verifier
            provisional = None if request.params.prefill.exact else self.speculative_prefill.open(seq)
            made += [seq] if provisional is None else [provisional, seq]
        if request.params.grammar is not None:
            for seq in made:
                seq.grammar = seq.sampling_context.constraint = self._constraint(request, seq)
        return made

    def _constraint(self, request: Request, seq: Sequence) -> AnswerGrammar | TrieAnswer:
        if request.conditional is not None:
            answer, seq.usage.conditional = request.conditional[seq.index]
            return answer
        assert request.params.grammar is not None
        return self.constraint(request.params.grammar)

    def constraint(self, grammar: Grammar) -> AnswerGrammar | TrieAnswer:
        """For one answer that is masked."""
        if grammar.sampling == "conditional":
            hint = "use sampling='masked' here"
            raise BadRequest("sampling 'conditional' looks ahead, and this request came without", hint)
        if grammar.kind == "trie":
            return TrieAnswer(self.open_trie(grammar.source), self.model.vocab_size, self.end_ids)
        if grammar.kind == "edit":
            return EditAnswer(grammar, self.grammars)
        return self.grammars.constraint(grammar)

    def trie(self, grammar: Grammar) -> TokenTrie | None:
        """All answers of a grammar; None where there are too many to list."""
        if grammar.kind == "trie":
            return self.open_trie(grammar.source)
        if self._languages is None:
            self._languages = Languages(self.grammars)
        return self._languages.trie(grammar)

    def open_trie(self, trie: TokenTrie | str | Path) -> TokenTrie:
        """An open one or its file; raises where its ids were made of text by another tokenizer."""
        found = trie if isinstance(trie, TokenTrie) else open_trie(trie)
        if found.vocabulary and self.tokenizer is not None and found.vocabulary != self._vocabulary:
            hint = "build it with this model's: forerun trie build ITEMS -o FILE -m MODEL"
            raise BadRequest(f"the trie {found.source} was built with another model's tokens", hint)
        return found

    @cached_property
    def _vocabulary(self) -> str:
        return vocabulary_digest(self.tokenizer).hex()

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end an answer, the usual one first."""
        known = self.model.eos_ids if self.tokenizer is None else self.tokenizer.eos_ids
        return list(dict.fromkeys(token for token in known if 0 <= token < self.model.vocab_size))

    @property
    def grammars(self) -> GrammarCompiler:
        """Made when first needed: it reads the whole vocabulary."""
        if self.tokenizer is None:
            raise BadRequest("a grammar needs a tokenizer, this engine has none", "leave the grammar out")
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self.model.vocab_size)
        return self._grammars


def check_token_ids(ids: Iterable[int], vocab: int) -> None:
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < vocab:
            hint = "encode with this model's tokenizer"
            raise BadRequest(f"token id {token!r} is not in the vocabulary of {vocab}", hint)


def _packed(ids: list[int], vocab: int) -> array[int] | None:
    """Token ids as int32; None where they have to be checked one by one. Counting types is the quickest way to know
    that there are no others, as numpy would take True for a number; `struct` packs twice as fast as an array does."""
    if list(map(type, ids)).count(int) < len(ids):
        return None
    try:
        packed = array("i", struct.pack(f"{len(ids)}i", *ids))
    except struct.error:
        return None
    row = np.frombuffer(packed, dtype=np.int32)
    return packed if row.min() >= 0 and row.max() < vocab else None
