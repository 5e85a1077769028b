# SPDX-License-Identifier: Apache-2.0
"""What is known of devices: their profiles, runs of the conformance suite and the benchmark by release, and the matrix of both.

A run is one file (`run`), `capability/<release>/<device>-<date>-<who>.json.gz`. What runs prove is found out in a checkout, by
`ci/release`, and kept in matrix.json (`matrix`). See docs/dev/evidence.md.
"""
