# SPDX-License-Identifier: Apache-2.0
"""Loading: hooks are found, applied and named; what serves in each mode; every refusal in words; errors are loud."""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from machines import A100, B200, H200
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_kit import cases, fixture, judging, server_of
from sglang_version import SELECTORS

from mla_portable.contracts import DeviceFacts, InvalidArgument
from mla_portable.engines.sglang import hooks, model, plugin, seams, serving, settings, stock
from mla_portable.engines.sglang.status import changes
from mla_portable.primitives import CONVERT_INDICES

CASE = cases()["dsa_sparse_decode_short_prefix_padding"]
POOLS = seams.POOLS if SELECTORS else ()
QUANTISING = "quantization.dsa_quant_k_cache." if SELECTORS else "attention.dsa.quant_k_cache."
GATHERING = "dequantize_k_cache_paged_dsa" if SELECTORS else "dequantize_k_cache_paged"
FP8_ROWS = tuple(place for place in seams.FP8_ROWS if QUANTISING in place.target or place.name == GATHERING)
WITHOUT_INDEXER = (*seams.ATTENTION, *POOLS, *seams.PROMPTS, *FP8_ROWS)
APPLIED = (*WITHOUT_INDEXER, *seams.INDEXER, seams.POOLED_SCHEDULE) if SELECTORS else WITHOUT_INDEXER


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger=settings.logger.name)
    return caplog


def pretend(monkeypatch: pytest.MonkeyPatch, facts: DeviceFacts, *, libraries: bool = True) -> None:
    """SGLang's own kernels see this device; what serves here is bound for the CPU nevertheless."""
    monkeypatch.setattr(
        "mla_portable.engines.sglang.serving.get_registry",
        lambda: SimpleNamespace(facts=lambda device: facts, keep=lambda key, make: make()),
    )
    monkeypatch.setattr(stock, "_import_error", lambda module: None if libraries else f"No module named {module!r}")


@pytest.mark.parametrize("seam", APPLIED, ids=lambda seam: seam.name)
def test_hooks_are_in_force(seam: seams.Seam):
    assert plugin.is_applied(seam)


def test_loading_again_changes_nothing():
    before = {target: len(found) for target, found in HookRegistry._hooks.items()}
    load_plugins()
    assert {target: len(found) for target, found in HookRegistry._hooks.items()} == before


