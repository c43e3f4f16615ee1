"""Masks against languages small enough to list, one parser in a tree against fresh ones, and bad grammars."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import decoders, models, normalizers

from forerun.decode.grammar import AnswerGrammar, DeadEnd, GrammarCompiler
from forerun.errors import BadRequest, ForerunError
from forerun.models.formats.checkpoint import open_checkpoint
from forerun.params import Grammar
from forerun.text.tokenizer import Tokenizer

PADDING = 24  # ids of the model that no token has
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "next": {"$ref": "#"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SHAPES = [
    Grammar("json_schema", json.dumps(PERSON)),
    Grammar("json_object"),
    Grammar("regex", "(the|then|there)( keeper| lamp){1,3}[.!]|[0-9]+"),
    Grammar("lark", 'start: sum "."\nsum: NUMBER | sum "+" sum | "(" sum ")"\nNUMBER: /[0-9]{1,3}/'),
    Grammar("lark", 'start: word "!"\nword[max_tokens=3]: /[a-z ]*/'),  # llguidance cannot roll this one back
    Grammar("lark", 'start: "say" <|im_start|> /[a-c]+/'),
]


def letters(*pieces: str, ends: tuple[int, ...] = (1,)) -> Tokenizer:
    """SentencePiece with byte tokens, the given pieces (later ones merged from two earlier), and a first space that is
    dropped. `a` and the byte token of `a` are the same text."""
    vocab = {"<unk>": 0, "</s>": 1, "<eot>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: len(vocab) + i for i, piece in enumerate(pieces)}
    merges = [(p[:i], p[i:]) for p in pieces for i in range(1, len(p)) if p[:i] in vocab and p[i:] in vocab]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>", "<eot>"])
    return Tokenizer(backend, eos_ids=ends, source="letters")


@pytest.fixture(scope="module")
def small(tiny_folder: Callable[[str], Path]) -> GrammarCompiler:
    tokenizer = open_checkpoint(tiny_folder("llama")).tokenizer()
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING)


@pytest.fixture(scope="module")
def real(smollm2: Path) -> GrammarCompiler:
    tokenizer = open_checkpoint(smollm2).tokenizer()
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING)


@pytest.fixture(scope="module")
def pieces() -> GrammarCompiler:
    tokenizer = letters("\u2581", *"abcdehlmnprt", "th", "the", "\u2581l", "\u2581la", "am", ends=(1, 2))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING)


def ids(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def fresh(compiler: GrammarCompiler, grammar: Grammar, tokens: list[int]) -> AnswerGrammar:
    """A parser that never went anywhere else."""
    constraint = compiler.constraint(grammar)
    for token in tokens:
        constraint.advance([token])
    return constraint


def may_follow(compiler: GrammarCompiler, language: set[bytes], text: bytes) -> list[int]:
    """By definition: tokens that make the text another beginning, and ends after a whole text."""
    tokens, control = compiler.vocabulary.tokens, set(compiler.vocabulary.special_token_ids)
    rest = {word[len(text) :] for word in language if word.startswith(text)}
    starts = {word[:length] for word in rest for length in range(1, len(word) + 1)}
    fits = [i for i in range(compiler.vocabulary.size - PADDING) if tokens[i] in starts and i not in control]
    return sorted({*fits, *(compiler.vocabulary.end_ids if text in language else ())})


@pytest.mark.parametrize("which", ["small", "real", "pieces"])
def test_masks_are_the_language(which: str, request: pytest.FixtureRequest) -> None:
    compiler: GrammarCompiler = request.getfixturevalue(which)
    words = ["the lamp", "the lamp.", "then", "a", "aé", "bread", "ab</s>", "the lamp\n"]
    language, rng = {word.encode() for word in words}, random.Random(7)
    grammar = Grammar("regex", "|".join(word.replace(".", r"\.") for word in words))
    met = set()
    for _ in range(12):
        constraint, text = compiler.constraint(grammar), b""
        while True:
            allowed = ids(constraint.allowed(()))
            assert allowed == may_follow(compiler, language, text)
            assert constraint.finished == (set(allowed) <= compiler.vocabulary.end_ids)
            token = rng.choice(allowed)
            constraint.advance([token])
            if token in compiler.vocabulary.end_ids:
                break
            text += compiler.vocabulary.tokens[token]
        met.add(text)
    assert len(met) > 3  # the walks differ


def test_text_that_looks_like_a_control_token_stays_text(real: GrammarCompiler) -> None:
    constraint = real.constraint(Grammar("regex", r"<\|im_start\|>[a-z]*"))
    control = real.vocabulary.tokens.index(b"<|im_start|>")
    assert constraint.accepts((), [control]) == 0
    spelt = real.vocabulary.tokenizer.encode("<|im_start|>x")
    assert constraint.accepts((), spelt) == len(spelt) > 1


@pytest.mark.parametrize("grammar", SHAPES, ids=[f"{shape.kind}-{i}" for i, shape in enumerate(SHAPES)])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_tree_has_the_masks_of_fresh_parsers(small: GrammarCompiler, grammar: Grammar, data: st.DataObject) -> None:
    """Grow a tree under an answer and ask for its nodes in any order, with other questions in between."""
    draw = data.draw
    answer: list[int] = []
    constraint = small.constraint(grammar)
    for _ in range(draw(st.integers(1, 3))):
        paths: list[list[int]] = [[]]
        for _ in range(draw(st.integers(1, 8))):
            parent = draw(st.sampled_from(paths))
            if parent and parent[-1] in small.vocabulary.end_ids:
                continue
            paths.append([*parent, draw(st.sampled_from(ids(constraint.allowed(parent))))])
        for path in draw(st.permutations(paths)):
            truth = fresh(small, grammar, [*answer, *path])
            if draw(st.booleans()):
                assert constraint.certain_text(path) == truth.certain_text(())
            assert constraint.allowed(path).equal(truth.allowed(()))
            token = draw(st.integers(0, small.vocabulary.size - 1))
            assert constraint.accepts(path, [token]) == int(truth.allowed(())[token])
        accepted = draw(st.sampled_from(paths))
        constraint.advance(accepted)
        answer += accepted
        assert constraint.tokens == answer


def test_several_tokens_are_accepted_as_far_as_they_go(small: GrammarCompiler) -> None:
    constraint, encode = small.constraint(SHAPES[0]), small.vocabulary.tokenizer.encode
    good, bad = encode('{"name": "the'), encode("}]")
    assert constraint.accepts((), good) == len(good)
    assert constraint.accepts((), [*good, *encode('", "lamp')]) < len(good) + len(encode('", "lamp'))
    assert constraint.accepts(good[:1], [*good[1:], *bad]) >= len(good) - 1
    assert constraint.accepts((), bad) == 0
    assert constraint.accepts(bad, good) == 0
    assert constraint.accepts((), [small.vocabulary.size - 1]) == 0  # padding


def test_white_space_in_json_has_an_end(small: GrammarCompiler) -> None:
    encode, person = small.vocabulary.tokenizer.encode, {"name": "the", "age": 3, "next": {"name": "a", "age": 1}}
    for grammar in SHAPES[:2]:
        constraint = small.constraint(grammar)
        for text in (json.dumps(person, separators=(",", ":")), json.dumps(person), json.dumps(person, indent=4)):
            assert constraint.accepts((), encode(text)) == len(encode(text))
        for beginning in ("{\n\n\n", '{"name"\n\n\n', "{  ", "{\n" + " " * 33):
            assert constraint.accepts((), encode(beginning)) < len(encode(beginning))


def test_after_an_end_only_ends(pieces: GrammarCompiler) -> None:
    constraint, a = pieces.constraint(Grammar("regex", "a+")), pieces.vocabulary.tokens.index(b"a")
    assert constraint.accepts((), [1]) == 0  # the empty answer is none
    assert constraint.accepts((), [a, 2, 1, a]) == 3
    assert ids(constraint.allowed([a, 1])) == [1, 2]
    constraint.advance([a, 1])
    assert constraint.finished and ids(constraint.allowed([2])) == [1, 2]
    assert constraint.accepts((), [1, a]) == 1 and constraint.certain_text(()) == b""


def test_a_fork_goes_its_own_way(small: GrammarCompiler) -> None:
    constraint, encode = small.constraint(Grammar("regex", "the (lamp|horn)")), small.vocabulary.tokenizer.encode
    constraint.advance(encode("the "))
    other = constraint.fork()
    constraint.advance(encode("lamp"))
    assert constraint.finished and not other.finished
    other.advance(encode("horn"))
    assert other.finished and other.tokens != constraint.tokens


def test_a_forbidden_token_is_never_taken(small: GrammarCompiler) -> None:
    constraint = small.constraint(Grammar("regex", "the"))
    before = constraint.allowed(())
    with pytest.raises(ForerunError, match="at position 0 of an answer is not in its regex grammar"):
        constraint.advance(small.vocabulary.tokenizer.encode("lamp"))
    assert constraint.tokens == [] and constraint.allowed(()).equal(before)


def test_certain_text_is_not_certain_tokens(real: GrammarCompiler) -> None:
    """The trap: llguidance by itself allows just the usual spelling of text that must come. The model has probabilities
    for
    the others too, and they stay allowed."""
    pattern = "Hello world[0-9]"
    alone = LLMatcher(real.vocabulary.backend, LLMatcher.grammar_from_regex(pattern))
    assert sum(byte.bit_count() for byte in alone.compute_bitmask()) == 1
    constraint = real.constraint(Grammar("regex", pattern))
    assert constraint.certain_text(()) == b"Hello world"
    assert {real.vocabulary.tokens[i] for i in ids(constraint.allowed(()))} == {b"H", b"He", b"Hel", b"Hello"}
    assert constraint.forced((), 4) == []
    own = Grammar("lark", '%llguidance {"no_forcing": false}\nstart: "Hello world"')  # nor can a grammar ask for it
    assert len(ids(real.constraint(own).allowed(()))) == 4


def test_forced_tokens_have_no_alternative(real: GrammarCompiler) -> None:
    constraint = real.constraint(Grammar("regex", "2024|2025"))  # this vocabulary writes digits one by one
    digits = real.vocabulary.tokenizer.encode("202")
    assert constraint.forced((), 8) == digits and constraint.forced((), 2) == digits[:2]
    assert constraint.forced(digits[:1], 8) == digits[1:]


def test_certain_text_is_remembered_and_right(small: GrammarCompiler) -> None:
    constraint, encode = small.constraint(Grammar("regex", "the lamp turns [ab]")), small.vocabulary.tokenizer.encode
    whole = constraint.certain_text(())
    assert whole == b"the lamp turns "
    constraint.advance(encode("the"))
    assert constraint.certain_text(()) == whole[3:]
    assert constraint.certain_text(encode(" la")) == whole[6:]
    constraint.advance(encode(" lamp turns a"))
    assert constraint.certain_text(()) == b"" and constraint.finished


def test_dead_ends_are_named_and_leave_the_rest_alone(small: GrammarCompiler) -> None:
    grammar = Grammar("lark", 'start: "a" (NONE | "b")\nNONE: /x/ & /y/')
    constraint, (a, b) = small.constraint(grammar), (small.vocabulary.tokenizer.encode(c)[0] for c in "ab")
    assert constraint.accepts((), [a, b]) == 2
    dead = small.constraint(Grammar("lark", 'start: "a" NONE | "b"\nNONE: /x/ & /y/'))
    for _ in range(2):
        with pytest.raises(DeadEnd, match="the Lark grammar allows no token at position 1 of the answer"):
            dead.allowed([a])
        assert ids(dead.allowed([b])) == sorted(small.vocabulary.end_ids)
        assert {a, b} <= set(ids(dead.allowed(())))


def test_tokens_that_cannot_be_written_are_a_dead_end() -> None:
    """A vocabulary without the bytes that a grammar asks for."""
    backend = tokenizers.Tokenizer(models.BPE({"<e>": 0, "a": 1, "b": 2}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<e>"])
    compiler = GrammarCompiler(Tokenizer(backend, eos_ids=[0]), 4)
    with pytest.raises(DeadEnd, match="at position 1"):
        compiler.constraint(Grammar("regex", "ac|bc")).allowed([1])
    with pytest.raises(BadRequest, match="cannot be satisfied: no token may begin an answer"):
        compiler.compile(Grammar("regex", "[cd]+"))


BAD = [
    ("json_schema", '{"type": "object"', r"not JSON: Expecting ',' delimiter: line 1 column 18"),
    ("json_schema", "", "not JSON: Expecting value"),
    ("json_schema", '{"minimum": NaN}', "is invalid: .*expected value at line 1"),
    ("json_schema", "[" * 100_000, "nested too deeply"),
    ("json_schema", "[1, 2]", r"a JSON schema is an object, got \[1, 2\]"),
    ("json_schema", '{"type": "text"}', "Invalid type: text"),
    ("json_schema", '{"type": "object", "unevaluatedProperties": {"type": "string"}}', "unevaluatedProperties"),
    ("json_schema", '{"$ref": "https://example.com/schema"}', "Resource"),
    ("json_schema", "false", "Unsatisfiable"),
    ("json_object", "{}", "has no source"),
    ("regex", "[a-", r"'\[a-' is invalid: unclosed character class"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", "", "only the empty answer"),
    ("regex", r"[^\s\S]", "cannot be satisfied"),
    ("regex", "\ud800", "lone surrogate"),
    ("lark", "", "no start rule"),
    ("lark", 'start: "a" other\nother: "b" missing', 'at line 2, column 8: unknown name: "missing"'),
    ("lark", 'start: "a"\n\n  (', "at line 3"),
    ("lark", 'start: ""', "only the empty answer"),
    ("lark", "start: <|im_end|>", "cannot be satisfied"),
    ("lark", "start: NONE\nNONE: /a/ & /b/", "cannot be satisfied"),
    ("lark", "// " + "a" * 1_000_000, "has 1000003 characters, the limit is 1000000"),
]


@pytest.mark.parametrize(("kind", "source", "message"), BAD, ids=[f"{k}-{i}" for i, (k, _, _) in enumerate(BAD)])
def test_bad_grammars(small: GrammarCompiler, kind: str, source: str, message: str) -> None:
    for request in (small.compile, small.constraint):
        with pytest.raises(BadRequest, match=message) as caught:
            request(Grammar(kind, source))  # type: ignore[arg-type]
        assert caught.value.hint and "\n" not in str(caught.value)
        assert "llguidance {" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_model_without_an_end_has_no_grammars() -> None:
    with pytest.raises(BadRequest, match="letters names no token that ends an answer"):
        GrammarCompiler(letters("a", ends=()), 512).compile(Grammar("regex", "a"))


def test_a_smaller_model_than_its_tokenizer() -> None:
    tokenizer = letters("a", "b", "ab")
    size = tokenizer.vocab_size - 1  # no logit for `ab`
    compiler = GrammarCompiler(tokenizer, size)
    allowed = compiler.constraint(Grammar("regex", "ab")).allowed(())
    assert allowed.shape == (size,) and {compiler.vocabulary.tokens[i] for i in ids(allowed)} == {b"a"}
    assert len(ids(allowed)) == 2  # the letter and its byte


def test_any_size_of_vocabulary() -> None:
    """Masks come in words of 32 tokens, and one more where that fits exactly."""
    tokenizer = letters("a", "b")
    for size in range(tokenizer.vocab_size, tokenizer.vocab_size + 40, 3):
        allowed = GrammarCompiler(tokenizer, size).constraint(Grammar("regex", "a|b")).allowed(())
        assert allowed.shape == (size,) and len(ids(allowed)) == 4
    assert any(size % 32 == 0 for size in range(tokenizer.vocab_size, tokenizer.vocab_size + 40, 3))


def test_threads_may_compile_while_another_decodes(small: GrammarCompiler) -> None:
    failures: list[BaseException] = []

    def compile_many(number: int) -> None:
        try:
            for i in range(20):
                small.compile(Grammar("regex", f"[a-{'bcde'[number]}]{{1,{i + 1}}}"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=compile_many, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    constraint, rng = small.constraint(SHAPES[0]), random.Random(1)
    for _ in range(40):
        constraint.advance([rng.choice(ids(constraint.allowed(())))])
        if constraint.tokens[-1] in small.vocabulary.end_ids:
            constraint = small.constraint(SHAPES[0])
    for thread in threads:
        thread.join()
    assert not failures
    assert len(small._parsers) <= 64  # 80 and more were asked for


def test_answers_are_what_was_asked_for(real: GrammarCompiler) -> None:
    """Random answers, cut short by choosing ends and closing brackets where there are some."""
    rng, tokens = random.Random(5), real.vocabulary.tokens
    for _ in range(5):
        constraint = real.constraint(SHAPES[0])
        for _ in itertools.repeat(None, 400):
            allowed = ids(constraint.allowed(()))
            closing = [
                i for i in allowed if i in real.vocabulary.end_ids or tokens[i] in (b'"', b"}", b"1", b'":', b"1")
            ]
            constraint.advance([rng.choice(closing if closing and rng.random() < 0.7 else allowed)])
            if constraint.tokens[-1] in real.vocabulary.end_ids:
                break
        answer = json.loads(real.vocabulary.text(constraint.tokens[:-1]))
        assert isinstance(answer["name"], str) and isinstance(answer["age"], int)
        assert set(answer) <= {"name", "age", "next"}
