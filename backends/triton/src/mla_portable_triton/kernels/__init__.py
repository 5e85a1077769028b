# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, one a file: the kernel, its launch, its configurations and the variants compiled ahead of time.

Importing this package imports nothing; importing a kernel's file imports triton.
"""
