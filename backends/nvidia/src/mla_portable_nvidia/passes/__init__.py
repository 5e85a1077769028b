# SPDX-License-Identifier: Apache-2.0
"""What the adapters of several libraries share: Triton passes around a kernel, prepared launches, views, predicted times."""
