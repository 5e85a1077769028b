# SPDX-License-Identifier: Apache-2.0
"""The vendor's library is broken, and the plugin imports it too early."""

raise ImportError("libacme.so.4: cannot open shared object file")
