# SPDX-License-Identifier: Apache-2.0
"""The early start of a kernel (programmatic dependent launch): the rule, and the wait of this plugin's Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["can_wait", "wait_for_kernel_in_front"]


if hasattr(getattr(getattr(tl, "extra", None), "cuda", None), "gdc_wait"):

    @triton.jit
    def wait_for_kernel_in_front():
        """Wait until the kernel in front in the stream has ended and its writes are visible."""
        tl.extra.cuda.gdc_wait()
else:  # before Triton 3.4, which looks up whatever a kernel names, in a branch that is not taken too
    wait_for_kernel_in_front = None


def can_wait(tensor: Tensor) -> bool:
    """Triton's kernels on the tensor's device can wait for the one in front of them by themselves.

    That takes compute capability 9.0 or later, and Triton 3.4 or newer.

    The rule of an early start, for Triton's kernels and native ones alike. The wait (`griddepcontrol.wait`, `gdc_wait`) ends
    when the kernel in front in the stream has ended and its writes are visible. It does not cover the kernels before that one.
    So a kernel may start early only behind a kernel that

    - was launched normally, and so began after the end of all before it; or
    - waits itself, in at least one thread of its grid whatever the input, and starts early by this rule.

    A kernel of which all threads may return without a wait may end while the one before it still writes. FlashMLA's combine is
    such a kernel where no row is split. Who launches the kernel in front knows what it is, and decides: between primitives by
    `Support.ends_in_order` of the first and `Request.follows_in_order` of the second.

    The early kernel waits in all threads, before any access to global memory: loads, because the data may not be written yet,
    and stores, because the kernel in front may still read. After the wait it uses plain loads. What the kernel in front writes
    is not constant during the life of this one, as `ld.global.nc` (`__ldg`, `__restrict__`) requires.
    """
    known = wait_for_kernel_in_front is not None and torch.version.hip is None
    return known and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9
