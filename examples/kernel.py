# SPDX-License-Identifier: Apache-2.0
"""Another kernel for a primitive that exists: `merge_states` in Triton, a program for each row. Explained by
docs/adding-a-kernel.md. Runs on a CPU too, in Triton's interpreter, in some seconds; `quick` as argument runs more cases."""

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
import triton
import triton.language as tl
from torch import Tensor

from mla_portable.choose import Registry
from mla_portable.contracts import Implementation, Registrar, Request, Support, hookimpl
from mla_portable.judge.conformance import run_suite
from mla_portable.primitives import MERGE_STATES, MergeStates

SUPPORT = Support(
    source="examples/kernel.py",
    device_types=("cuda", "cpu"),
    probes_graph=True,
    needs_bf16=False,
)


@triton.jit
def _merge_kernel(outs_ptr, lses_ptr, out_ptr, lse_ptr, num_rows, num_parts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    in_row = columns < WIDTH
    top = float("-inf")
    for part in range(num_parts):
        lse = tl.load(lses_ptr + part * num_rows + row)
        top = tl.maximum(top, tl.where(lse == float("inf"), float("-inf"), lse))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    values = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        lse = tl.load(lses_ptr + part * num_rows + row)
        if tl.abs(lse) < float("inf"):  # what an empty part holds may be NaN, so it is not read
            weight = tl.exp(lse - top)
            own = tl.load(outs_ptr + (part * num_rows + row) * WIDTH + columns, mask=in_row, other=0.0)  # [BLOCK]
            values += own.to(tl.float32) * weight
            total += weight
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    tl.store(out_ptr + row * WIDTH + columns, values / total, mask=in_row)
    tl.store(lse_ptr + row, tl.where(empty, float("-inf"), top + tl.log(total)))


def bind(request: Request[MergeStates]) -> MergeStates:
    """The callable for one kind of request; what its calls share is chosen here."""

    def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        parts, width = outs.shape[0], outs.shape[-1]
        out = torch.empty(outs.shape[1:], dtype=torch.float32, device=outs.device)
        lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
        rows = lse.numel()
        if rows:
            block = triton.next_power_of_2(width)
            _merge_kernel[(rows,)](outs.contiguous(), lses.contiguous(), out, lse, rows, parts, width, block)
        return out.to(outs.dtype), lse

    return merge_states


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """The plugin: what an installed one registers through its entry point."""
    registrar.add(Implementation("mine.rows", MERGE_STATES, SUPPORT, bind, preference=20))


def main(level: str = "smoke") -> int:
    """Choose it, and hold it against the float64 oracle. Returns 0 where every case passes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    registry = Registry(plugins=[("mine", sys.modules[__name__])], environ={})
    print(registry.decide(Request(MERGE_STATES, registry.facts(device))).text())
    report = run_suite(registry, "mine", device=device, level=level)
    for result in report.results:
        print(result.status, result.case.id, result.message)
    print(f"{report.passed} of {len(report.results)} cases passed")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
