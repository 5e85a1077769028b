# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's scores of the indexer: the interface recognised and tried, and the adapters around it.

A vendor's plugin calls `scores`.
"""

from mla_portable_common.deep_gemm.vendors import scores

__all__ = ["scores"]
