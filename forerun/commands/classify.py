"""`forerun classify`: one of some labels for each text, with the probabilities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from forerun.commands import options as opt
from forerun.commands.generate import read_text
from forerun.errors import BadRequest


@opt.grouped
def classify(
    opened: opt.ModelOptions,
    labels: Annotated[str, typer.Option("--labels", "-l", help="The labels, separated by commas.")],
    text: Annotated[str | None, typer.Argument(help="The text; or use --file.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A text a line, or - for standard input.")] = None,
    instruction: Annotated[
        str | None, typer.Option("--instruction", help="The question before the text; {labels} stands for the labels.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Give each text one of some labels, and say how probable each label is.

    The probabilities are those of the model's answers, given that the answer is a label; with --json, `mass` is how
    often the model would have answered with a label by itself.

    Example: forerun classify "The film was far too long." --labels positive,negative
    """
    from forerun.recipes.classify import INSTRUCTION, check_labels, label_question
    from forerun.recipes.classify import classify as classify_one

    named = [label.strip() for label in labels.split(",") if label.strip()]
    check_labels(named)
    if (text is None) == (file is None):
        raise BadRequest("give a text or a --file, one of them", "see forerun classify --help")
    texts = [line for line in read_text(file).splitlines() if line.strip()] if file is not None else [str(text)]
    with opened.open() as llm:
        for each in texts:
            found = classify_one(llm, label_question(each, named, instruction or INSTRUCTION), named)
            if as_json:
                print(json.dumps({"text": each, "label": found.label, "probs": found.probs, "mass": found.mass}))
                continue
            shown = "  ".join(f"{label} {prob:.3f}" for label, prob in found.probs.items())
            print(shown if text is not None else f"{shown}  | {each:.60}", flush=True)
