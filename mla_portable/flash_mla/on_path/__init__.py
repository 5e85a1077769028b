# SPDX-License-Identifier: Apache-2.0
"""Not for import: the runner puts this folder on PYTHONPATH, so that child processes find `flash_mla` in it."""
