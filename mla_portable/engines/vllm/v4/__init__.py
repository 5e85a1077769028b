# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4 and V4.1, whose layers are no layers of vLLM's backends: the model picks a class for its attention by itself.

choice    which class the model is given: vLLM's own, or one that is derived from it
layer     what is derived: native head counts, decode and prefill
kinds     the layers of one kind: what serves them, and their scratch
"""
