# SPDX-License-Identifier: Apache-2.0
"""Times: the one answer to "how long does it take here", from records of medians on named devices.

records         one median, and where it comes from
files           the documents that hold them: plugins ship some, users make their own
adding          adding to a file: whole, one writer at a time
rows            what a call of any size takes, from the sizes that were timed
measured        what implementations cost beside one another
configurations  with what a kernel is bound that was tuned
prefill         whether a chunk of a prefill is gathered first
selection       whether an engine's kernels or ours choose a decode's keys
prompts         whether a step's prompts are attended to over latent rows or over keys of each head
"""
