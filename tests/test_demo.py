"""The demo on a tiny model: the second question must read the document's K/V from the prefix tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun.cli import main
from tests import tiny


def test_the_second_question_reuses_the_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.write_folder(tmp_path, "llama", max_position_embeddings=16_384)
    with pytest.raises(SystemExit) as left:
        main(["demo", "--model", str(folder), "--weights", "float32", "--threads", "1", "--max-tokens", "4"])
    assert left.value.code in (0, None)
    out = " ".join(capsys.readouterr().out.split())
    first, second = re.findall(r"prompt ([\d,]+) tokens, ([\d,]+) of them reused", out)
    assert first[1] == "0"
    prompt, reused = (int(number.replace(",", "")) for number in second)
    assert reused > 0.95 * prompt
    assert out.count("first token after") == 2 and "times sooner" in out
