"""What lies between the forwards of drafted steps, compiled for the CPU: batches, trees, accepted paths, moved K/V.

Two made-up models stand for the forwards. Each slot of K/V holds the token that was written there, so that what a row
sees can be read off, and what the target chooses depends on all of it.
"""

import ctypes
import random
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forerun.core.drafted import MAX_DRAFTED_SEQUENCES, DraftedStart, rows_of
from forerun.decode.drafters.best_first import PlainMarginals, grow
from forerun.decode.drafters.tree_builder import TreeBuilder
from forerun.models.cpu.library import _compilers
from forerun.models.cuda.drafted_layout import (
    CHILDREN,
    MAX_ROWS,
    RESULT_SIZE,
    RING,
    Params,
    macros,
    page_table,
    source_text,
    start_state,
    state_layout,
)
from forerun.models.cuda.packing import layout

PAGE, MOST_PAGES, VOCAB, MASK, LEAST = 4, 40, 12, 99, 0.004
DRAFT_AT, CHOSEN_AT = 3, 5


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels by rows of a launch."""
    folder, made = tmp_path_factory.mktemp("drafted"), {}
    for rows in (16, 32):
        source, binary = folder / f"{rows}.c", folder / f"{rows}.so"
        defined = "".join(f"#define {k} {v}\n" for k, v in macros(rows, PAGE, MOST_PAGES, MAX_ROWS).items())
        source.write_text(
            defined + source_text() + "\nint sizes(int i) { return i ? sizeof(struct Batch) : sizeof(State); }\n"
        )
        command = [*_compilers()[0], "-O1", "-shared", "-fPIC", "-w", "-o", str(binary), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        made[rows] = ctypes.CDLL(str(binary))
    return made


def follows(tokens: list[int]) -> int:
    """What the target chooses behind a text."""
    return hash((tuple(tokens[-3:]), len(tokens) % 5)) % VOCAB


class Device:
    """The memory that the kernels share with the models, and the models."""

    def __init__(self, library, rows: int, texts: list[list[int]], seed: int, skill: float) -> None:
        self.library, self.rows, self.texts, self.skill = library, rows, texts, skill
        self.draw = random.Random(seed)
        self.kind = layout(rows)
        pages = self.draw.sample(range(1, 200), len(texts) * 30)
        self.pages = [pages[i * 30 : i * 30 + 30] for i in range(len(texts))]
        self.draft_kv, self.kv = np.full(1000, -1), np.full((1000, 2), -1, dtype=np.int64)
        self.batches = [
            np.zeros(self.kind.itemsize + 4 * MOST_PAGES * MAX_DRAFTED_SEQUENCES, dtype=np.uint8) for _ in "dv"
        ]
        self.ranked = np.zeros((rows, 2 * CHILDREN))
        self.chosen = np.zeros(64, dtype=np.int64)
        self.results = np.zeros((RING, MAX_DRAFTED_SEQUENCES, RESULT_SIZE), dtype=np.int32)
        self.table = page_table(self.pages, MOST_PAGES)
        self.caches = np.array([self.kv.ctypes.data], dtype=np.uint64)
        for s, text in enumerate(texts):
            for entry, token in enumerate(text[:-1]):
                self.kv[self.slot(s, entry)] = token
                self.draft_kv[self.slot(s, entry)] = token

    def slot(self, s: int, entry: int) -> int:
        return self.pages[s][entry // PAGE] * PAGE + entry % PAGE

    def begin(self, depth: int, nodes: int, unread: int = 1) -> None:
        starts = [DraftedStart(len(t), t[-unread:], own) for t, own in zip(self.texts, self.pages, strict=True)]
        self.state = start_state(starts, rows_of(len(starts)), depth, nodes)
        address = {name: getattr(self, name).ctypes.data for name in ("state", "ranked", "chosen", "results", "caches")}
        draft, verified = (each.ctypes.data for each in self.batches)
        numbers = {"pieces": 1, "mask": MASK, "draft_chosen_at": DRAFT_AT, "chosen_at": CHOSEN_AT, "least": LEAST}
        self.params = Params(draft=draft, verified=verified, pages=self.table.ctypes.data, **address, **numbers)

    def batch(self, which: int):
        fields = self.batches[which][: self.kind.itemsize].view(self.kind)[0]
        assert fields["seqs"] == fields["page_stride"] == len(self.texts) and fields["steps"] == 1
        assert fields["chosen_at"] == (CHOSEN_AT if which else DRAFT_AT)
        tables = self.batches[which][self.kind.itemsize :].view(np.int32)
        for s, own in enumerate(self.pages):
            assert tables[s : s + len(own) * len(self.texts) : len(self.texts)].tolist() == own
        return fields

    def call(self, name: str) -> None:
        getattr(self.library, name)(self.params)

    def step(self) -> list[list[int]]:
        self.call("lay_draft")
        self.run_draft()
        self.call("lay_tree")
        self.run_target()
        self.call("accept")
        self.call("move_accepted")
        at = int(self.state.view(state_layout())["step"][0]) - 1
        results = self.results[at % RING, : len(self.texts)]
        return [row[3 : 3 + row[0]].tolist() for row in results]

    def run_draft(self) -> None:
        batch = self.batch(0)
        for s, text in enumerate(self.texts):
            first, end = batch["cu_seqlens"][s], batch["cu_seqlens"][s + 1]
            rows = range(first, end)
            tokens = batch["tokens"][first:end].tolist()
            masks = tokens.count(MASK)
            real = tokens[: len(tokens) - masks]
            assert real == text[len(text) - len(real) :] and end - first <= rows_of(len(self.texts))
            entry = len(text) - len(real)
            for i, row in enumerate(rows):
                assert batch["positions"][row] == entry + i and batch["kv_lens"][row] == entry + i + 1
                assert batch["slot_mapping"][row] == self.slot(s, entry + i) and batch["bits"][row] == 0
                self.draft_kv[batch["slot_mapping"][row]] = tokens[i]
            seen = [self.draft_kv[self.slot(s, e)] for e in range(len(text))]
            assert seen == text  # all the text, in its order, whatever was drafted before
            ahead = list(text)
            for depth in range(masks + 1):
                right = follows(ahead)
                ahead.append(right)
                others = self.draw.sample([t for t in range(VOCAB) if t != right], CHILDREN)
                if self.draw.random() < self.skill:
                    others[self.draw.choice((0, 0, 1))] = right
                probs = sorted((self.draw.random() for _ in range(CHILDREN)), reverse=True)
                self.ranked[end - masks - 1 + depth] = [*others, *(p / 2.5 for p in probs)]

    def run_target(self) -> None:
        batch = self.batch(1)
        for s, text in enumerate(self.texts):
            first, end = batch["cu_seqlens"][s], batch["cu_seqlens"][s + 1]
            for row in range(first, end):
                self.kv[batch["slot_mapping"][row]] = batch["tokens"][row]
            for row in range(first, end):
                limit, bits = int(batch["kv_lens"][row]), int(batch["bits"][row])
                seen = [*range(limit), *(limit + j for j in range(MAX_ROWS) if bits >> j & 1)]
                path = [int(self.kv[self.slot(s, e), 0]) for e in seen]
                assert batch["positions"][row] == len(path) - 1 and path[-1] == batch["tokens"][row]
                assert path[: len(text)] == text
                self.chosen[CHOSEN_AT + row] = follows(path)
            assert end - first <= rows_of(len(self.texts))


@pytest.mark.parametrize("sequences", [1, 2, 3, 4])
@pytest.mark.parametrize("skill", [0.0, 0.7, 1.0])
def test_steps_give_the_texts_that_the_target_alone_gives(compiled, sequences, skill):
    draw = random.Random(sequences)
    texts = [[draw.randrange(VOCAB) for _ in range(draw.randrange(4, 20))] for _ in range(sequences)]
    rows = 16 if sequences == 1 else 32
    device = Device(compiled[rows], rows, texts, 5, skill)
    device.begin(8, 15, unread=3)
    came = 0
    for _ in range(7):
        for text, tokens in zip(texts, device.step(), strict=True):
            assert tokens
            for token in tokens:
                assert token == follows(text)
                text.append(token)
            came += len(tokens)
    if skill == 1.0:
        assert came > 7 * sequences * 2  # else nothing was ever accepted
    if skill == 0.0:
        assert came == 7 * sequences


def test_memory_is_laid_out_as_the_source_says(compiled):
    for rows, library in compiled.items():
        assert library.sizes(0) == state_layout().itemsize and library.sizes(1) == layout(rows).itemsize


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_those_that_the_host_grows(compiled, seed):
    device = Device(compiled[16], 16, [[1, 2, 3, 4, 5]], seed, 0.8)
    device.begin(8, 15)
    device.step()
    state = device.state.view(state_layout())[0]["each"][0]
    ranked = [
        [(int(row[i]), float(row[CHILDREN + i])) for i in range(CHILDREN)] for row in device.ranked[: state["depth"]]
    ]
    ask = SimpleNamespace(max_nodes=15, sampled=False, tokens=[5], context=SimpleNamespace(shaped=False))
    tree = TreeBuilder(ask, "parallel")  # type: ignore[arg-type]
    grow(tree, PlainMarginals(torch.empty(0), ranked))
    count = int(state["nodes"])
    assert count == len(tree.draft) > 3
    assert state["tokens"][:count].tolist() == tree.draft.tokens
    assert state["parents"][:count].tolist() == tree.draft.parents
    assert state["depths"][:count].tolist() == tree.depth


def test_a_start_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="17 tokens are not read"):
        start_state([DraftedStart(40, list(range(17)), [0])], 16, 8, 15)


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

if HOPPER:
    import itertools
    from array import array
    from dataclasses import replace

    from forerun.cache.pool import PagePool
    from forerun.models.build import build_decoder
    from forerun.models.cuda.drafted_steps import DraftedSteps
    from forerun.models.execution.runner import Runner, Span
    from forerun_research.bench.shapes import SHAPES, RandomCheckpoint

    CUDA = torch.device("cuda")
    SHAPES["drafted-test"] = replace(
        SHAPES["1.5b"],
        vocab_size=1024,
        hidden_size=448,
        num_layers=3,
        num_heads=14,
        head_dim=64,
        intermediate_size=1216,
    )

    @pytest.fixture(scope="module")
    def runners():
        """A target and, as its draft model, the same weights: the first position of a draft is always right."""
        decoder, _ = build_decoder(RandomCheckpoint("drafted-test", CUDA), CUDA, "bf16", 2048, quiet=True)
        pool = PagePool(decoder.config, 1600, 16, torch.bfloat16, CUDA)
        draft_kv = pool.add_draft_kv(decoder.config, torch.bfloat16, CUDA)
        for cache in itertools.chain(*pool.kv, *draft_kv.kv):
            cache.normal_()
        return Runner(decoder, pool, 2048), Runner(decoder, pool, 2048, draft_kv.kv, is_draft=True)

    @pytest.mark.parametrize("sequences", [1, 2, 4])
    def test_texts_are_those_of_plain_decoding_on_the_device(runners, sequences):
        target, draft = runners
        steps = target.drafted_steps(draft, 7, LEAST)
        assert isinstance(steps, DraftedSteps)
        steps.prepare()
        draw = random.Random(sequences)
        pages = [array("i", [s * 40 + i for i in range(40)]) for s in range(sequences)]
        texts = [[draw.randrange(1024) for _ in range(draw.randrange(20, 60))] for _ in range(sequences)]
        plain = [list(text) for text in texts]
        for text, own in zip(plain, pages, strict=True):
            target.forward([Span(text[:-1], 0, own, (), prompt=True)])
            for _ in range(40):
                logits = target.forward([Span(text[-1:], len(text) - 1, own, (0,))]).logits
                text.append(int(logits.argmax()))
        for text, own in zip(texts, pages, strict=True):
            target.forward([Span(text[:-1], 0, own, (), prompt=True)])
            draft.forward([Span(text[:-1], 0, own, (), prompt=True)])
        steps.begin([DraftedStart(len(t), t[-1:], own) for t, own in zip(texts, pages, strict=True)], 8, 15)
        pending, came = steps.launch(), []
        for _ in range(12):  # one ahead of the host
            following = steps.launch()
            for text, result in zip(texts, pending.read(), strict=True):
                text += result.tokens
                came.append(len(result.tokens))
            pending = following
        pending.read()
        for text, expected in zip(texts, plain, strict=True):
            size = min(len(text), len(expected))
            assert text[:size] == expected[:size]
        assert sum(came) > 1.9 * len(came)  # the first position of a draft is right
