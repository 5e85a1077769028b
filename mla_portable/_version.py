# SPDX-License-Identifier: Apache-2.0
"""The version of this package, in a module that imports nothing: no module needs the package's face for it."""

__version__ = "0.2.0"
