# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's attention layer: vLLM's own class beside the one that this plugin derives from it, on the same caches.

Each call is what a layer does between its projections: lists, decode or prompts. Both are compared with float64 first, and then
timed as replays of CUDA graphs with L2 flushed, in turns. What the first layer of a step makes for the others is made before:
vLLM's schedule, our list of requests.

    ci/gpu_vllm --v4-layer [--kinds window,selected,all] [--heads 8,16,32,64,128] [--seed S] [--budget SECONDS] [--json FILE]

With `--cpu`, small batches of ours alone are compared with float64. Exit status 1: a row of ours is wrong, or there was no time
for one; 2: wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from deepseek_v4 import RATIOS, Caches, Sizes, Step, make_caches, make_layer, make_step, prepared, stock_class
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.device import DeviceConfig
from vllm.forward_context import set_forward_context

from mla_portable.accelerator import accelerator
from mla_portable.bench.timing import captured, measure_in_turns
from mla_portable.engines.vllm import settings
from mla_portable.engines.vllm.v4 import choice
from mla_portable.engines.vllm.v4.kinds import keep_for_graph
from mla_portable.engines.vllm.v4.layer import HEADS

TARGETS: Final = {8: 1.5, 16: 1.5, 64: 1.0}
"""Heads -> stock's time of a decode in units of ours that is aimed at."""
_CHECKED: Final = 16
"""Tokens of a step that are compared with float64."""
_ABSOLUTE, _RELATIVE = 8e-3, 1e-2


@dataclass(frozen=True)
class Batch:
    """Requests of `query` new tokens each, with `length` tokens in all."""

    requests: int
    query: int
    length: int
    is_decode: bool

    def __str__(self) -> str:
        return f"{self.requests} x {self.query} of {self.length}"


BATCHES: Final = (
    *(Batch(requests, 1, 8192, True) for requests in (1, 16, 64, 128)),
    Batch(32, 2, 8192, True),
    Batch(16, 1, 131_072, True),
    Batch(1, 4096, 4096, False),
    Batch(4, 1024, 1024, False),
    Batch(1, 2048, 16_384, False),
)
SMALL: Final = (Batch(3, 1, 300, True), Batch(2, 9, 270, False))


@dataclass(frozen=True)
class Row:
    """Microseconds and greatest errors of both, NaN where vLLM's own was not run; `right`: ours is within tolerance."""

    kind: str
    heads: int
    batch: str
    is_decode: bool
    stock_us: float
    ours_us: float
    stock_error: float
    ours_error: float
    right: bool

    def __str__(self) -> str:
        ratio, target = self.stock_us / self.ours_us, TARGETS.get(self.heads) if self.is_decode else None
        aim = "" if target is None else f" (target {target:g}: {'met' if ratio >= target else 'missed'})"
        times = f"{self.stock_us:8.1f} {self.ours_us:8.1f} us {ratio:5.2f} x{aim}"
        errors = f"errors {self.stock_error:.1e} {self.ours_error:.1e}{'' if self.right else '  WRONG'}"
        return f"{self.kind:9} {self.heads:4} heads  {self.batch:18} {times:44} {errors}"


def compare(caches: Caches, heads: int, batch: Batch, config: Any, *, stock: bool, seed: int) -> Row:
    """One row. seed: of the step; that of the caches is theirs. stock: run vLLM's own class, too, and time both."""
    device = caches.sizes.device
    decodes = batch.requests if batch.is_decode else 0
    lens = [batch.query] * batch.requests, [batch.length] * batch.requests
    step = make_step(caches, heads, *lens, num_decodes=decodes, schedules=stock, seed=seed)
    sample = torch.linspace(0, len(step.q) - 1, min(_CHECKED, len(step.q))).long().tolist()
    errors: list[float] = []
    calls: list[Callable[[], object]] = []
    right = False
    for cls in (*([stock_class()] if stock else []), choice.derived(stock_class())):
        call, output, sink = call_of(make_layer(cls, caches, heads), step, config)
        call()
        wanted = torch.stack([step.wanted(caches, token, sink) for token in sample])
        gap = (output[sample, :heads].double() - wanted).abs()
        right = bool((gap <= _ABSOLUTE + _RELATIVE * wanted.abs()).all())
        errors.append(gap.max().item())
        calls.append(call)
    us = [float("nan")] * 2
    if stock and right:
        replays = [captured(call, device) for call in calls]
        timed = measure_in_turns(replays, device=device, repeat=30, max_seconds=0.6)
        us = [each.median_ms * 1e3 for each in timed]
    return Row(caches.kind, heads, str(batch), batch.is_decode, *us, *([float("nan")] * (2 - len(errors))), *errors, right)


