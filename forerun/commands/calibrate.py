"""`forerun calibrate`: fit a profile, with which the K/V of long prompts is drafted instead of computed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.commands import options as opt
from forerun.commands.screen import print_table
from forerun.errors import BadRequest

if TYPE_CHECKING:
    from forerun.prefill.profile import Profile


@dataclass(frozen=True)
class FitOptions:
    """How maps are fitted; see `FitSettings` and `WindowSettings`."""

    base: int | None = opt.shown(
        None, min=1, help="Target layers that every token runs. Default: 1; 30% without --draft-model."
    )
    rank: int | None = opt.shown(
        None, min=1, help="Width of the maps: less is faster and smaller. Default: by the model."
    )
    taps: int | None = opt.shown(None, min=1, help="Layers of the source that the maps read. Default: as many as fit.")
    steps: int | None = opt.shown(None, min=1, help="Steps of distillation.")
    minutes: float | None = opt.shown(None, min=0.5, help="For all of it. Default: no limit, 10 of distillation.")
    no_distill: bool = opt.shown(False, "--no-distill", help="Only the ridge fit: quick, and not as good.")
    tokens: int = opt.shown(2_000_000, min=1, help="Most tokens of text that are used.")
    window: int = opt.shown(2048, min=416, help="Tokens of each prompt.")
    batch: int = opt.shown(4, min=1, help="Prompts at a time: fewer need less memory.")
    quality: float = opt.shown(0.97, min=0.5, max=1.0, help="Agreement with exact prefill that the defaults aim at.")
    seed: int = opt.shown(0, help="Decides which text is used, and in which order.")
    maps: str | None = opt.shown(None, help="Keep the maps of this profile and fit none: measure it on this text.")
    start: str | None = opt.shown(None, help="Train the maps of this profile on, in place of a first fit.")
    force: bool = opt.shown(False, "--force", help="Save a profile that agrees with exact prefill in less than 0.8.")

    def check(self) -> None:
        if self.steps is not None and self.minutes is not None:
            problem = f"--steps {self.steps} and --minutes {self.minutes:g} cannot go together"
            raise BadRequest(problem, "give one of them")
        shape = (self.base, self.rank, self.taps)
        if self.maps is not None and any((*shape, self.steps, self.no_distill, self.start)):
            raise BadRequest(
                "--maps keeps maps as they are, beside options that say how others are fitted",
                "leave --base, --rank, --taps, --steps, --no-distill and --start out",
            )
        if self.start is not None and any((*shape, self.no_distill)):
            raise BadRequest(
                "--start trains the maps of a profile on, beside options that say how others are fitted",
                "leave --base, --rank, --taps and --no-distill out",
            )
        if self.no_distill and self.steps is not None:
            raise BadRequest("--no-distill leaves nothing to spend --steps on", "leave one of them out")


@opt.grouped
def calibrate(
    target: Annotated[str, typer.Option("--target", help="The model whose prompts are to be drafted.")],
    text: Annotated[
        list[Path],
        typer.Option(
            "--text", help="UTF-8 text, .jsonl of `text` or `messages`, or a folder of such; may be repeated."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Where to save the profile; PROFILE.state lies beside it until it is done."),
    ],
    fit: FitOptions,
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="More text, as a shell expands --text *.md.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft-model", "-d", help="A smaller model of the same tokenizer that drafts; none: the target itself."
        ),
    ] = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    as_json: opt.AsJson = False,
) -> None:
    """Fit maps from a cheap source to a model's K/V, and measure on held-out text how good they are.

    Ctrl-C leaves a state beside the profile: the same command resumes from there.

    Example: forerun calibrate --target qwen2.5-coder-1.5b-instruct --draft-model qwen2.5-coder-0.5b-instruct
    --text src/ --text notes.txt --out coder.profile
    """
    fit.check()
    import torch

    from forerun.models.build import choose_device
    from forerun.prefill.calibration.run import calibrate as run
    from forerun.prefill.calibration.setup import FitSettings
    from forerun.prefill.calibration.windows import WindowSettings

    if threads is not None:
        torch.set_num_threads(threads)
    own = {
        name: getattr(fit, name)
        for name in ("base", "rank", "taps", "batch", "steps", "minutes", "quality", "maps", "start")
    }
    settings = FitSettings(**own, distill=not fit.no_distill)
    windows = WindowSettings(prompt=fit.window, tokens=fit.tokens, seed=fit.seed)
    texts = [*text, *(more or ())]
    profile = run(target, draft, texts, out, settings, windows, choose_device(device), force=fit.force)
    if as_json:
        print(json.dumps(_record(profile, out)))
    else:
        _show(profile, out)


def _record(profile: Profile, out: Path) -> dict[str, Any]:
    own = {name: getattr(profile, name) for name in ("kind", "names", "share", "thresholds", "facts")}
    maps = {"base": profile.maps.base, "rank": profile.maps.rank}
    curve = [asdict(point) for point in profile.curve]
    return {"profile": str(out), "bytes": out.stat().st_size, "curve": curve} | own | maps


def _show(profile: Profile, out: Path) -> None:
    title = f"{profile.names['target']}, drafted by {'itself' if profile.kind == 'self' else profile.names['source']}"
    marks = {profile.share: "default"}
    rows = [
        (f"{p.share:.0%}", f"{p.cost:.2f}", f"{p.top1:.3f}", f"{p.kl:.4f}", marks.get(p.share, ""))
        for p in profile.curve
    ]
    print_table(("recomputed", "cost", "agreement", "KL", ""), rows, title=title)
    if not profile.facts["quality_reached"]:
        aim = profile.facts["settings"]["quality"]
        print(
            f"No share reaches an agreement of {aim:g} at a sensible cost: the default is the best of those that do "
            "not cost too much. More text, more --minutes or a larger --base may reach it."
        )
    for kind, found in profile.facts["texts"].items():
        holds = "holds" if found["holds"] else "does not hold"
        figures = f"agreement {found['top1']:.3f}, KL {found['kl']:.3f}, {found['windows']} windows"
        print(f"{holds} on {kind}: {figures}")
    print("Text of other kinds was not measured: calibrate on text like your prompts.")
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
