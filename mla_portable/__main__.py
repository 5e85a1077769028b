# SPDX-License-Identifier: Apache-2.0
"""`python -m mla_portable`, the same as `mla-portable`."""

from mla_portable.cli import main

if __name__ == "__main__":
    main()
