# SPDX-License-Identifier: Apache-2.0
"""What is known of devices: their profiles, runs of the conformance suite and the benchmark by release, and the matrix of both.

A run is one file (`run`), `capability/<release>/<device>-<date>-<who>.json.gz`. What a run proves follows from the ids of its
cases (`proofs`), held against the cases that the suite of its release has (`suite`). See docs/dev/evidence.md.
"""
