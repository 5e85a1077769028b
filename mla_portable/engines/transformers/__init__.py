# SPDX-License-Identifier: Apache-2.0
"""An attention function for Hugging Face transformers; `mla_portable.transformers.register` registers it.

attention  the function: checks, lists of slots, the layer that serves
latents    what layers hand to it in place of keys and values of each head, and the weights of their up-projection
plain      attention in plain torch, for float32
"""
