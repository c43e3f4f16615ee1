"""From a profile's file to a `Prefiller`: which profile goes with the models that were opened.

The default model's profile comes with the package; one for a pair may lie in a checkout or in the user's cache, as
trained drafters do. Sampled fingerprints of the models name the file, the full ones recorded in it decide.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path

from forerun.decode.draft_context import DraftContext
from forerun.errors import BadRequest
from forerun.models.formats.adapter import adapted_draft, drafter_name
from forerun.models.formats.checkpoint import Checkpoint
from forerun.models.formats.drafter_file import shipped_folders
from forerun.models.formats.fingerprint import SAMPLED_DIGITS, fingerprint, sampled_fingerprint
from forerun.prefill.cross_scores import CrossScores
from forerun.prefill.prefiller import Prefiller
from forerun.prefill.profile import Profile, chunk_profile


def open_profile(
    given: str | Path | Profile | None, target: Checkpoint, source: Checkpoint | None = None, any_source: bool = False
) -> Profile | None:
    """The given profile, if it was made for these models; without one that of the pair or of the target alone which is
    found by itself, if any. `any_source`: no source is open, and the profile's is not checked."""
    if given is None:
        return _found_for_pair(target, source) or _found(packaged(target), fingerprint(target), fingerprint(target))
    profile = read_profile(given)
    draft = source if profile.kind == "draft" else None
    source_print = None if draft is None else _fingerprint_like(profile.source, draft)
    profile.check(_fingerprint_like(profile.target, target), profile.source if any_source else source_print)
    return profile


def read_profile(given: str | Path | Profile) -> Profile:
    if not isinstance(given, (str, Path, Profile)):
        raise BadRequest(f"a profile cannot be a {type(given).__name__}: {given!r:.80}", "give the path of a profile")
    return given if isinstance(given, Profile) else Profile.load(Path(given))


def draft_for_profile(profile: Profile, draft: Checkpoint) -> Checkpoint:
    """The draft model as the profile knows it: as it is, without the drafter that was found for it, or with the one
    that was found when the profile was made, for the same target in another format."""
    if profile.kind != "draft" or profile.source == fingerprint(draft):
        return draft
    base: Checkpoint = getattr(draft, "base", draft)
    return adapted_draft(base, profile.source) or base


def _found_for_pair(target: Checkpoint, source: Checkpoint | None) -> Profile | None:
    """Named by the draft model, whether or not a trained drafter changes it; made for it as it is open now, or not
    used."""
    if source is None:
        return None
    folders = [folder for folder in shipped_folders("profiles") if folder.is_dir()]
    name = drafter_name(target, getattr(source, "base", source)) if folders else ""
    path = next((folder / name for folder in folders if (folder / name).is_file()), None)
    return _found(path, fingerprint(target), fingerprint(source)) if path is not None else None


def _found(path: Path | None, target: str, source: str) -> Profile | None:
    """The profile of that file, if it is for the models with these fingerprints: samples of the weights name the file,
    all of them decide."""
    profile = None if path is None else Profile.load(path)
    return profile if profile is not None and (profile.target, profile.source) == (target, source) else None


def profile_for_copy(profile: Profile, target: Checkpoint) -> Profile:
    """The profile under the fingerprint of the same weights in another format."""
    own = fingerprint(target)
    return replace(profile, target=own, source=own if profile.kind == "self" else profile.source)


def _fingerprint_like(recorded: str, checkpoint: Checkpoint) -> str:
    """The model's fingerprint of the kind that a profile has recorded; profiles of 0.1 have sampled ones."""
    if len(recorded) != SAMPLED_DIGITS:
        return fingerprint(checkpoint)
    warnings.warn(
        f"the profile knows {checkpoint.source} by some rows of its weights only, which will not do from the next "
        "release on: calibrate again",
        FutureWarning,
        stacklevel=4,
    )
    return sampled_fingerprint(checkpoint)


def packaged(target: Checkpoint) -> Path | None:
    """The file of the profile that comes with the package for models with these samples of weights."""
    folder = Path(str(resources.files("forerun") / "data" / "profiles"))
    if not folder.is_dir():
        return None
    path = folder / f"{sampled_fingerprint(target)}.safetensors"
    return path if path.is_file() else None


def prefiller_factory(profile: Profile | None) -> Callable[[DraftContext], Prefiller]:
    """Makes an engine's prefiller."""

    def make(ctx: DraftContext) -> Prefiller:
        if profile is None:
            return Prefiller(ctx, chunk_profile())
        if ctx.draft is None or ctx.draft.same_tokens:
            return Prefiller(ctx, profile)
        return Prefiller(ctx, profile, cross=CrossScores(ctx))

    return make
