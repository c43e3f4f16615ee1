"""Triton kernels of the CUDA decoder; importing this needs Triton, so only the CUDA path does."""

from forerun.models.cuda.fused import act_mul, add_rms_norm, rms_norm, rope_and_store
from forerun.models.cuda.paged import QueryPlan, paged_attention, plan_queries
from forerun.models.cuda.skinny import MAX_ROWS, skinny_linear

__all__ = [
    "MAX_ROWS",
    "QueryPlan",
    "act_mul",
    "add_rms_norm",
    "paged_attention",
    "plan_queries",
    "rms_norm",
    "rope_and_store",
    "skinny_linear",
]
