# SPDX-License-Identifier: Apache-2.0
"""What adapters of several libraries share: Triton passes around a kernel, prepared launches, flat rows, predicted times."""
