# SPDX-License-Identifier: Apache-2.0
"""The former name of `mla_portable.kit.triton_launcher`, for one release."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("mla_portable.kit.triton_launcher")
