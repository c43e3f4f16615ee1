"""An edit of a file as the model writes it: text and diff piece by piece, then which way was used and what it cost.

python examples/edit_file.py                                           # a list, with the default model
python examples/edit_file.py qwen2.5-coder-1.5b-instruct depot.py "Fix the bug in total."
"""

from __future__ import annotations

import sys

from forerun import LLM
from forerun.recipes import EditPiece

LIST = "# Shopping\n\n- bread\n- milk\n- tea\n- lamp oil\n- salt\n"


def main(model: str | None, file: str, instruction: str, text: str | None) -> None:
    with LLM(model) if model else LLM() as llm:
        piece = EditPiece("", "")
        for piece in llm.stream_edit(file, instruction, text=text):
            print(piece.text, end="", flush=True)
        done = piece.result
        assert done is not None
        print(f"\n{done.diff or 'nothing changed'}\nused: {done.used} ({done.why})")
        print(f"{done.usage.completion_tokens} tokens written, {done.usage.copied} copied, {done.usage.total_s:.1f} s")


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*(given[:3] if len(given) == 3 else (None, "list.md", "Replace tea by coffee.")), None if given else LIST)
