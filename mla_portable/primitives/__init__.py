# SPDX-License-Identifier: Apache-2.0
"""The primitives, one module each: the Protocol, the argument check, the public function, the reference, the value.

Axes: T tokens, H query heads of this rank, K top-k width, N cache slots (or keys of each head), R requests, P prefill requests,
W workspace rows (or words of a bit mask), N logits of a row, B x S decode rows (S query tokens for each of B batch rows). A
slot is block * block_size + offset.

- An index that is negative, or out of range for the block table or the cache, is absent: `-1` on output, contributes
  nothing on input. Duplicates count each time.
- `lengths`, where given, says that only the first `lengths[t]` entries of row t are read (clamped to [0, K]).
- lse is the natural logarithm of the sum over valid entries of exp(softmax_scale * q.k), without the sink. A row with
  no valid entry has out = 0 and lse = -inf. `attn_sink` [H] float32 multiplies out by exp(lse) / (exp(lse) + exp(sink)).
- Whoever is bound for a Request may leave out an lse that it does not ask for, and take its promises (`clean_indices`,
  `clean_lengths`, `follows_in_order`) at their word. The public functions ask for the lse and promise nothing.
- The indexer's scores: what a token does not see has the score -inf, which a top-k never chooses.
- NaN in rows that no index names never reaches an output.
- Nothing has a backward: while torch records gradients, a tensor that requires one is an InvalidArgument.
- Addresses are 64-bit. Any block size, any stride between blocks, any K.
- With `out` (and `lse_out`, `schedule`) given: no allocation, no host synchronisation, safe to capture in a CUDA graph.

An implementation is a callable of exactly its Protocol: the public function without `kv_layout=` and `backend=`. Each public
function checks its arguments as far as they are known on the host, asks a cache for the bound implementation (the registry on
the first call of a kind), and hands over. What is called in every step binds once instead: `SparseMLAAttention`, or
`get_registry().bind(request)`. What all functions share:

- `kv_layout` names the layout of the cache, or of the rows of one, that a function reads or writes: one of
  `mla_portable.layouts.LAYOUTS`. None infers it from dtype and row width. Where several layouts have these, it has to be named.
- `backend` names a backend ("triton") or one of its variants ("triton.portable"); None lets `use(...)`, the environment and
  the costs decide. A forced backend never falls back.
- InvalidArgument: the arguments break the contract of the primitive. UnknownBackend: no plugin has that name.
  UnsupportedRequest: nothing here, or not the forced backend, can serve; `.decision` holds all reasons. All three come
  before anything runs; what a kernel or driver raises travels up unchanged.
- Graph-safe means: with the outputs given, a call allocates nothing and reads nothing back, so a CUDA graph may capture it
  once a call of the same kind has run outside. Implementations that are not are passed over during capture.
- A call runs on the device of its tensors. What `bind` returned is launched on the current device, which then must be that one.

A new primitive is a module here and a line below; the order is that of `Primitive.all()`.
"""

# isort: off
from mla_portable.dispatch import bind_part as bind_part
from mla_portable.primitives.cache_write import *
from mla_portable.primitives.convert_indices import *
from mla_portable.primitives.gather_upconvert import *
from mla_portable.primitives.sparse_decode import *
from mla_portable.primitives.sparse_prefill import *
from mla_portable.primitives.merge_states import *
from mla_portable.primitives.quantize_per_tensor import *
from mla_portable.primitives.indexer_cache_write import *
from mla_portable.primitives.indexer_logits import *
from mla_portable.primitives.indexer_logits_ragged import *
from mla_portable.primitives.indexer_logits_blocks import *
from mla_portable.primitives.topk_select import *
from mla_portable.primitives.indexer_select import *
from mla_portable.primitives.pack_selection import *
from mla_portable.primitives.concat_mla_k import *
from mla_portable.primitives.masked_prefill import *
from mla_portable.primitives.norm_rope_write import *
from mla_portable.primitives.rope_quantize_queries import *
from mla_portable.primitives._select_in_parts import SELECT_SCRATCH_BYTES as SELECT_SCRATCH_BYTES
from mla_portable.primitives._select_in_parts import SelectInParts as SelectInParts
