# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's interface: its generations found and calibrated, and the adapters that give them this project's one meaning."""
