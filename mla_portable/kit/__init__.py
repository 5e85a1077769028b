# SPDX-License-Identifier: Apache-2.0
"""What the core and plugins may both use, and the contracts do not need. Import the modules themselves.

triton_launcher     launches Triton kernels by remembered signatures
interpreted_masks   Triton's interpreter with masks of one scalar operand
split_kv            the decode schedule that cuts rows into splits
results             tensors that an attention primitive writes to
rules               checks of single tensors
tensor_table        checks of a call's tensors by a table
tensor_scales       scales of a whole cache, and of queries
second_cache        a second cache of sparse_decode and sparse_prefill
parameters          the parameters of a vendor's function, by their names
defaults            torch's own defaults, in a block
whole_files         files written whole or not at all
"""
