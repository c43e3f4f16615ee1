"""Every error a user can meet, each with a way out.

`ForerunError` carries a one-line message (what was wrong: the value, the limit) and a hint (what to do). The hint is a
note of the exception, so a traceback ends with it. The CLI prints message and hint on two lines; a traceback only
appears with `--debug`.
"""


class ForerunError(Exception):
    """Base of all expected errors: `str(error)` is the message, `error.hint` the way out."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note(f"hint: {hint}")


class ModelNotFound(ForerunError, ValueError):
    """No folder, file, cached model or reachable hub id goes by that name."""


class UnsupportedModel(ForerunError):
    """The model is well-formed but its architecture or a feature of it is not implemented."""


class CorruptModel(ForerunError):
    """The model's files are truncated, inconsistent or not what their checksums say."""


class BadRequest(ForerunError, ValueError):
    """A value of a request is wrong; other requests are not affected."""


class OutOfPages(ForerunError):
    """The KV pool or memory cannot hold what was asked. No `ValueError`: the same values work in a larger pool, and
    often in this one as soon as other requests have ended."""


class BadProfile(ForerunError, ValueError):
    """A profile of speculative prefill is missing, damaged, or was made for other models."""


class BadDrafter(ForerunError, ValueError):
    """A trained drafter is missing, damaged, or was made for other models."""
