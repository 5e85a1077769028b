# SPDX-License-Identifier: Apache-2.0
"""This plugin's own CUDA kernels: compiled at run time by NVRTC, which CUDA builds of torch bring, launched by the driver."""
