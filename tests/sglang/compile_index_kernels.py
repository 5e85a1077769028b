# SPDX-License-Identifier: Apache-2.0
"""Compile kernels of SGLang's indexer for sm80: with pointers to e4m3, and with pointers to what takes its place.

    compile_index_kernels.py FILE:KERNEL ...

A process of its own, without Triton's interpreter. Of SGLang only the files are loaded, without what they import of it.
Prints a line for each kernel and type: `cubin`, or why it does not compile.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine_kernels import load_file, tell_what_compiles

ROWS, POOL = 64, 4
SIZES = {
    "group_size": 128,
    "round_scale": True,
    "BLOCK_M": 32,
    "BLOCK_N": 128,
    "BLOCK_D": 128,
    "HEAD_DIM": 128,
    "NUM_K_ELEMS_PER_TOKEN": 128,
    "PAGE_SIZE": ROWS,
    "INDEX_PAGE_SIZE": ROWS,
    "BUF_NUMEL_PER_PAGE": ROWS * 132,
    "S_OFFSET_NBYTES_IN_PAGE": ROWS * 128,
    "PRESHUFFLE_TILE": 0,
    "POOL_SIZE": POOL,
    "TAIL_SIZE": POOL + 8,
    "REQ_POOL_SIZE": 256,
    "BLOCK_TABLE_COLS": 1024,
    "N": 6,
    "MAX_CLOSED_POOLS": 2,
    "ROUND_SCALE": True,
    "HAS_WRITE_MASK": True,
    "RETURN_COMPRESSED": True,
    "WRITE_CACHE": True,
    "HAS_EFFECTIVE_N": True,
}
POINTERS = {
    "X_ptr": "bf16",
    "S_ptr": "fp32",
    "buf_fp32_ptr": "fp32",
    "index_k_scale_ptr": "fp32",
    "loc_ptr": "i64",
    "write_mask_ptr": "i1",
    "compressed_scale_ptr": "fp32",
    "ape_ptr": "fp32",
    "block_tables_ptr": "i32",
    "effective_n_ptr": "i32",
    **dict.fromkeys(("slot_k_ptr", "slot_score_ptr", "chunk_k_ptr", "chunk_score_ptr", "key_ptr", "score_ptr"), "bf16"),
    **dict.fromkeys(("tail_k_ptr", "tail_score_ptr"), "bf16"),
    **dict.fromkeys(("req_pool_indices_ptr", "req_pool_idx_ptr", "positions_ptr", "seq_lens_ptr", "out_cache_loc_ptr"), "i64"),
    **dict.fromkeys(("n_from_tail_ptr", "chunk_src_start_ptr", "tail_logical_base_ptr"), "i64"),
    **dict.fromkeys(("write_start_ptr", "tail_logical_start_ptr", "write_loc_ptr"), "i64"),
}
"""All others point to codes."""
MOVES = "_set_k_and_s_triton_kernel"
QUANTISES = "_act_quant_kernel"


@cache
def load(path: str) -> ModuleType:
    return load_file(f"of_sglang_{len(sys.modules)}", path)


class OfSGLang(ModuleType):
    """A module of SGLang that is not needed to compile: all its names are functions that say no."""

    def __init__(self) -> None:
        super().__init__("sglang")
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: False


def stand_in(path: str) -> None:
    """Put something in the place of the modules of SGLang that a file imports when it is loaded."""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[:1] == ["from"] and words[1].startswith("sglang"):
            name = words[1]
            for end in range(1, name.count(".") + 2):
                sys.modules.setdefault(".".join(name.split(".")[:end]), OfSGLang())


def main() -> None:
    for given in sys.argv[1:]:
        path, _, name = given.rpartition(":")
        stand_in(path)
        kernel = getattr(load(path), name)
        sizes = {each: SIZES[each] for each in kernel.arg_names if each in SIZES and each != "N"}
        if name not in (QUANTISES, MOVES) and "N" in kernel.arg_names:
            sizes["N"] = SIZES["N"]
        for stored in ("fp8e4nv", *(("u8",) if name == MOVES else ("bf16", "fp32") if name == QUANTISES else ("bf16",))):
            tell_what_compiles(name, kernel, stored, POINTERS, sizes)


if __name__ == "__main__":
    main()
