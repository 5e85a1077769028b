# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's scores of the indexer: the interface recognised and tried, and the adapters around it."""
