# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 behind sparse_decode, sparse_prefill and masked_prefill: its operator, its own passes, the adapters."""
