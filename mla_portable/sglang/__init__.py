# SPDX-License-Identifier: Apache-2.0
"""The SGLang plugin: sparse MLA of DeepSeek-V3.2 style models through mla_portable, inside SGLang's own DSA backend.

plugin    the entry point; registers the hooks        places    what of SGLang is hooked, and how its signatures are checked
hooks     what SGLang calls in place of its methods   serving   one backend object's layers: their implementations and calls
stock     what SGLang's own kernels can serve         model     SGLang's backend object -> AttentionSpec, or reasons against it
indexer   whose functions score the indexer's keys    settings  environment variables
pool_rows rows of FP8 caches, where SGLang's kernels of them do not compile
prompts   extends over keys of each head, where that is faster
status    what `mla-portable doctor` says about it

SGLang writes the cache, selects the keys, and plans its step. Nothing here imports SGLang before SGLang itself asks for the
plugin; `places`, `settings` and `status` never do.
"""
