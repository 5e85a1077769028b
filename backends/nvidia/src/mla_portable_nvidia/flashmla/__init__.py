# SPDX-License-Identifier: Apache-2.0
"""FlashMLA behind sparse_decode and sparse_prefill: the packages that bring it, their conventions, schedules and adapters."""