def call_of(layer: Any, step: Step, config: Any) -> tuple[Callable[[], object], Tensor, Tensor]:
    """The layer's call for a step, what it writes, and the sinks of its heads."""
    q, output = prepared(layer, step)
    positions = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    is_capturing = accelerator(q.device).is_capturing

    def call() -> None:
        if is_capturing():
            for metadata in step.metadata.values():
                keep_for_graph(metadata)
        with set_forward_context(step.metadata, config):
            layer.forward_mqa(q, q[:, 0], positions, output)

    return call, output, layer.attn_sink[: step.q.shape[1]]


def sizes_of(batches: Sequence[Batch], device: torch.device, *, small: bool) -> Sizes:
    tokens = max(batch.requests * batch.query for batch in batches)
    length = max(batch.length for batch in batches)
    topk, blocks = (24, 40) if small else (512, 4096)
    return Sizes(topk, topk, tokens, length, blocks, device)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ci/gpu_vllm --v4-layer", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(RATIOS), help="comma-separated")
    parser.add_argument("--heads", default="8,16,32,64,128", help="comma-separated")
    parser.add_argument("--budget", type=float, default=480, help="seconds; rows that do not fit are named")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--cpu", action="store_true", help="small batches of ours alone, against float64")
    parser.add_argument("--seed", type=int, default=1, help="of caches, queries, block tables and selections")
    args, begin = parser.parse_args(words), time.monotonic()
    chosen_kinds, chosen_heads = args.kinds.split(","), args.heads.split(",")
    if unknown := [kind for kind in chosen_kinds if kind not in RATIOS]:
        parser.error(f"--kinds {','.join(unknown)}: expected some of {', '.join(RATIOS)}")
    if wrong_heads := [heads for heads in chosen_heads if not heads.isdigit() or not 1 <= int(heads) <= HEADS[-1]]:
        parser.error(f"--heads {','.join(wrong_heads)}: expected numbers from 1 to {HEADS[-1]}")
    if not args.cpu and not torch.cuda.is_available():
        parser.error("needs a GPU; --cpu compares small batches of ours with float64")
    device = torch.device("cpu" if args.cpu else "cuda")
    batches = SMALL if args.cpu else BATCHES
    os.environ.setdefault(settings.ENV_ROUTE, "direct")  # prompts in place with any number of heads
    if not args.cpu:
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(device)
    config = VllmConfig(device_config=DeviceConfig(device=device.type))
    rows, left = list[Row](), list[str]()
    for kind in chosen_kinds:
        caches = make_caches(kind, sizes_of(batches, device, small=args.cpu), seed=args.seed)
        for heads in map(int, chosen_heads):
            for batch in batches:
                if time.monotonic() - begin > args.budget:
                    left.append(f"{kind} {heads} {batch}")
                    continue
                rows.append(compare(caches, heads, batch, config, stock=not args.cpu, seed=args.seed))
                print(rows[-1], flush=True)
    wrong = sum(not row.right for row in rows)
    if args.json:
        values = [{name: None if value != value else value for name, value in asdict(row).items()} for row in rows]
        args.json.write_text(json.dumps(values, indent=1))  # no NaN, which JSON has not
    print(f"{len(rows)} rows, {wrong} wrong; no time for: {', '.join(left) or 'none'}")
    return int(bool(wrong or left))


if __name__ == "__main__":
    sys.exit(main())
