# SPDX-License-Identifier: Apache-2.0
"""`mla-portable doctor`.

command    the options, and what is printed
diagnosis  what is installed here, what works of it, what is wrong
instead    what serves an engine instead of the plugin, and what to do
reading    what an engine's metrics and its log say
running    an engine that runs, by its server's answers or by its log
tested     the versions of engines that were tested, and how
"""
