# SPDX-License-Identifier: Apache-2.0
"""What runs beside an engine, never inside it: conformance, benchmarks, the capability matrix, the command line."""
