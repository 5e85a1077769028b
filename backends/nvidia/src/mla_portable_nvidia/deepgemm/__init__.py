# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM behind indexer_logits, indexer_logits_ragged and indexer_select: its conventions, its own passes, the adapters."""
