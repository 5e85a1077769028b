# SPDX-License-Identifier: Apache-2.0
"""The SGLang plugin: sparse MLA of DeepSeek-V3.2 style models through mla_portable, inside SGLang's own DSA backend.

plugin       the entry point; registers the hooks
seams        what of SGLang is hooked, and how its signatures are checked
hooks        what SGLang calls in place of its methods
serving      one backend object's layers: their implementations and calls
model        SGLang's backend object -> AttentionSpec, or reasons against it
prompts      extends over keys of each head, where that is faster
indexer      whose functions score the indexer's keys
stock        what SGLang's own kernels can serve
pool_rows    rows of FP8 caches, where SGLang's kernels of them do not compile
index_codes  e4m3 codes of the indexer, likewise
topk         SGLang 0.5.16's top-k, likewise
settings     environment variables
status       what `mla-portable doctor` says about it
registration  what it declares to the registry

SGLang writes the cache, selects the keys, and plans its step. Nothing here imports SGLang before SGLang itself asks for the
plugin; `seams`, `registration`, `settings` and `status` never do.
"""
