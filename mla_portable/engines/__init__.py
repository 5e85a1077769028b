# SPDX-License-Identifier: Apache-2.0
"""The adapters by which engines use this package.

common    what the adapters share: routes bound for graphs or else eagerly, variables, status, metrics
vllm      vLLM: a backend class for sparse attention, V4's layer, the indexer
sglang    SGLang: hooks in its backend of DSA, its indexer, its pool of rows

FlashMLA's and DeepGEMM's own names, which users import, are `mla_portable.flash_mla` and `mla_portable.deep_gemm`.
"""
