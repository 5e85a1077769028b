# SPDX-License-Identifier: Apache-2.0
"""What a result is held against: `problems` has the oracles, cases and tolerances, `conformance` the suite that runs them."""
