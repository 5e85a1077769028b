# SPDX-License-Identifier: Apache-2.0
"""SGLang's cases with slots as its fused top-k names them: each call beside SGLang's kernel and the oracle; graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import sglang_kit
import stock
import torch
from process import ARCH, tell, trying
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang_kit import kit

from mla_portable.engines.common.routing import served_by

CASES = {case.name: case for case in kit.make_dsa_sparse_cases("dsa")}
DECODE = CASES["dsa_sparse_decode_ragged_prefix"]
EXTEND = CASES["dsa_sparse_prefill_long_extend"]


def speculative(mode: str) -> Any:
    return replace(DECODE, name=mode.lower(), forward_mode=ForwardMode[mode], extend_lens=(3, 3, 3))


def plan() -> list[tuple[str, Any, dict[str, Any]]]:
    """Name, case and options of its fixture."""
    found: list[tuple[str, Any, dict[str, Any]]] = []
    for heads, (name, case), impl in product((4, 16, 128), CASES.items(), ("flashmla_sparse", "flashmla_kv", "fa3")):
        if heads != 4 and case not in (DECODE, EXTEND):
            continue
        phase = "prefill" if case.forward_mode.is_extend() else "decode"
        case = replace(case, num_heads=heads)
        found.append((f"{name} {heads} heads bf16 {impl}", case, {f"dsa_{phase}_backend": impl}))
        gathers = impl == "flashmla_sparse" and phase == "prefill" and case.batch_size == 1
        if impl == "flashmla_kv" or gathers:
            options = {f"dsa_{phase}_backend": impl, "fp8_kv_cache": True}
            found.append((f"{name} {heads} heads fp8 {impl}", case, options))
    for mode, fp8, heads in product(("TARGET_VERIFY", "DRAFT_EXTEND_V2"), (False, True), (4, 128)):
        options = {"dsa_decode_backend": "flashmla_kv", "fp8_kv_cache": fp8}
        case = replace(speculative(mode), num_heads=heads)
        found.append((f"{mode} {heads} heads {'fp8' if fp8 else 'bf16'} flashmla_kv", case, options))
    return found


def eager(name: str, case: Any, options: dict[str, Any]) -> None:
    found: dict[str, Any] = {}
    with trying(name, found):
        built = sglang_kit.fixture(case, **options)
        server = sglang_kit.server_of(built.backend)
        assert server is not None, "the plugin does not serve"
        found["served"] = "; ".join(served_by(each.route_decision) for each in server.attentions)
        with sglang_kit.judging() as judged, stock.beside_stock(also_stock=not ARCH) as beside:
            sglang_kit.compare(built)
        found.update(beside.differences(), kind=" ".join(judged.kinds), from_oracle=judged.worst)
        for each in beside.stock:
            if isinstance(each, torch.Tensor):
                found["stock_from_oracle"] = float((each.flatten().double().cpu() - judged.wanted.flatten()).abs().max())
        assert judged.calls, "nothing was served here"


def graph(name: str, case: Any, options: dict[str, Any]) -> None:
    """A layer captured once; replayed with other slots and lengths, it gives the bits of an eager step."""
    with trying(f"graph {name}", {}):
        built = sglang_kit.fixture(case, disable_cuda_graph=False, **options)
        backend, module = built.backend, built.actual_module

        def attend() -> torch.Tensor:
            (q_nope, q_rope), (k_nope, k_rope) = module.project_q(built.input_hidden), module.project_k(built.input_hidden)
            return module.attn(
                q_nope,
                k_nope,
                k_nope,
                built.forward_batch,
                k_rope=k_rope,
                q_rope=q_rope,
                topk_indices=built.topk_indices,
                save_kv_cache=False,
            )

        backend.init_cuda_graph_state(8, 8 * 3)
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata_out_graph(built.forward_batch, in_capture=True)
            backend.init_forward_metadata_in_graph(built.forward_batch)
            for _ in range(2):
                attend()
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                out = attend()
            order = torch.randperm(built.topk_indices.shape[1], device="cuda")
            for _ in range(2):
                built.topk_indices.copy_(built.topk_indices[:, order])
                built.input_hidden.normal_()
                backend.init_forward_metadata_out_graph(built.forward_batch)
                captured.replay()
                torch.cuda.synchronize()
                replayed = out.clone()
                assert torch.equal(replayed, attend()), "a replay differs from an eager step"
                assert replayed.isfinite().all() and replayed.any()


def main() -> None:
    torch.set_grad_enabled(False)
    tell("device", passed=None, device=torch.cuda.get_device_name(), capability=torch.cuda.get_device_capability())
    for name, case, options in plan():
        eager(name, case, options)
    for impl, (mode, case), fp8 in product(
        ("flashmla_kv", "flashmla_sparse", "fa3"), (("decode", DECODE), ("verify", speculative("TARGET_VERIFY"))), (False, True)
    ):
        if fp8 and impl != "flashmla_kv":
            continue
        options = {"dsa_decode_backend": impl, "fp8_kv_cache": fp8}
        graph(f"{mode} {impl} {'fp8' if fp8 else 'bf16'}", case, options)


if __name__ == "__main__":
    main()