def test_the_sources_are_as_the_plugin_knows_them():
    """What `doctor` reads off the sources is what the interpreter says."""
    assert changes() == []
    from importlib.util import find_spec
    from pathlib import Path

    read = seams.parameters_in(Path(find_spec("sglang").submodule_search_locations[0]))
    for seam in APPLIED:
        assert read(seam.target) == plugin._parameters(seam.target)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Targets that `register` registers, without doing so again."""
    found: list[str] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind, **named: found.append(target))
    return found


def test_registration_names_the_hooks(registered: list[str], log: pytest.LogCaptureFixture):
    plugin.register()
    assert registered == [seam.target for seam in APPLIED]
    assert all(seam.name in log.text for seam in APPLIED)


def test_modes_of_registration(registered: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_INDEXER, "off")
    plugin.register()
    assert registered == [seam.target for seam in WITHOUT_INDEXER]
    registered.clear()
    monkeypatch.setenv(settings.ENV_MODE, "off")
    plugin.register()
    assert registered == []


def test_an_error_is_loud(registered: list[str], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture):
    """SGLang goes on after it, so the line says so."""
    monkeypatch.setenv(settings.ENV_MODE, "always")
    with pytest.raises(InvalidArgument):
        plugin.register()
    (record,) = [record for record in log.records if record.levelno == logging.ERROR]
    line = record.getMessage()
    assert "NOT in use, SGLang runs without it" in line and "got 'always', expected one of auto, on, off" in line
    assert "mla-portable doctor" in line and registered == []


def test_a_parameter_that_is_not_known_stops_all_hooks(registered: list[str], monkeypatch: pytest.MonkeyPatch, log):
    module = import_module(seams.BACKEND_MODULE)

    def changed(self, q_all, kv_cache, v_head_dim, page_table_1, sm_scale, causal): ...

    monkeypatch.setattr(module.DeepseekSparseAttnBackend, "_forward_flashmla_sparse", changed)
    monkeypatch.delattr(module.DeepseekSparseAttnBackend, "_forward_fa3")
    with pytest.raises(plugin.ChangedSGLang, match=r"_sparse has an unknown causal.*_forward_fa3 is not there"):
        plugin.register()
    assert registered == [] and "SGLang runs without it" in log.text


def test_auto_serves_where_stock_does_not(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture):
    pretend(monkeypatch, A100)
    server = server_of(fixture(CASE, dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="fa3").backend)
    assert server is not None and server.methods == {seams.SPARSE, seams.FA3}
    assert "mla_portable serves _forward_flashmla_sparse, _forward_fa3" in log.text
    assert "because FlashMLA does not support sm80; FlashAttention 3 does not support sm80" in log.text
    assert "sparse_decode reference.torch, sparse_prefill reference.torch" in log.text


def test_auto_leaves_what_stock_serves(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture):
    pretend(monkeypatch, H200)
    assert server_of(fixture(CASE).backend) is None
    assert "SGLang's own kernels serve flashmla_auto (prefill), flashmla_kv (decode)" in log.text
    assert f"{settings.ENV_MODE}=on takes mla_portable's" in log.text


def test_on_serves_where_stock_does(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture):
    pretend(monkeypatch, H200)
    monkeypatch.setenv(settings.ENV_MODE, "on")
    server = server_of(fixture(CASE).backend)
    assert server is not None and server.methods == {seams.SPARSE, seams.KV}
    assert f"because {settings.ENV_MODE}=on" in log.text


@pytest.mark.parametrize(
    ("method", "facts", "heads", "libraries", "words"),
    [
        (seams.KV, A100, 16, True, "FlashMLA does not support sm80"),
        (seams.SPARSE, H200, 16, True, None),
        (seams.SPARSE, H200, 24, True, "FlashMLA pads heads to 64, which 24 do not divide"),
        (seams.KV, H200, 24, True, None),
        (seams.SPARSE, B200, 128, True, None),
        (seams.KV, H200, 16, False, "FlashMLA cannot be imported (No module named"),
        (seams.FA3, B200, 16, True, "FlashAttention 3 does not support sm100"),
        (seams.FA3, H200, 16, True, None),
    ],
)
def test_what_stock_serves(method: str, facts: DeviceFacts, heads: int, libraries: bool, words: str | None, monkeypatch):
    pretend(monkeypatch, facts, libraries=libraries)
    found = stock.against_attention(method, facts, heads)
    assert found is None if words is None else found is not None and found.startswith(words)


@pytest.mark.parametrize(
    ("method", "facts", "fp8", "words"),
    [
        (seams.KV, H200, True, "SGLang does not let flashmla_kv serve an indexer that scores pools of keys"),
        (seams.SPARSE, H200, True, "what SGLang calls for an indexer that scores pools of keys reads no FP8 rows"),
        (seams.SPARSE, B200, False, None),
        (seams.SPARSE, A100, False, "FlashMLA does not support sm80"),
        (seams.FA3, H200, False, None),
    ],
)
def test_what_stock_serves_of_an_indexer_of_pools(
    method: str, facts: DeviceFacts, fp8: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
):
    pretend(monkeypatch, facts)
    found = stock.against_attention(method, facts, 64, pools=True, fp8=fp8)
    assert found is None if words is None else found is not None and found.startswith(words)


PAGE_SIZE = "physical_page_size" if SELECTORS else "real_page_size"
REFUSALS = {
    "enable_pdmux": (True, "prefills and decodes on two streams"),
    "dcp_size": (2, "decode context parallelism"),
    "hisparse_coordinator": (object(), "HiSparse"),
    "_kv_shard_pool": (object(), "a cache sharded over ranks"),
    "page_size": (32, "pages of 32 tokens (supports 64)"),
    "qk_rope_head_dim": (32, "a latent of 512 and 32 of rope (supports 512, and 64 or 0)"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture):
    value, words = REFUSALS[name]
    built = fixture(CASE)
    if name == "enable_pdmux":
        built.runner.server_args = SimpleNamespace(enable_pdmux=value)
    else:
        monkeypatch.setattr(built.backend, PAGE_SIZE if name == "page_size" else name, value, raising=False)
    (found,) = model.refusals(built.backend, built.runner)
    assert found.startswith(words)
    with pytest.raises(InvalidArgument, match="SGLang: configuration: got") as error:
        serving.attach(built.backend, built.runner)  # on a CPU nothing of SGLang's serves either
    assert words in str(error.value) and "neither SGLang nor mla_portable serves" in log.text
    pretend(monkeypatch, H200)
    monkeypatch.setenv(settings.ENV_MODE, "on")
    assert serving.attach(built.backend, built.runner) is None
    assert "SGLang's own kernels serve this model, mla_portable does not: " in log.text and server_of(built.backend) is None


def test_other_implementations_are_left_to_sglang(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture):
    monkeypatch.setenv(settings.ENV_MODE, "on")
    built = fixture(CASE)
    built.backend.dsa_prefill_impl = built.backend.dsa_decode_impl = "tilelang"
    assert serving.attach(built.backend, built.runner) is None
    assert "tilelang (prefill), tilelang (decode)" in log.text and "which mla_portable does not replace" in log.text


def test_calls_that_are_not_served_reach_sglang_s_own_method():
    called: list[tuple[object, ...]] = []

    def original(*args: object, **kwargs: object) -> str:
        called.append((args, kwargs))
        return "stock"

    backend = SimpleNamespace()
    for seam in seams.ATTENTION[:3]:
        assert hooks.hook_of(seam)(original, backend, 1, sm_scale=2) == "stock"
    assert called == [((backend, 1), {"sm_scale": 2})] * 3
    setattr(backend, serving.LAYERS, SimpleNamespace(methods=frozenset({seams.SPARSE})))
    assert hooks.hook_of(seams.ATTENTION[1])(original, backend) == "stock"
    lengths = torch.ones(3, dtype=torch.int32)
    assert hooks.hook_of(seams.ATTENTION[3])(original, backend, lengths, 1) == "stock"


def test_a_logit_cap_is_refused():
    built = fixture(CASE, dsa_decode_backend="fa3")
    with pytest.raises(InvalidArgument, match="logit_cap"):
        server_of(built.backend).fa3(built.backend, *[None] * 10, 30.0, 1)


def test_sinks_reach_the_kernel(monkeypatch: pytest.MonkeyPatch):
    built = fixture(CASE, dsa_decode_backend="flashmla_sparse")
    sink = torch.linspace(-1, 1, 4)
    q_all = torch.randn(2, 4, 576).bfloat16()
    slots = torch.tensor([[64, 65, 66, 67] + [-1] * 124] * 2, dtype=torch.int32)
    built.backend.forward_metadata = SimpleNamespace(max_seq_len_q=1)
    kv = torch.randn(128 * 3, 1, 576).bfloat16()
    with judging() as judged:
        out = built.backend._forward_flashmla_sparse(
            q_all=q_all, kv_cache=kv, v_head_dim=512, page_table_1=slots, sm_scale=0.05, **sink_argument(sink)
        )
    assert out.shape == (2, 4, 512)
    assert (judged.calls[0][1]["attn_sink"] is sink) == SELECTORS


def sink_argument(sink: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"attn_sink": sink} if SELECTORS else {}


def test_objects_of_equal_layers_share_what_serves_them():
    one, other = (server_of(fixture(CASE).backend) for _ in range(2))
    assert one.attentions[0] is other.attentions[0]


def test_layers_of_one_selection_are_given_the_slots_that_sglang_made_once():
    """Its fused top-k maps positions to slots. A layer without an indexer is given the same tensor; nothing is converted."""
    backend = fixture(CASE).backend
    chosen = torch.tensor([[64, 65, 66, 67] + [-1] * 124] * 2, dtype=torch.int32)
    assert backend._get_fused_topk_page_table(chosen) is chosen
    served = [part.decision.request for each in server_of(backend).attentions for part in each.route_decision.verdict.parts]
    assert served and all(request.primitive is not CONVERT_INDICES for request in served)


def test_what_is_bound_is_published_as_a_metric(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, A100)
    published: list[tuple[str, list[tuple[str, str]]]] = []
    monkeypatch.setattr(serving, "publish", lambda device, served, logger: published.append((device, list(served))))
    monkeypatch.setattr(serving, "_shared", functools.cache(dict))
    assert server_of(fixture(CASE, dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="fa3").backend) is not None
    ((device, served),) = published
    assert device.startswith("CPU")  # where it is bound
    assert served == [("sparse_decode", "reference.torch"), ("sparse_prefill", "reference.torch")]
