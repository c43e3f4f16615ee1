"""Groups of options: one parameter each for typer, one object for the command; grammars from files and text."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import typer

from forerun.commands import options as opt
from forerun.errors import BadRequest
from forerun.params import Prefill, SamplingParams, Speculation


def test_a_group_becomes_one_option_for_each_field() -> None:
    seen: dict[str, Any] = {}

    @opt.grouped
    def command(
        opened: opt.ModelOptions,
        answer: opt.ChatAnswerOptions,
        word: Annotated[str | None, typer.Argument()] = None,
    ) -> None:
        """Help."""
        seen.update(opened=opened, answer=answer, word=word)

    parameters = inspect.signature(command).parameters
    assert {"model", "draft_model", "temperature", "speculation", "regex", "word"} <= set(parameters)
    assert not {"opened", "answer"} & set(parameters)
    assert parameters["max_tokens"].default == 512 and parameters["word"].default is None
    assert any(isinstance(part, typer.models.OptionInfo) for part in get_args(parameters["draft_model"].annotation))
    values = {name: parameter.default for name, parameter in parameters.items()}
    command(**values | {"model": "big", "draft_model": "small", "temperature": 0.5, "word": "hi"})
    assert seen["opened"] == opt.ModelOptions("big", "small") and seen["word"] == "hi"
    assert seen["answer"] == opt.ChatAnswerOptions(temperature=0.5)
    assert command.__doc__ == "Help."


def test_a_model_is_opened_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.LLM", lambda model, **options: (model, options))
    model, options = opt.ModelOptions("big", "small", threads=1, kv_cache_tokens=64).open(quiet=True)  # type: ignore[misc]
    assert model == "big" and options == {
        "draft_model": "small",
        "dtype": "auto",
        "quantization": None,
        "store": None,
        "device": "auto",
        "threads": 1,
        "kv_cache_tokens": 64,
        "memory": None,
        "quality": None,
        "gpu_memory_utilization": None,
        "max_model_len": None,
        "max_num_batched_tokens": None,
        "max_gap_ms": None,
        "adapt": False,
        "enable_prefix_caching": True,
        "prefill_profile": None,
        "batch_invariant": None,
        "disk": None,
        "quiet": True,
    }
    assert not opt.ModelOptions(batch_invariant=False).open()[1]["batch_invariant"]  # type: ignore[index]


def test_params_carry_what_was_asked() -> None:
    params = opt.AnswerOptions(temperature=0.3, stop=["a\\nb"], speculation="lookup", verify="match").params(n=2)
    assert (params.temperature, params.stop, params.n) == (0.3, ("a\nb",), 2)
    assert (params.speculation.drafter, params.speculation.verify) == ("lookup", "match")
    assert opt.AnswerOptions().params().speculation.drafter == "auto"
    assert opt.AnswerOptions(verify="bounded", bound=0.2).params().speculation.bound == 0.2


def test_options_derive_from_the_fields_of_the_library() -> None:
    renamed = {
        ("Speculation", "drafter"): "speculation",
        ("Speculation", "nodes"): "draft_nodes",
        ("Speculation", "depth"): "draft_depth",
        ("Prefill", "mode"): "prefill",
        ("Prefill", "source"): "prefill_source",
    }
    hints = get_type_hints(opt.AnswerOptions, include_extras=True)
    for kind in (Speculation, Prefill):
        for entry in fields(kind):
            name = renamed.get((kind.__name__, entry.name), entry.name)
            assert getattr(opt.AnswerOptions(), name) == entry.default
            assert get_args(hints[name])[-1].help.startswith(entry.metadata["help"])
    for name in set(hints) & {entry.name for entry in fields(SamplingParams)} - {"stop", "speculation", "prefill"}:
        given, library = getattr(opt.AnswerOptions(), name), getattr(SamplingParams(), name)
        assert given == library or (given is None and get_args(hints[name])[-1].show_default == str(library))
    assert opt.AnswerOptions().params() == SamplingParams()
    assert "from 0.0 to 100.0" in get_args(hints["temperature"])[-1].help
    assert "deviation" in get_args(hints["chooser"])[-1].help


def test_the_model_s_own_settings_fill_what_was_not_given() -> None:
    class Recommending:
        def get_default_sampling_params(self) -> SamplingParams:
            return SamplingParams(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05)

    llm: Any = Recommending()
    assert opt.AnswerOptions().params_for(llm).greedy
    params = opt.AnswerOptions(sampling="model", top_p=0.5).params_for(llm, n=2)
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.n) == (0.6, 20, 0.5, 0.05, 2)
    assert opt.AnswerOptions(sampling="model", temperature=0.0).params_for(llm).greedy  # given is given
    with pytest.raises(BadRequest, match="--choices 3 at temperature 0"):
        opt.AnswerOptions(sampling="model", temperature=0.0).params_for(llm, n=3)
    with pytest.raises(BadRequest, match="--sampling is 'wild'"):
        opt.AnswerOptions(sampling="wild").params()


def test_drafted_prompts_are_asked_for_by_name() -> None:
    asked = opt.AnswerOptions(
        prefill="speculative", budget=0.4, prefill_source="self", chooser="tail", allow_exact=True
    )
    assert asked.params().prefill == Prefill("speculative", 0.4, None, "self", "tail", True)
    assert opt.AnswerOptions(prefill="provisional", quality=0.9).params().prefill.quality == 0.9
    assert opt.AnswerOptions().params().prefill.exact
    for alone in (opt.AnswerOptions(budget=0.4), opt.AnswerOptions(allow_exact=True), opt.AnswerOptions(quality=0.9)):
        with pytest.raises(BadRequest, match="drafted prompts") as caught:
            alone.params()
        assert "--prefill speculative" in caught.value.hint
    with pytest.raises(BadRequest, match="budget is 1.5"):
        opt.AnswerOptions(prefill="speculative", budget=1.5).params()


def test_grammars_come_from_files_or_text(tmp_path: Path) -> None:
    schema, lark = tmp_path / "ship.json", tmp_path / "ship.lark"
    schema.write_text('{"type": "object"}')
    lark.write_text('start: "a"')
    for answer, kind, source in (
        (opt.AnswerOptions(json_schema=str(schema)), "json_schema", '{"type": "object"}'),
        (opt.AnswerOptions(json_schema=' {"type": "array"}'), "json_schema", ' {"type": "array"}'),
        (opt.AnswerOptions(json_object=True), "json_object", ""),
        (opt.AnswerOptions(regex="[0-9]+"), "regex", "[0-9]+"),
        (opt.AnswerOptions(lark=str(lark)), "lark", 'start: "a"'),
        (opt.AnswerOptions(lark='start: "b"'), "lark", 'start: "b"'),
    ):
        grammar = answer.params().grammar
        assert grammar is not None and (grammar.kind, grammar.source) == (kind, source)
    assert opt.AnswerOptions().params().grammar is None


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (opt.AnswerOptions(json_schema="no-such-file.json"), "no-such-file.json"),
        (opt.AnswerOptions(lark="x" * 5000), "--lark"),
        (opt.AnswerOptions(lark="nul\0"), "--lark"),
        (opt.AnswerOptions(json_object=True, regex="a"), "--json-object and --regex"),
    ],
    ids=["file", "long", "nul", "two"],
)
def test_grammars_that_cannot_be_are_named(answer: opt.AnswerOptions, named: str) -> None:
    with pytest.raises(BadRequest, match=named) as caught:
        answer.params()
    assert caught.value.hint
