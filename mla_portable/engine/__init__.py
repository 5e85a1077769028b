# SPDX-License-Identifier: Apache-2.0
"""What the adapters for engines share; nothing here knows an engine.

routing      the route for a spec, and its decision in a line
serving      what serves in a process, as a metric and in the log
entry        why an engine does not load a plugin
status       what `doctor` looks at first in every engine
prompts      prompts over keys of each head: for which layers, and in which steps
deepseek     what would serve DeepSeek-V3.2 on a device, for `doctor`
index_keys   requests about the pages of an engine's indexer, and who writes keys into them
e4m3_stores  an engine's Triton kernels that store e4m3, where Triton has none
"""
