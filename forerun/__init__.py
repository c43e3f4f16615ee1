"""Forerun: LLM inference that never computes what it can reuse or guess, and checks every guess."""

from forerun.api import LLM, Choice, Completion
from forerun.core import SamplingParams, Usage
from forerun.errors import ForerunError

__all__ = ["LLM", "Choice", "Completion", "ForerunError", "SamplingParams", "Usage"]
__version__ = "0.1.0"
