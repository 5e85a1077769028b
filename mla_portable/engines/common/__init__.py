# SPDX-License-Identifier: Apache-2.0
"""What the adapters for engines share; nothing here knows an engine.

routing       the route for a spec, and its decision in a line
metrics       what serves in a process, as a metric and in the log
status        what `doctor` shows of the plugin in every engine
prompt_route  prompts over keys of each head: for which layers, and in which steps
warm_up       calls of every kind that steps make, before the first request
asked         what layers of models, and an indexer, ask for
scorer        whose functions score an indexer's keys
index_keys    requests about the pages of an engine's indexer, and who writes keys into them
e4m3_stores   an engine's Triton kernels that store e4m3, where Triton has none
"""
