# SPDX-License-Identifier: Apache-2.0
"""Compiling CUDA C++ with NVRTC, keeping images on disk, loading and launching through the CUDA driver."""
