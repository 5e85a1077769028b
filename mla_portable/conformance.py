# SPDX-License-Identifier: Apache-2.0
"""The former name of `mla_portable.judge.conformance`, kept for one release."""

import warnings

from mla_portable.judge.conformance import *  # noqa: F403

warnings.warn(
    "mla_portable.conformance is now mla_portable.judge.conformance: import from there", DeprecationWarning, stacklevel=2
)
