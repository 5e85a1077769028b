# SPDX-License-Identifier: Apache-2.0
"""`import flash_mla` where this folder is on PYTHONPATH: mla_portable.flash_mla takes the place of this module."""

from mla_portable.flash_mla import install

if __name__ == "flash_mla":  # by its name in the package it does nothing
    install(force=True)
