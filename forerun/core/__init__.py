"""The nouns: what is asked (`SamplingParams`), what is run (`TokenBatch`), what is drafted and what becomes of it
(`Draft`, `Verdict`), what is reported (`Usage`), what is cached (`KV`).

Nothing here knows a model, a cache policy or a device policy.
"""

from forerun.core.batch import EXTRA_KV_SLOTS, KV, HostBatch, KVShape, TokenBatch
from forerun.core.draft import ROOT, Draft, Verdict
from forerun.core.usage import ConditionalReport, PrefillReport, Tally, TokenLogprob, Usage
from forerun.params import Grammar, Prefill, SamplingParams, Speculation
