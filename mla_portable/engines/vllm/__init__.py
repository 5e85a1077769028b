# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin: sparse MLA of DeepSeek-V3.2 style models through mla_portable, inside the real engine.

plugin    the entry point; registers the backend     auto      stock's class where it serves the device, else ours
backend   what vLLM asks before it picks a backend   model     vLLM's configuration -> AttentionSpec, route, reasons
builder   one StepPlan per step                      metadata  what travels from the builder to the layers
impl      one layer's attention                      scratch   buffers, from vLLM's workspace manager where it has one
writer    who writes the cache, with which scales    prompts   prompts over keys of each head, where that is faster
settings  environment variables                      compat    all that differs between versions of vLLM
status    what `mla-portable doctor` says about it       registration  what it declares to the registry
selections  which layers attend to one selection
warm_up   the layers' warm-up inside of vLLM's own

projecting        layers that leave the products with W_UK and W_UV to their implementation
context_parallel  this rank's share of each sequence, and the collective of its indexer

indexer         the DSA indexer's fused path
indexer_choice  whose indexer serves the model, and why
indexer_seams   where this indexer takes the place of vLLM's, in each version
pools           the indexer of pools of keys, where Triton has no e4m3
layer_choice    whose layer stands around attention, and why
layer           ours, in the place of vLLM's MultiHeadLatentAttentionWrapper
layer_ops       its operators
layer_parts     what it computes between the projections
imports         a function that changes a module right after it is imported

v4              DeepSeek-V4's layers, which ask no backend

Nothing here imports vLLM before vLLM itself asks for the plugin; `registration`, `settings` and `status` never do.
"""
