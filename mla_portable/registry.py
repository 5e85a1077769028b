# SPDX-License-Identifier: Apache-2.0
"""The former name of `mla_portable.choose`, kept for one release."""

import warnings

from mla_portable.choose import *  # noqa: F403

warnings.warn("mla_portable.registry is now mla_portable.choose: import from there", DeprecationWarning, stacklevel=2)
