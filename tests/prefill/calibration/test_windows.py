"""Windows: of the right length, never the same text on both sides, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.errors import BadRequest
from forerun.prefill.calibration.windows import MIN_HELD_WINDOWS, MIN_TRAIN_WINDOWS, WindowSettings, read_windows
from forerun.text.tokenizer import Tokenizer
from tests.prefill.calibration.common import write_text

PLAIN = WindowSettings(prompt=96, continuation=32, copy=0.0, recall=0.0, tokens=10_000)


def test_windows_are_text_from_a_documents_start(text: Path, tokenizer: Tokenizer) -> None:
    windows = read_windows([text], tokenizer, PLAIN)
    assert windows.train.shape[1] == windows.held.shape[1] == 128 and windows.train.dtype == torch.int32
    assert windows.files == 6 and set(windows.kinds) == {("plain", "prose")}
    assert (windows.train.numel() + windows.held.numel()) <= 10_000
    starts = [tokenizer.encode(path.read_text())[:64] for path in text.iterdir()]
    assert any(row[:64].tolist() in starts for row in windows.train)


def test_no_text_is_on_both_sides(text: Path, tokenizer: Tokenizer) -> None:
    windows = read_windows([text], tokenizer, PLAIN)
    whole = {path: tokenizer.encode(path.read_text()) for path in text.iterdir()}

    def homes(row: torch.Tensor) -> set[str]:
        piece = row[20:60].tolist()
        return {p.name for p, ids in whole.items() if any(ids[i : i + 40] == piece for i in range(len(ids)))}

    train = set.union(*(homes(row) for row in windows.train[:8]))
    held = set.union(*(homes(row) for row in windows.held))
    assert train and held and not train & held


def test_the_seed_decides(text: Path, tokenizer: Tokenizer) -> None:
    settings = WindowSettings(prompt=96, continuation=32, tokens=5000)
    one, same = (read_windows([text], tokenizer, settings) for _ in range(2))
    assert torch.equal(one.train, same.train) and torch.equal(one.held, same.held) and one.kinds == same.kinds
    other = read_windows([text], tokenizer, WindowSettings(prompt=96, continuation=32, tokens=5000, seed=1))
    assert not torch.equal(one.train, other.train)


def test_short_documents_are_joined(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_text(tmp_path, files=200, words=20)
    windows = read_windows([tmp_path], tokenizer, PLAIN)
    assert len(windows.train) >= 20


def test_one_file_is_enough(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_text(tmp_path, files=1, words=4000)
    windows = read_windows([tmp_path / "0.txt"], tokenizer, PLAIN)
    assert len(windows.train) >= MIN_TRAIN_WINDOWS and len(windows.held) >= MIN_HELD_WINDOWS


def test_too_little_says_how_much_is_needed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_text(tmp_path, files=2, words=60)
    with pytest.raises(BadRequest) as error:
        read_windows([tmp_path], tokenizer, PLAIN)
    assert "768 tokens in all" in str(error.value) and "2 files" in str(error.value)
    assert "--window" in error.value.hint


@pytest.mark.parametrize(
    "wrong", [{"prompt": 3}, {"continuation": 0}, {"held": 0.0}, {"held": 0.9}, {"copy": 0.8, "recall": 0.3}]
)
def test_impossible_settings(wrong: dict[str, float]) -> None:
    with pytest.raises(BadRequest, match="calibration"):
        WindowSettings(**wrong)  # type: ignore[arg-type]
