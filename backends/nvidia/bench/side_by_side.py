# SPDX-License-Identifier: Apache-2.0
"""This project's bound calls side by side with direct calls of the same FlashMLA, on one GPU.

    python backends/nvidia/bench/side_by_side.py --library /path/to/_flashmla_C.abi3.so --out side_by_side.json

Parts, chosen by --parts:
    plans     the closed-form schedule against the provider's own, in every word that the kernel reads, on the golden shapes
    decode    h 64 and 128, b 1, 16 and 128, topk 2048; h 16 with its padding copy shown apart. "ours" is bound for any indices
              and tells the lse; "engine" is bound as a layer in an engine binds it, for clean indices and without lse
    prefill   S 1024 and 4096, topk 2048, h 64 and 128; 8, 16 and 32 heads padded and, where the build has them, native
    scratch   a mixed batch of 32 768 tokens of 16 heads: peak memory of the call beyond its arguments
    conform   the conformance suite (--level, --jobs) with this provider; the plugin must be installed

"Direct" is the provider's operator with arguments that already are as it wants them (heads, indices, plan, out). Idle time of
the GPU is read from the profiler's timeline: the span from the first kernel of a run of calls to the end of the last, less
what kernels cover, for each call. "queued" runs are launched behind a long kernel, so that the host is ahead; "eager" runs
are not; "graph" runs replay a CUDA graph of all calls.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Primitive, Request, ScheduleLimits
from mla_portable.layouts import FP8_DS_MLA, HEAD_SIZE, KV_LORA_RANK
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.problems.sparse_decode import sparse_decode
from mla_portable.registry import get_registry
from mla_portable.tools.bench.kernel_machine import driver_version
from mla_portable.tools.bench.timing import captured, measure
from mla_portable.tools.conformance import run_suite
from mla_portable_nvidia.attention import bind_sparse_decode, bind_sparse_prefill
from mla_portable_nvidia.discovery import LIBRARY_VARIABLE, PROVIDER_VARIABLE, find_kernel
from mla_portable_nvidia.sparse_decode import rows_per_call
from mla_portable_nvidia.tile_schedules import Tiles, TileSchedule, TileSchedules, num_sm_parts, tile_schedule

TOPK: Final = 2048
SCALE: Final = 192**-0.5
BLOCK: Final = 64
CALLS: Final = 40
"""Calls of one profile."""
ROUNDS: Final = 9
"""Profiles of eager calls of every way, in turns; their median counts, for what the host does in between varies."""
SLEEP_CYCLES: Final = 60_000_000
"""About 30 ms at 2 GHz: long enough for the host to launch all calls of a profile behind it."""
GOLDEN: Final = {
    (64, 1): (1, 2, 4, 8, 16, 32, 64, 74, 128, 132, 148, 256),
    (128, 1): (1, 8, 32, 64, 74, 128),
    (64, 2): (1, 8, 32, 64, 74, 128),
    (128, 2): (2, 64, 74, 128),
}
"""(heads, tokens a row) -> batch rows."""

USED_WORDS: Final = ("begin_req", "end_req", "begin_block", "end_block", "begin_split", "first_is_split", "last_is_split")
"""Of a part's eight words, those that the kernel reads; it reads the first alone where that says there is nothing to do."""

Row = dict[str, Any]


def plan_difference(ours: Tiles, metadata: list[list[int]], num_splits: list[int]) -> str | None:
    """Where the provider's plan first says something else to the kernel than ours; None where it does not.

    Padding, and what is said of parts that begin past the last row, is not read, and differs between builds.
    """
    if len(metadata) != len(ours.metadata):
        return f"parts: {len(ours.metadata)} ours, {len(metadata)} theirs"
    rows = len(ours.num_splits) - 1
    for part, (mine, theirs) in enumerate(zip(ours.metadata.tolist(), metadata, strict=True)):
        if mine[0] >= rows and theirs[0] >= rows:
            continue
        for word, name in enumerate(USED_WORDS):
            if mine[word] != theirs[word]:
                return f"part {part}, word {word} ({name}): {mine[word]} ours, {theirs[word]} theirs"
    if ours.num_splits.tolist() != num_splits:
        pairs = zip(ours.num_splits.tolist(), num_splits, strict=False)
        return next(
            (f"num_splits[{i}]: {a} ours, {b} theirs" for i, (a, b) in enumerate(pairs) if a != b),
            f"num_splits: {rows + 1} entries ours, {len(num_splits)} theirs",
        )
    return None


