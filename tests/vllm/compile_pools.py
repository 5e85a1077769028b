# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of vLLM's kpool_compress.py, a path, for sm80: with pointers to bfloat16 for codes, and to e4m3.

A process of its own, without Triton's interpreter and without vLLM, whose Triton is none where there is no GPU.
Prints a line for each kernel and type: `cubin`, or why it does not compile.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine_kernels import load_file, tell_what_compiles

ROWS = 64
SIZES = {
    "BLOCK_R": 32,
    "PAGE_SIZE": ROWS,
    "BUF_NUMEL_PER_PAGE": ROWS * 132,
    "POOL_SIZE": 4,
    "RING": 4,
    "HEAD_DIM": 128,
    "BLOCK_D": 128,
    "S_OFFSET_NBYTES_IN_PAGE": ROWS * 128,
    "TAIL_BLOCK_ELEMS": 2 * 4 * 128,
    "KPOOL_HEAD": 4 * 128,
    "ROUND_SCALE": True,
    "MX_SCALE": False,
    "HAS_WRITE_MASK": True,
    "RETURN_COMPRESSED": True,
    "WRITE_CACHE": True,
}
POINTERS = {
    "q_ptr": "bf16",
    "sout_ptr": "fp32",
    "slot_k_ptr": "bf16",
    "slot_score_ptr": "bf16",
    "ape_ptr": "fp32",
    "loc_ptr": "i64",
    "write_mask_ptr": "i1",
    "compressed_scale_ptr": "fp32",
    "buf_fp32_ptr": "fp32",
    "tail_kv_ptr": "bf16",
    "tail_slot_mapping_ptr": "i32",
    "key_ptr": "bf16",
    "slot_mapping_ptr": "i32",
    "positions_ptr": "i32",
}
KERNELS = ("_fwht_quant_kernel", "_kpool_softmax_rotate_write_cache_kernel", "_kpool_decode_update_batched_kernel")


def load(path: str) -> ModuleType:
    """The module, with Triton itself and helpers of formats that are not compiled here for what it imports of vLLM."""
    found = {
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.deep_gemm": {"mqa_logits_use_mx_scales": lambda: False},
        "vllm.v1.attention.ops.common": {"pack_ue8m0_x4": None},
    }
    for name, names in found.items():
        for end in range(1, name.count(".") + 2):
            package = ".".join(name.split(".")[:end])
            sys.modules.setdefault(package, ModuleType(package)).__path__ = []
        vars(sys.modules[name]).update(names)
    return load_file("kpool_compress_of_vllm", path)


def main() -> None:
    module = load(sys.argv[1])
    for name in KERNELS:
        kernel = getattr(module, name)
        for stored in ("bf16", "fp8e4nv"):
            sizes = {each: SIZES[each] for each in kernel.arg_names if each in SIZES}
            tell_what_compiles(name, kernel, stored, POINTERS, sizes)


if __name__ == "__main__":
    main()
