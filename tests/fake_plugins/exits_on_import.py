# SPDX-License-Identifier: Apache-2.0
"""A module that thinks it is a program."""

raise SystemExit("no licence found")
