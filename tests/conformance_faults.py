# SPDX-License-Identifier: Apache-2.0
"""A small honest implementation of every primitive, and the ways in which it can be told to be wrong.

Without faults it passes the suite; each fault is a mistake that kernels are known to make. It shares no code with the
reference or the oracle, and is meant to be read next to `tests/test_conformance.py`.
"""

from __future__ import annotations

import math

import torch

from mla_portable.contracts import DeviceFacts, Implementation, Primitive, Support

CPU = DeviceFacts(vendor="cpu", name="any CPU", arch="cpu", device_type="cpu")


def on_a_grid(x, step):
    """x as multiples of `step`: what fixed-point numbers with one exponent keep of it."""
    return torch.where(step > 0, (x / step).round() * step, x)


class Model:
    """Implementations `model.torch` of all primitives, wrong in the ways that `faults` name."""

    def __init__(self, *faults: str) -> None:
        self.faults = frozenset(faults)
        self.calls = 0

    def implementations(self, primitive: Primitive | None = None) -> tuple[Implementation, ...]:
        return tuple(self.implementation(p) for p in Primitive.all() if primitive in (None, p))

    def implementation(self, primitive: Primitive, **limits) -> Implementation:
        both = {"kv": ("bf16", "fp8_ds_mla"), "index": ("index_bf16", "index_fp8")}
        layouts = both.get(primitive.cache, ())
        if "index_layout" in primitive.facts:
            layouts = sum(both.values(), ())
        declared = {"device_types": ("cpu",), "kv_layouts": layouts, "context_parallel": str(primitive) == "indexer_select"}
        declared["seq_lens"] = str(primitive) == "convert_indices"
        support = Support(source="a test", **(declared | limits))
        return Implementation("model.torch", primitive, support, bind=lambda request: getattr(self, str(primitive)))

    def facts(self, device) -> DeviceFacts:
        return CPU

    # ------------------------------------------------------------------ the cache

    def _reached(self, cache, blocks, at):
        """Whether 32-bit numbers hold the places of rows `at` [n] of blocks [n], in elements of the cache."""
        place = blocks * cache.stride(0) + at * cache.stride(1)
        limit = {"32-bit addresses": 2**31, "unsigned 32-bit addresses": 2**32}
        return place < min([limit[each] for each in self.faults if each in limit], default=2**62)

    def _rows(self, kv, slots):
        """[n, 576] float32 of slots [n]."""
        if kv.dim() == 2:
            kv = kv.unsqueeze(0)
        blocks, block_size, width = kv.shape
        if "reads past the cache" in self.faults:
            kv = kv.as_strided((blocks + 1, block_size, width), kv.stride(), kv.storage_offset())
        if "ignores the block stride" in self.faults:
            kv = kv.as_strided(kv.shape, (block_size * width, width, 1), kv.storage_offset())
        if "takes two blocks for adjacent" in self.faults and blocks == 2:
            kv = kv.as_strided(kv.shape, (block_size * width, width, 1), kv.storage_offset())
        slots = torch.where(self._reached(kv, slots // block_size, slots % block_size), slots, 0)
        rows = kv[slots // block_size, slots % block_size]
        if rows.dtype == torch.bfloat16:
            return rows.float()
        scales = rows[:, 512:528].contiguous().view(torch.float32)
        latent = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float()
        if "scales rounded to bf16" in self.faults:  # as FlashMLA does on Hopper: not a fault, within the tolerance
            latent = (latent.bfloat16() * scales.bfloat16().repeat_interleave(128, dim=-1)).float()
        elif "scales cut to powers of two" in self.faults:
            latent = latent * torch.exp2(scales.log2().floor()).repeat_interleave(128, dim=-1)
        else:
            latent = latent * scales.repeat_interleave(128, dim=-1)
        return torch.cat([latent, rows[:, 528:].contiguous().view(torch.bfloat16).float()], dim=-1)

    def cache_write(self, kv_c, k_pe, kv_cache, slot_mapping, *, scale_format="pow2"):
        blocks, block_size, width = kv_cache.shape
        if "takes two blocks for adjacent" in self.faults and blocks == 2:
            kv_cache = kv_cache.as_strided(kv_cache.shape, (block_size * width, width, 1), kv_cache.storage_offset())
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= blocks * block_size or (slot < 0 and "writes skipped tokens" not in self.faults):
                continue
            if not self._reached(kv_cache, slot // block_size, slot % block_size):
                continue
            if width == 576:
                row = torch.cat([kv_c[token], k_pe[token]]).bfloat16()
            else:
                groups = kv_c[token].float().view(4, 128)
                share = groups.abs().amax(dim=-1).double() / 448
                codes, scales = self._encode(
                    groups, share.clamp(min=1e-4 if scale_format == "pow2" else 2.0**-126), scale_format
                )
                rope = k_pe[token].bfloat16()
                parts = (codes.view(512), scales, rope)
                row = torch.cat([part.view(torch.uint8) for part in parts])
            kv_cache[slot // block_size, slot % block_size] = row

    def _encode(self, groups, share, scale_format):
        """e4m3 codes of groups [n, 128], and their scales [n] float32; share [n] float64 is what amax / 448 counts as."""
        scales = share.float()
        if scale_format == "pow2":
            rounding = torch.floor if "floor instead of ceil" in self.faults else torch.ceil
            scales = torch.exp2(rounding(share.log2())).float()
        scaled = (groups / scales[:, None]).clamp(-448, 448)
        if "truncates" in self.faults:
            scaled = scaled - scaled.sign() * 2.0 ** (scaled.abs().clamp(min=2**-6).log2().floor() - 4)
        return scaled.to(torch.float8_e4m3fn), scales

    def gather_upconvert(self, kv_cache, block_table, seq_lens, workspace_starts, *, out):
        blocks, block_size, _ = kv_cache.shape
        for request, (length, start) in enumerate(zip(seq_lens.tolist(), workspace_starts.tolist(), strict=True)):
            if "writes whole blocks" in self.faults:
                length = -(-length // block_size) * block_size
            position = torch.arange(max(0, min(length, out.shape[0] - start)))
            block = block_table[request, position // block_size].long()
            valid = (block >= 0) & (block < blocks)
            rows = self._rows(kv_cache, torch.where(valid, block * block_size + position % block_size, 0)).bfloat16()
            if "skips invalid blocks" not in self.faults:
                rows[~valid] = 0
                valid[:] = True
            out[start : start + len(position)][valid] = rows[valid]
        return out

    # ------------------------------------------------------------------ indices

    def convert_indices(
        self, topk_indices, req_id_per_token, block_table, *, block_size, num_slots=None,
        prefill_request_ids=None, prefill_workspace_starts=None, seq_lens=None, compact=False, out=None,
    ):  # fmt: skip
        tokens, topk = topk_indices.shape
        indices, counts = out or (torch.empty(tokens, topk, dtype=torch.int32), torch.empty(tokens, dtype=torch.int32))
        position = topk_indices.long()
        if seq_lens is not None:
            lengths = seq_lens[req_id_per_token.long()][:, None] + ("reads one position too many" in self.faults)
            if "limits no workspace" in self.faults and prefill_request_ids is not None:
                lengths = torch.where(prefill_request_ids[:, None] >= 0, 2**31 - 1, lengths)
            position = position.masked_fill(position >= lengths, -1)
        column = position // block_size
        inside = (position >= 0) & (column < block_table.shape[1])
        block = block_table[req_id_per_token.long()[:, None], column.clamp(0, block_table.shape[1] - 1)].long()
        slot = block * block_size + position % block_size
        valid = inside & (slot < (2**31 if num_slots is None else num_slots)) & (slot < 2**31)
        if "believes the table" not in self.faults:
            valid &= block >= 0
        if prefill_request_ids is not None:
            to_workspace = (prefill_request_ids >= 0)[:, None]
            row = position + prefill_workspace_starts[prefill_request_ids.clamp(min=0).long()][:, None]
            fits = (position >= 0) & (row < 2**31)
            if "limits the workspace by the table" in self.faults:
                fits &= inside
            slot, valid = torch.where(to_workspace, row, slot), torch.where(to_workspace, fits, valid)
        indices.copy_(torch.where(valid, slot, -1))
        if compact:
            key = torch.where(valid, slot if "compacts out of order" in self.faults else torch.arange(topk), 2**31)
            indices.copy_(indices.gather(1, key.argsort(dim=1, stable=True)))
        counts.copy_(valid[:, :-1].sum(dim=1) if "counts without the last" in self.faults else valid.sum(dim=1))
        return indices, counts

    # ------------------------------------------------------------------ attention

    def sparse_decode(self, q, kv_cache, indices, *, lengths=None, schedule=None, out=None, lse_out=None, **rest):
        shape = q.shape[:2]
        lengths = None if lengths is None else lengths.reshape(-1)
        found, lse = self.sparse_prefill(q.flatten(0, 1), kv_cache, indices.flatten(0, 1), lengths=lengths, **rest)
        return self._give(found.unflatten(0, shape), out), self._give(lse.unflatten(0, shape), lse_out)

    def _give(self, result, out):
        if out is None or "allocates instead of out=" in self.faults:
            return result
        if "ignores the strides of out" in self.faults:
            out.as_strided(out.shape, result.stride(), out.storage_offset()).copy_(result)
            return out
        return out.copy_(result)

    def sparse_prefill(
        self, q, kv, indices, *, softmax_scale, lengths=None, attn_sink=None, out=None, lse_out=None
    ):  # fmt: skip
        self.calls += 1
        if "knows one softmax scale" in self.faults:
            softmax_scale = 192**-0.5
        tokens, heads, _ = q.shape
        result, lse = torch.empty(tokens, heads, 512, dtype=torch.bfloat16), torch.empty(tokens, heads)
        for token in range(tokens):
            limit = indices.shape[1] if lengths is None or "ignores lengths" in self.faults else max(0, int(lengths[token]))
            found, found_lse = self._row(q[token], kv, indices[token, :limit], softmax_scale, attn_sink)
            lse[token] = found_lse
            if "leaves empty rows" not in self.faults or found_lse.isfinite().all():
                result[token] = found
        if "changes its indices" in self.faults:
            indices.clamp_(min=-1)
        if "differs from run to run" in self.faults:
            lse *= 1 + 1e-5 * self.calls
        return self._give(result, out), self._give(lse, lse_out)

    def _row(self, q, kv, names, softmax_scale, attn_sink):
        """out [H, 512] and lse [H] of one token."""
        heads, faults = q.shape[0], self.faults
        if "pads heads wrongly" in faults and heads < 64:
            padded = torch.cat([q, q.new_zeros(64 - heads, 576)])
            sink = None if attn_sink is None else torch.cat([attn_sink, attn_sink.new_zeros(64 - heads)])
            out, lse = self._row(padded, kv, names, softmax_scale, sink)
            return out[-heads:], lse[-heads:]
        names = names.long()
        if "drops the last index" in faults:
            names = names[:-1]
        if "counts duplicates once" in faults:
            names = names.unique()
        slots = kv.shape[0] if kv.dim() == 2 else kv.shape[0] * kv.shape[1]
        valid = (names >= 0) & (names < slots)
        if "reads past the cache" in faults:
            valid = (names >= 0) & (names <= slots)
        if "reads -1 as slot 0" in faults:
            names, valid = torch.where(names == -1, 0, names), valid | (names == -1)
        rows = self._rows(kv, torch.where(valid, names, 0))
        if "leaks NaN" not in faults:
            rows[~valid] = 0
        q = q.float()
        if "one exponent for all heads" in faults:
            q = on_a_grid(q, q.abs().max() / 2**12)
        if "one exponent for all keys" in faults:
            rows[:, :512] = on_a_grid(rows[:, :512], rows[:, :512].abs().max() / 2**12)
        if "one exponent for the groups of a key" in faults:
            rows[:, :512] = on_a_grid(rows[:, :512], rows[:, :512].abs().amax(dim=1, keepdim=True) / 2**10)
        scores = softmax_scale * (q @ rows.T)
        scores[:, ~valid] = -math.inf
        empty = not valid.any()
        top = scores.amax(dim=-1, keepdim=True) if len(names) and not empty else torch.zeros(heads, 1)
        if "takes no maximum off" in faults:
            top = torch.zeros(heads, 1)
        weights = torch.exp(scores - top)
        total = weights.sum(dim=-1)
        lse = total.log() + top[:, 0]
        if "bf16 probabilities" in faults:  # as every tensor-core kernel does: not a fault, within the tolerance
            weights = weights.bfloat16().float()
        out = (weights @ rows[:, :512]) / total[:, None].clamp(min=1e-30)
        if attn_sink is not None and "ignores the sink" not in faults:
            sunk = torch.logaddexp(lse, attn_sink)
            factor = torch.exp(lse - sunk)
            if "takes an infinite sink for none" in faults:
                factor = torch.where(attn_sink.isfinite(), factor, 1.0)
            out = out * factor[:, None]
            lse = sunk if "counts the sink in lse" in faults else lse
        if empty:
            out, lse = torch.zeros_like(out), torch.full_like(lse, math.inf if "+inf on empty rows" in faults else -math.inf)
        return out, lse / math.log(2) if "lse in base 2" in faults else lse

    # ------------------------------------------------------------------ small ones

    @property
    def _rounds(self):
        return "divides by the exponential of a rounded lse" in self.faults

    def merge_states(self, outs, lses):
        if "knows no empty part of +inf" not in self.faults:
            lses = lses.masked_fill(lses == math.inf, -math.inf)
        top = lses.amax(dim=0).nan_to_num(neginf=0.0)
        weights = torch.exp(lses - (lses.logsumexp(dim=0).nan_to_num(neginf=0.0) if self._rounds else top))
        parts = outs.float()
        if "multiplies dead parts by 0" not in self.faults:
            parts = parts.masked_fill((lses == -math.inf)[..., None], 0.0)
        total = weights.sum(dim=0)
        out = (weights[..., None] * parts).sum(dim=0)
        if self._rounds:
            return out.to(outs.dtype), lses.logsumexp(dim=0)
        out = out / total.clamp(min=1e-30)[..., None]
        return out.to(outs.dtype), total.log() + top

    def quantize_per_tensor(self, x, dtype=torch.float8_e4m3fn):
        greatest = torch.finfo(dtype).max
        amax = x.float().abs().amax() if x.numel() else torch.tensor(0.0)
        scale = (amax if "divides by zero" in self.faults else amax.clamp(min=1e-10)) / greatest
        scaled = (x.float() / scale).clamp(-greatest, greatest)
        if "truncates" in self.faults:
            scaled = scaled * (1 - 2**-4)
        return scaled.to(dtype), scale

    def topk_select(self, logits, row_starts, row_ends, *, topk, out=None):
        column = torch.arange(logits.shape[1])
        found = torch.full((logits.shape[0], topk), -1, dtype=torch.int32) if out is None else out.fill_(-1)
        for row, (start, end) in enumerate(zip(row_starts.tolist(), row_ends.tolist(), strict=True)):
            start = start if "keeps negative starts" in self.faults else max(start, 0)
            inside = (column >= start) & (column < end)
            if "chooses what is absent" not in self.faults:
                inside &= logits[row] > -math.inf
            places = column[inside]
            order = logits[row, places].nan_to_num(nan=-math.inf).add(0.0)
            if "ranks -0.0 below 0.0" in self.faults:
                order = order - 1e-30 * (logits[row, places].eq(0) & logits[row, places].signbit())
            if "takes later ties" in self.faults:
                places, order = places.flip(0), order.flip(0)
            best = places[order.sort(descending=True, stable=True).indices[:topk]].sort().values
            if "loses count of ties" in self.faults and len(places) > 4096:  # of those before a tile without any
                equal = places[order == order.max()]
                best = equal[equal >= 8192][:topk] if len(equal) > 4096 else best
            offset = 0 if "counts from column 0" in self.faults else start
            found[row, : len(best)] = (best - offset).int()
        return found

    # ------------------------------------------------------------------ prompts

    def pack_selection(self, topk_indices, *, width, starts=None, out=None):
        found = torch.empty(len(topk_indices), -(-width // 32), dtype=torch.int32) if out is None else out
        for row, positions in enumerate(topk_indices.tolist()):
            start = 0 if starts is None or "ignores starts" in self.faults else int(starts[row])
            bits, end = [0] * (32 * found.shape[1]), 32 * found.shape[1] if "fills the last word" in self.faults else width
            for position in positions:
                offset = position - start
                if 0 <= offset < end and (position >= 0 or "wraps around" in self.faults):
                    bits[offset] = bits[offset] + 1 if "adds bits" in self.faults else 1
            for word in range(found.shape[1]):
                value = sum(bit << i for i, bit in enumerate(bits[32 * word : 32 * word + 32])) % 2**32
                found[row, word] = value - (value >> 31 << 32)
        return found

    def concat_mla_k(self, k_nope, k_rope, *, out=None):
        own = k_nope.shape[2]
        shape = *k_nope.shape[:2], own + k_rope.shape[1]
        found = torch.empty(shape, dtype=torch.bfloat16) if out is None or "ignores out" in self.faults else out
        shared = k_rope
        if "reads packed rows" in self.faults:
            shared = torch.as_strided(k_rope, k_rope.shape, (k_rope.shape[1], 1), k_rope.storage_offset() % 64)
        found[..., own:] = shared.unsqueeze(1)
        found[..., :own] = k_nope.float().bfloat16() * 1 if "computes with the columns" in self.faults else k_nope
        if "leaves the heads past 16" in self.faults:
            found[:, 16:] = 0
        return found

    def masked_prefill(
        self, q, k, v, query_start_loc, key_start_loc, *, softmax_scale, max_query_len, max_key_len, causal=True,
        selection=None, out=None, lse_out=None,
    ):  # fmt: skip
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=torch.bfloat16) if out is None else out
        lse_out = torch.empty(q.shape[:2]) if lse_out is None else lse_out
        for request in range(len(query_start_loc) - 1):
            (first, last), (begin, end) = (each[request : request + 2].tolist() for each in (query_start_loc, key_start_loc))
            after = 0 if "aligns queries to the first key" in self.faults else (end - begin) - (last - first)
            for token in range(first, last):
                seen = [j for j in range(end - begin) if not causal or j <= token - first + after]
                if selection is not None:
                    words = selection[token].tolist()
                    if "reads bits past the row" in self.faults:
                        words += [-1] * (1 + len(seen) // 32)
                    seen = [j for j in seen if j // 32 < len(words) and words[j // 32] >> j % 32 & 1]
                keys, values = (x[begin:end][seen].float() for x in (k, v))
                if "multiplies what is masked by 0" in self.faults and end > begin:
                    values = values + 0 * v[begin:end].float().sum(0)
                scores = softmax_scale * torch.einsum("hd,nhd->hn", q[token].float(), keys)
                weights = scores.exp() if "takes no maximum off" in self.faults else scores.softmax(dim=1)
                weights = weights / weights.sum(dim=1, keepdim=True)
                out[token] = torch.einsum("hn,nhd->hd", weights, values).to(out.dtype)
                lse = scores.logsumexp(dim=1)
                lse_out[token] = lse / math.log(2) if "lse in base 2" in self.faults else lse
                if not seen and "leaves empty rows" in self.faults:
                    out[token] = 1
        return out, lse_out

    # ------------------------------------------------------------------ the indexer

    def _pages(self, index_cache):
        blocks, size, width = index_cache.shape
        adjacent = blocks == 2 and "takes two blocks for adjacent" in self.faults
        if adjacent or "ignores the block stride" in self.faults:
            return index_cache.as_strided(index_cache.shape, (size * width, width, 1), index_cache.storage_offset())
        return index_cache

    def indexer_cache_write(self, k, index_cache, slot_mapping, *, scale_format="pow2"):
        blocks, size, width = index_cache.shape
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= blocks * size or (slot < 0 and "writes skipped tokens" not in self.faults):
                continue
            if not self._reached(index_cache, slot // size, slot % size):
                continue
            page, at = self._pages(index_cache)[slot // size].view(-1), slot % size
            if width == 128:
                page[at * 128 : (at + 1) * 128] = k[token].bfloat16()
                continue
            key = k[token : token + 1].float()
            least = 0.0 if "lets scales be 0" in self.faults else 1e-4
            codes, scale = self._encode(key, key.abs().amax(dim=-1).clamp(min=least).double() / 448, scale_format)
            row, behind = at * 128, size * 128 + at * 4
            if "writes scales beside rows" in self.faults:
                row, behind = at * 132, at * 132 + 128
            page[row : row + 128], page[behind : behind + 4] = codes[0].view(torch.uint8), scale.view(torch.uint8)

    def _index_keys(self, index_cache, blocks):
        """[n * block_size, 128] float32, of blocks [n]."""
        size, width = index_cache.shape[1:]
        blocks = torch.where(self._reached(index_cache, blocks, 0), blocks, 0)
        if "reads the block behind the cache" in self.faults:
            index_cache = index_cache.as_strided(
                (len(index_cache) + 1, size, width), index_cache.stride(), index_cache.storage_offset()
            )
        pages = self._pages(index_cache)[blocks]
        if width == 128:
            return pages.reshape(-1, 128).float()
        if "takes pages for rows of 132 bytes" in self.faults:
            codes, scales = pages[..., :128], pages[..., 128:]
        else:
            codes, scales = pages.view(-1, size * 132).split([size * 128, size * 4], dim=1)
        keys = codes.reshape(-1, 128).view(torch.float8_e4m3fn).float()
        scales = scales.reshape(-1, 4).view(torch.float32)
        return keys * (scales.roll(1, 0) if "takes the scale of the token before" in self.faults else scales)

    def _scores(self, q, weights, keys):
        """[n] of a token: q [H, 128], weights [H], keys [n, 128] float32."""
        dots = q.float() @ keys.T
        if "relu after the weights" in self.faults:
            return (weights[:, None] * dots).relu().sum(dim=0)
        if "makes 0 of NaN" in self.faults:
            dots = dots.nan_to_num(nan=0.0)
        scores = (weights[:, None] * (dots if "no relu" in self.faults else dots.relu())).sum(dim=0)
        return scores if "leaves NaN" in self.faults else scores.masked_fill(scores.isnan(), -math.inf)

    def _owned(self, length, size, rank, interleave):
        """Own tokens among the first `length` of a sequence."""
        rounds, rest = divmod(length, size * interleave)
        rest = max(rest - rank * interleave, 0)
        return rounds * interleave + (rest if "owns the rest of a round" in self.faults else min(rest, interleave))

    def _index_rows(
        self, q, weights, index_cache, query_start_loc, seq_lens, block_table, dcp_size=1, dcp_rank=0, interleave=1
    ):
        """Of each token that has a request: the token, which of the own positions that it sees have a key, their scores."""
        num_blocks, size, _ = index_cache.shape
        starts, known = query_start_loc.tolist(), {}
        if "counts tokens from the first start" in self.faults:
            starts = [start - starts[0] for start in starts]
        if "ends requests with the tokens" in self.faults:
            starts = [min(start, q.shape[0]) for start in starts]
        for token in range(q.shape[0]):
            owners = [r for r in range(len(seq_lens)) if starts[r] <= token < starts[r + 1]]
            if not owners and ("scores tokens of nobody" not in self.faults or not len(seq_lens)):
                continue
            request = owners[-1] if owners else len(seq_lens) - 1
            if request not in known:
                block = block_table[request].long()
                behind = 1 if "reads the block behind the cache" in self.faults else 0
                there = (block >= 0) & (block < num_blocks + behind)
                keys = self._index_keys(index_cache, torch.where(there, block, 0))
                known[request] = keys, (there | ("believes the table" in self.faults)).repeat_interleave(size)
            keys, there = known[request]
            reach = len(keys) * (1 if "reaches its own share" in self.faults else dcp_size)
            length = min(max(int(seq_lens[request]), 0), reach)
            seen = length - (starts[request + 1] - 1 - token)
            if "looks ahead" in self.faults:
                seen = length
            if "drops the last position" in self.faults:
                seen -= 1
            seen = self._owned(max(seen, 0), dcp_size, dcp_rank, interleave)
            yield token, there[:seen], self._scores(q[token], weights[token], keys[:seen])

    def indexer_logits(self, *arguments, out):
        if "leaves the unseen" not in self.faults:
            out.fill_(-math.inf)
        for token, there, scores in self._index_rows(*arguments):
            row = out[token, : len(scores)]
            row[there[: len(row)]] = scores[: len(row)][there[: len(row)]]
        return out

    def indexer_logits_ragged(self, q, weights, keys, key_scales, row_starts, row_ends, *, out):
        values, column = keys.float(), torch.arange(keys.shape[0])
        if key_scales is not None and "ignores the scales of keys" not in self.faults:
            values = values * key_scales[:, None]
        for token in range(q.shape[0]):
            inside = (column >= row_starts[token]) | ("ignores the start" in self.faults)
            inside &= (column < row_ends[token]) | ("ignores the end" in self.faults)
            if "shares the range of a tile" in self.faults:
                inside = (column >= row_starts.min()) & (column < row_ends.max())
            out[token] = torch.where(inside, self._scores(q[token], weights[token], values), -math.inf)
        return out

    def indexer_logits_blocks(self, q, q_scales, weights, keys, key_scales, starts, lengths, *, block_tokens, out):
        def numbers(codes, scales):
            size = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            if codes.dtype == torch.int8:
                byte = codes.view(torch.uint8).long()
                halves = [byte & 15, byte & 15] if "reads the lower half twice" in self.faults else [byte & 15, byte >> 4]
                values = torch.cat([size, -size])[torch.stack(halves, dim=-1).flatten(-2)]
            else:
                values = codes.float()
            byte = torch.stack([scales >> 8 * group & 255 for group in range(4)], dim=-1)
            byte = byte[..., :1].expand(*byte.shape) if "takes one scale for a row" in self.faults else byte
            factor = torch.where(byte == 255, math.nan, torch.exp2(byte.float() - 127))
            return (values.unflatten(-1, (4, -1)) * factor.unsqueeze(-1)).flatten(-2)

        flat, offset = numbers(keys, key_scales).flatten(0, 1), torch.arange(block_tokens)
        queries = numbers(q, q_scales)
        for token in range(q.shape[0]):
            slot = (starts[token].long()[:, None] + offset).flatten()
            there = (starts[token][:, None] >= 0) & (offset < lengths[token][:, None])
            if "ignores the lengths" in self.faults:
                there = (starts[token][:, None] >= 0).expand(there.shape)
            there = there.flatten() & (slot < len(flat))
            found = torch.full(slot.shape, -math.inf)
            rows = flat[slot[there]].nan_to_num(0) if "takes NaN for 0" in self.faults else flat[slot[there]]
            found[there] = self._scores(queries[token], weights[token].float(), rows)
            out[token] = found
        return out

    def indexer_select(self, *arguments, topk, dcp_size=1, dcp_rank=0, interleave=1, out=None, scores_out=None):
        found = torch.full((arguments[0].shape[0], topk), -1, dtype=torch.int32)
        if scores_out is not None:
            scores_out.fill_(-math.inf)
        for token, there, scores in self._index_rows(*arguments, dcp_size, dcp_rank, interleave):
            unscored = "scores no short row" in self.faults and len(scores) <= topk
            place = (there & ((scores > -math.inf) | unscored)).nonzero()[:, 0]
            order = scores[place].argsort(descending="takes the lowest" not in self.faults, stable=True)[:topk]
            best = place[order]
            if "leaves positions unsorted" not in self.faults:
                best = best.sort().values
            found[token, : len(best)] = ((best // interleave * dcp_size + dcp_rank) * interleave + best % interleave).int()
            if scores_out is not None:
                scores_out[token, : len(best)] = scores[best]
        if "leaves rows of nobody" in self.faults and out is not None:
            found = torch.where((found >= 0).any(dim=1, keepdim=True), found, out)
        return self._give(found, out)

    # ------------------------------------------------------------------ between the projections

    def _rms_norm(self, x, weight, eps):
        eps = 0 if "drops eps" in self.faults else eps
        square = x.float().square()
        mean = square.mean() if "norms all tokens alike" in self.faults else square.mean(dim=-1, keepdim=True)
        normed = x.float() / (mean + eps).sqrt()
        if "rounds before the weight" in self.faults:
            normed = normed.bfloat16().float()
        return (normed * weight.float()).bfloat16()

    def _turned(self, x, cos_sin, positions, style, first=0):
        """x [T, ..., n] float32 with the rotary numbers from `first` on rotated."""
        x, last = x.clone(), cos_sin.shape[0] - 1
        positions = positions if "takes positions as they are" in self.faults else positions.clamp(0, last)
        angles = cos_sin.float()[positions % cos_sin.shape[0]]
        half = angles.shape[1] // 2
        for token in range(x.shape[0]):
            for pair in range(half):
                one, other = (2 * pair, 2 * pair + 1) if style == "interleaved" else (pair, pair + half)
                a, b = x[token, ..., first + one].clone(), x[token, ..., first + other].clone()
                cos, sin = angles[token, pair], angles[token, half + pair]
                if "turns the other way" in self.faults:
                    sin = -sin
                x[token, ..., first + one], x[token, ..., first + other] = a * cos - b * sin, b * cos + a * sin
        return x

    def norm_rope_write(
        self, q_a, latent, index_key, positions, cos_sin, *, q_norm, kv_norm, index_norm=None, eps, index_eps=None, kv_cache,
        slot_mapping, index_cache=None, rope_style="interleaved", index_rope_style="neox", index_rope_at="first",
        scale_format="pow2", q_out, latent_out=None, k_rope_out=None,
    ):  # fmt: skip
        skipped = torch.zeros(positions.shape, dtype=torch.bool)
        if "norms written tokens alone" in self.faults and slot_mapping is not None:
            skipped = slot_mapping < 0
        if q_a is not None:
            if "reads packed rows" in self.faults:
                q_a = torch.as_strided(q_a, q_a.shape, (q_a.shape[1], 1), q_a.storage_offset())
            q_out[~skipped] = self._rms_norm(q_a, q_norm, eps)[~skipped]
        if latent is not None:
            normed, rope = self._rms_norm(latent[:, :512], kv_norm, eps), latent[:, 512:]
            style = "interleaved" if "knows one style" in self.faults else rope_style
            if "norms the rotary part" in self.faults:
                rope = self._rms_norm(rope, torch.ones(64), eps)
            rope = self._turned(rope.float(), cos_sin, positions, style).bfloat16()
            for out, values in ((latent_out, normed), (k_rope_out, rope)):
                if out is not None:
                    out[~skipped] = values[~skipped]
            if kv_cache is not None:
                self.cache_write(normed, rope, kv_cache, slot_mapping, scale_format=scale_format)
        if index_key is not None:
            weight, bias = index_norm
            key = index_key.float()
            mean = 0 if "norms keys without their mean" in self.faults else key.mean(dim=-1, keepdim=True)
            key = (key - mean) / ((key - mean).square().mean(dim=-1, keepdim=True) + (index_eps or eps)).sqrt()
            key = key * weight.float() + (0 if "drops the bias" in self.faults else bias.float())
            if "rounds a key once" not in self.faults:
                key = key.bfloat16().float()
            at = "first" if "knows one place" in self.faults else index_rope_at
            first = 0 if at == "first" else 128 - cos_sin.shape[1]
            key = self._turned(key, cos_sin, positions, index_rope_style, first).bfloat16()
            self.indexer_cache_write(key, index_cache, slot_mapping)

    def rope_quantize_queries(
        self, q, index_q, index_weights, positions, cos_sin, *, q_out, index_q_out=None, index_weights_out=None,
        index_scale=1.0, rope_style="interleaved", index_rope_style="neox", index_rope_at="first",
    ):  # fmt: skip
        width = cos_sin.shape[1]
        if q is not None:
            if "writes whole queries" in self.faults:
                q_out[..., : q_out.shape[2] - width] = 0
            q_out[..., -width:] = self._turned(q[..., -width:].float(), cos_sin, positions, rope_style).bfloat16()
        if index_q is not None:
            first = 0 if index_rope_at == "first" else 128 - width
            turned = self._turned(index_q.float(), cos_sin, positions, index_rope_style, first)
            if "codes numbers that are not rounded" not in self.faults:
                turned = turned.bfloat16().float()
            amax = turned.abs().amax(dim=(1, 2) if "one scale for all heads" in self.faults else -1)
            amax = amax[:, None].expand(turned.shape[:2]) if amax.dim() == 1 else amax
            flat = turned.flatten(0, 1)
            codes, scales = self._encode(flat, amax.flatten().clamp(min=1e-4).double() / 448, "pow2")
            index_q_out.copy_(codes.view(turned.shape))
            factor = 1 if "leaves the scale out of weights" in self.faults else scales.view(index_weights.shape)
            index_weights_out.copy_(index_weights.float() * factor * index_scale)