def idle_time(intervals: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(busy, idle) of a timeline: what the intervals (start, end) cover, and the gaps between them; in their unit."""
    busy = idle = 0.0
    reached: float | None = None
    for start, end in sorted(intervals):
        if reached is None or start >= reached:
            idle += 0.0 if reached is None else start - reached
            busy += end - start
            reached = end
        elif end > reached:
            busy += end - reached
            reached = end
    return busy, idle


def timeline(run: Callable[[], object], *, leave_out: str = "") -> list[tuple[str, float, float]]:
    """(name, start, end) in microseconds of everything that ran on the GPU; kernels named like `leave_out` are left out."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    # of the GPU alone: to record the host's side as well slows down what is measured
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not found:
        raise RuntimeError("the profiler saw nothing run on the GPU: another one may hold it")
    return [entry for entry in found if not leave_out or leave_out not in entry[0]]


def many(call: Callable[[], object]) -> None:
    """Call it as often as a profile wants."""
    for _ in range(CALLS):
        call()


def figures(call: Callable[[], object], device: torch.device) -> Row:
    """Times and idle times of one way to call, in microseconds per call, and the kernels that it launches."""
    for _ in range(3):
        call()

    def queued() -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        many(call)

    replay = captured(call, device, calls=CALLS)
    replay()
    row: Row = {"cold_l2_us": 1e3 * measure(call, device=device, repeat=50, warmup=3).median_ms}
    for name, run in (("queued", queued), ("graph", replay)):
        entries = timeline(run, leave_out="spin_kernel")
        busy, idle = idle_time((start, end) for _, start, end in entries)
        row[f"{name}_busy_us"], row[f"{name}_idle_us"] = busy / CALLS, idle / CALLS
        if name == "queued":
            row["kernels"] = {name: count / CALLS for name, count in Counter(name for name, *_ in entries).most_common()}
    return row


def compare(device: torch.device, **ways: Callable[[], object]) -> Row:
    """All ways, and what each adds of idle time to "direct"."""
    rows = {name: figures(call, device) for name, call in ways.items()}
    eager: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            entries = timeline(partial(many, call))
            eager[name].append(idle_time((start, end) for _, start, end in entries))
    for name, seen in eager.items():
        busy, idle = (median(times) / CALLS for times in zip(*seen, strict=True))
        rows[name] |= {"eager_busy_us": busy, "eager_idle_us": idle}
    for name in rows:
        if name != "direct":
            for how in ("eager", "queued", "graph"):
                rows[name][f"{how}_idle_added_us"] = rows[name][f"{how}_idle_us"] - rows["direct"][f"{how}_idle_us"]
    return rows


class Bench:
    """The machine, the provider and the inputs that all parts share."""

    def __init__(self, level: str, jobs: int) -> None:
        self.device, self.level, self.jobs = torch.device("cuda", torch.cuda.current_device()), level, jobs
        self.facts: DeviceFacts = get_registry().facts(self.device)
        self.decode = find_kernel(SPARSE_DECODE, self.facts)
        self.prefill = find_kernel(SPARSE_PREFILL, self.facts)
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        """bf16 on the device; long ones repeat 2**22 values."""
        count = int(torch.tensor(shape).prod())
        values = torch.randn(min(count, 1 << 22), generator=self.generator).bfloat16().to(self.device)
        return values.repeat(-(-count // len(values)))[:count].view(shape)

    def cache(self, num_blocks: int) -> Tensor:
        tokens = torch.randn(num_blocks * BLOCK, HEAD_SIZE, generator=self.generator)
        return FP8_DS_MLA.pack(tokens[:, :KV_LORA_RANK], tokens[:, KV_LORA_RANK:]).view(num_blocks, BLOCK, -1).to(self.device)

    def indices(self, rows: int, limit: int) -> Tensor:
        """[rows, 2048] int32, distinct within a block of 64 rows at most."""
        picks = torch.stack([torch.randperm(limit, generator=self.generator)[:TOPK] for _ in range(min(rows, 64))])
        return picks.repeat(-(-rows // len(picks)), 1)[:rows].to(torch.int32).to(self.device)

    def schedule(self, rows: int, heads: int) -> TileSchedule:
        facts = self.facts
        limits = ScheduleLimits(torch.device(self.device), heads, TOPK, rows, num_sms=facts.num_sms, arch=facts.arch)
        return TileSchedules(limits).get(rows, 1)

    def request(self, primitive: Primitive, heads: int, **others: Any) -> Request:
        return Request(primitive, self.facts, num_heads=heads, topk=TOPK, **({"lse": True} | others))

    def bound_decode(self, heads: int, **others: Any) -> Callable[..., Any]:
        cache: Row = {"kv_layout": "fp8_ds_mla", "block_size": BLOCK, "query_len": 1, "scale_format": "pow2"}
        return bind_sparse_decode(self.request(SPARSE_DECODE, heads, **cache, **others))

    # ----------------------------------------------------------------------------------------------------- the parts

    def plans(self) -> Iterator[Row]:
        """Every golden shape; nothing where the provider's plans have another layout."""
        if not self.decode.traits.takes_plan:
            yield {"takes_plan": False, "note": "this provider makes its own plans, once for each shape"}
            return
        cache = self.cache(TOPK // BLOCK).unsqueeze(2)
        for (heads, query_len), batches in GOLDEN.items():
            parts = num_sm_parts(self.facts.arch, num_sms=self.facts.num_sms, query_len=query_len, num_heads=heads)
            for batch in batches:
                q = torch.zeros((batch, query_len, heads, HEAD_SIZE), dtype=torch.bfloat16, device=self.device)
                slots = torch.zeros((batch, query_len, TOPK), dtype=torch.int32, device=self.device)
                metadata, num_splits = self.decode.kernel.plan(q, cache, slots)
                ours = tile_schedule([TOPK] * batch, num_sm_parts=parts)
                difference = plan_difference(ours, metadata.tolist(), num_splits.tolist())
                row: Row = {"heads": heads, "query_len": query_len, "batch": batch, "parts": len(metadata)}
                yield row | {"equal": difference is None, "difference": difference}

    def decode_rows(self) -> Iterator[Row]:
        """Ours against direct, then 16 heads with the copy into 64 apart."""
        cache = self.cache(1024)
        limit = 1024 * BLOCK
        for heads, batch in [(h, b) for h in (64, 128, 16) for b in (1, 16, 128)]:
            kernel_heads = max(heads, 64)
            q, slots = self.normal(batch, 1, heads, HEAD_SIZE), self.indices(batch, limit).unsqueeze(1)
            schedule = self.schedule(batch, kernel_heads)
            plan = (schedule.tile_scheduler_metadata, schedule.num_splits)
            out = torch.empty((batch, 1, heads, KV_LORA_RANK), dtype=torch.bfloat16, device=self.device)
            lse = torch.empty((batch, 1, heads), device=self.device)
            general, engine = self.bound_decode(heads), self.bound_decode(heads, lse=False, clean_indices=True)
            padded = torch.zeros((batch, 1, kernel_heads, HEAD_SIZE), dtype=torch.bfloat16, device=self.device)
            padded[:, :, :heads] = q
            whole = torch.empty((batch, 1, kernel_heads, KV_LORA_RANK), dtype=torch.bfloat16, device=self.device)
            kernel, kv = self.decode.kernel, cache.unsqueeze(2)
            options = {"plan": plan} if self.decode.traits.takes_plan else {}
            if kernel.takes_out:
                options["out"] = whole
            given: Row = {"softmax_scale": SCALE, "schedule": schedule, "out": out, "lse_out": lse}
            row = compare(
                self.device,
                direct=lambda kernel=kernel, q=padded, kv=kv, slots=slots, o=options: kernel(q, kv, slots, SCALE, **o),
                ours=lambda bound=general, q=q, slots=slots, given=given: bound(q, cache, slots, **given),
                engine=lambda bound=engine, q=q, slots=slots, given=given: bound(q, cache, slots, **given),
            )
            if heads < 64:
                row["padding_copy"] = figures(lambda p=padded, q=q, h=heads: p[:, :, :h].copy_(q), self.device)
            yield {"heads": heads, "batch": batch, "topk": TOPK} | row

    def prefill_rows(self) -> Iterator[Row]:
        """Ours against direct; small head counts also against the build's own path for them."""
        for tokens, width in ((1024, 8192), (4096, 65536)):
            kv, indices = self.normal(width, HEAD_SIZE), self.indices(tokens, width)
            for heads in (64, 128, 8, 16, 32):
                q = self.normal(tokens, heads, HEAD_SIZE)
                out = torch.empty((tokens, heads, KV_LORA_RANK), dtype=torch.bfloat16, device=self.device)
                lse = torch.empty((tokens, heads), device=self.device)
                bound = bind_sparse_prefill(self.request(SPARSE_PREFILL, heads, kv_layout="bf16"))

                def ours(
                    bound: Any = bound, q: Tensor = q, kv: Tensor = kv, i: Tensor = indices, o: Tensor = out, e: Tensor = lse
                ) -> None:
                    bound(q, kv, i, softmax_scale=SCALE, out=o, lse_out=e)

                row: Row = {"heads": heads, "tokens": tokens, "workspace": width, "topk": TOPK}
                if heads in self.prefill.traits.heads:
                    kernel = self.prefill.kernel
                    options = {"out": torch.empty_like(out)} if kernel.takes_out else {}

                    def direct(k: Any = kernel, q: Tensor = q, kv: Tensor = kv, i: Tensor = indices, o: Any = options) -> None:
                        k(q, kv.unsqueeze(1), i.unsqueeze(1), SCALE, **o)

                    yield row | compare(self.device, direct=direct, ours=ours)
                else:
                    yield row | {"ours": figures(ours, self.device), "direct": "this build has no path for so few heads"}

    def scratch(self) -> Iterator[Row]:
        """32 768 tokens of 16 heads, as the planner's chunks and without a schedule."""
        tokens, heads = 32_768, 16
        cache = self.cache(1024)
        q, slots = self.normal(tokens, 1, heads, HEAD_SIZE), self.indices(tokens, 1024 * BLOCK).unsqueeze(1)
        out = torch.empty((tokens, 1, heads, KV_LORA_RANK), dtype=torch.bfloat16, device=self.device)
        lse = torch.empty((tokens, 1, heads), device=self.device)
        bound = self.bound_decode(heads)
        judged = torch.tensor([0, 1, 500, tokens // 2, tokens - 1])
        want, _ = sparse_decode(q[judged].cpu(), cache.cpu(), slots[judged].cpu(), softmax_scale=SCALE)
        for name, schedule in (("planned", self.schedule(tokens, 64)), ("unplanned", None)):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            bound(q, cache, slots, softmax_scale=SCALE, schedule=schedule, out=out, lse_out=lse)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            timing = measure(
                lambda s=schedule: bound(q, cache, slots, softmax_scale=SCALE, schedule=s, out=out, lse_out=lse),
                device=self.device,
                repeat=5,
            )
            yield {
                "call": name,
                "tokens": tokens,
                "heads": heads,
                "scratch_mib": peak / (1 << 20),
                "rows_per_call": rows_per_call(self.facts.arch, num_sms=self.facts.num_sms, query_len=1, heads=64),
                "median_ms": timing.median_ms,
                "largest_error": (out[judged].cpu().double() - want).abs().max().item(),
                "largest_value": want.abs().max().item(),
            }

    def conform(self) -> Iterator[Row]:
        """The suite, with this provider."""
        report = run_suite(get_registry(), "nvidia", device=self.device, level=self.level, jobs=self.jobs)
        status = Counter(result.status for result in report.results)
        wrong = [f"{r.case.id}: {r.message}" for r in report.results if r.status != "passed"]
        left_out = {f"{u.implementation} {u.primitive}": [str(reason) for reason in u.reasons] for u in report.unavailable}
        yield {"level": self.level, "ok": report.ok, "status": dict(status), "wrong": wrong, "unavailable": left_out}


def main() -> int:
    """Run the parts that were asked for; exit 1 when there is no provider, or the suite or a plan fails."""
    parts = {"plans": Bench.plans, "decode": Bench.decode_rows, "prefill": Bench.prefill_rows}
    parts |= {"scratch": Bench.scratch, "conform": Bench.conform}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help=f"FlashMLA's library of operators, as {LIBRARY_VARIABLE}")
    parser.add_argument("--provider", help=f"the only provider to ask, as {PROVIDER_VARIABLE}")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--level", default="quick", help="of the conformance suite")
    parser.add_argument("--jobs", type=int, default=1, help="processes of the conformance suite")
    parser.add_argument("--out", type=Path, default=Path("side_by_side.json"))
    arguments = parser.parse_args()
    for variable, value in ((LIBRARY_VARIABLE, arguments.library), (PROVIDER_VARIABLE, arguments.provider)):
        if value:
            os.environ[variable] = value
    if not torch.cuda.is_available():
        sys.stderr.write("side_by_side: needs a CUDA GPU\n")
        return 1
    bench = Bench(arguments.level, arguments.jobs)
    if bench.decode.provider is None or bench.prefill.provider is None:
        sys.stderr.write("side_by_side: no provider\n")
        for reason in (*bench.decode.reasons, *bench.prefill.reasons):
            sys.stderr.write(f"  {reason}\n")
        return 1
    record: Row = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "facts": asdict(bench.facts),
        "driver": driver_version(bench.device),
        "decode": {"provider": bench.decode.provider, "traits": asdict(bench.decode.traits)},
        "prefill": {"provider": bench.prefill.provider, "traits": asdict(bench.prefill.traits)},
        "results": {},
    }
    ok = True
    with torch.no_grad():
        for name in arguments.parts:
            rows = record["results"][name] = []
            for row in parts[name](bench):
                rows.append(row)
                ok = ok and row.get("ok", True) and row.get("equal", True)
                shown = {key: value for key, value in row.items() if key not in ("kernels", "wrong")}
                sys.stdout.write(f"{name}: {json.dumps(shown, default=str)}\n")
                sys.stdout.flush()
                arguments.out.write_text(json.dumps(record, indent=1, default=str))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
