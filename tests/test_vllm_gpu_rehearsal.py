# SPDX-License-Identifier: Apache-2.0
"""What ci/gpu_vllm rehearses, and how it judges selections: with stand-ins for vLLM and the GPU."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_portable.capability.profiles import load_profiles
from mla_portable.judge.problems.selections import read_selections

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
KIT = ROOT / "ci" / "vllm_gpu"


# ------------------------------------------------------------------ the rehearsal

STAND_INS = {
    "vllm/__init__.py": "",
    "vllm/third_party/__init__.py": "",
    "vllm/third_party/pynvml.py": "def nvmlDeviceGetCudaComputeCapability(handle):\n    return [9, 0]\n",
    "vllm/third_party/deep_gemm/__init__.py": "def fp8_fp4_mqa_logits(q):\n    pass\n\n\ndef get_num_sms():\n    return 132\n",
    "vllm/_flashmla_C.py": "",
    "kernel_file.py": "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef double(x):\n"
    "    tl.store(x, 2 * tl.load(x))\n\n\n@triton.jit\ndef to_fp8(x, y):\n    tl.store(y, tl.load(x).to(tl.float8e4nv))\n",
}
"""What is installed on the machine, without its kernels."""

PRELUDE = """
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
import torch

H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=1, shared_memory_per_block_optin=227 << 10
)
torch.cuda.get_device_properties = lambda device=None: H200
loaded = Path("loaded")
import rehearse


def driver():  # Triton's, without a GPU
    import older_ptx

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 227 << 10, "multiprocessor_count": 132})
    older_ptx.triton_driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    return older_ptx.triton_driver.active
"""


def in_a_process(tmp_path: Path, script: str, *, ok: bool = True) -> str:
    """Run `script` where the stand-ins are importable; what it wrote to stderr."""
    for name, text in STAND_INS.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "script.py").write_text(PRELUDE + script)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(KIT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == ok, done.stderr
    return done.stderr


AS_AN_A100 = """
triton = driver()
rehearse.install(loaded, arch="sm80", refusing=["deep_gemm"])
properties = torch.cuda.get_device_properties("cuda")
assert torch.cuda.get_device_capability() == (8, 0) and torch.cuda.get_device_name() == "NVIDIA A100-SXM4-80GB"
assert (properties.shared_memory_per_block_optin, properties.multi_processor_count) == (163 << 10, 132)
assert triton.get_current_target().arch == 80
assert triton.utils.get_device_properties(0) == {"max_shared_mem": 163 << 10, "multiprocessor_count": 132}

from vllm.third_party import deep_gemm, pynvml
assert pynvml.nvmlDeviceGetCudaComputeCapability(None) == [8, 0]
assert deep_gemm.get_num_sms() == 132, "what runs no kernel works"
try:
    deep_gemm.fp8_fp4_mqa_logits(q=1)
except RuntimeError as error:
    assert "Unsupported architecture (fp8_fp4_mqa_logits, rehearsed sm80)" in str(error)
else:
    raise AssertionError("DeepGEMM ran")

from kernel_file import double, to_fp8
from triton.compiler import ASTSource, compile
made = compile(ASTSource(double, {"x": "*fp32"}, constexprs={}), target=triton.get_current_target())
assert b".target sm_80" in made.kernel and "double" in loaded.read_text()
compile(ASTSource(to_fp8, {"x": "*fp32", "y": "*fp8e4nv"}, constexprs={}), target=triton.get_current_target())
"""


def test_a_process_runs_as_on_an_a100(tmp_path: Path):
    assert "fp8e4nv not supported in this architecture" in in_a_process(tmp_path, AS_AN_A100, ok=False), "the last line fails"


WITHOUT = """
before = len(sys.meta_path)
rehearse.install(loaded, hidden=["deep_gemm", "flashmla"])
assert torch.cuda.get_device_capability() == (9, 0) and len(sys.meta_path) == before
assert find_spec("vllm.third_party.deep_gemm") is None and find_spec("vllm.third_party.pynvml") is not None
for module in ("vllm.third_party.deep_gemm", "vllm._flashmla_C"):
    try:
        __import__(module)
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError(module)
try:
    from vllm import _flashmla_C
except ImportError:
    pass
else:
    raise AssertionError("_flashmla_C")
for name in ("_flashmla_C", "other"):
    try:
        torch.ops.load_library(Path(f"/nowhere/{name}.abi3.so"))
    except OSError as error:
        assert ("hidden by the rehearsal" in str(error)) == (name == "_flashmla_C"), error
from importlib import metadata
assert metadata.version("torch") and metadata.entry_points()
"""


def test_a_hidden_package_cannot_be_imported_or_loaded(tmp_path: Path):
    in_a_process(tmp_path, WITHOUT)


def test_a_rehearsal_that_comes_late_is_refused(tmp_path: Path):
    late = in_a_process(tmp_path, 'import vllm\nrehearse.install(loaded, arch="sm80")\n', ok=False)
    assert "vllm imported before the rehearsal of sm80" in late


@pytest.mark.parametrize(("arch", "profile"), [("sm80", "a100-80g"), ("sm89", "l40s")])
def test_what_an_older_gpu_reports_is_what_its_profile_says(kit: Any, arch: str, profile: str):
    known = load_profiles(ROOT / "capability" / "profiles")[profile]
    facts, gpu = known.device_facts(), kit.rehearse.GPUS[arch]
    assert re.fullmatch(known.pattern, gpu.name)
    assert "sm{}{}".format(*gpu.capability) == facts.arch == arch
    assert gpu.shared_memory[0] == facts.shared_memory


# ------------------------------------------------------------------ the jobs


def test_every_rehearsal_covers_its_cells(kit: Any, tmp_path: Path):
    several = kit.jobs.indexer()
    names = {job.name for job in several}
    assert len(names) == len(several)
    for who in ("sm80", "sm89", "stock"):
        assert {f"{who}-{kv}-h{h}-{mode}" for kv in ("fp8", "bf16") for h in (16, 128) for mode in ("eager", "graphs")} <= names
    for job in several:
        environ = job.process_environ(tmp_path)
        assert job.who in ("stock", *kit.jobs.REHEARSALS)
        assert set(job.rehearsal.get("hidden", ())) <= kit.rehearse.PACKAGES.keys()
        arch = job.rehearsal.get("arch", "")
        assert arch in ("", *kit.rehearse.GPUS) and bool(arch) == job.who.startswith("sm")
        assert (environ.get("TRITON_CACHE_DIR") or "").endswith(f"caches/{arch}/triton_cache_dir") or not arch
        assert job.task == "refuse" or job.options["watch"] == (job.mode != "default")


STATE = {"archs": {"torch": "sm80", "vllm": "sm80"}, "kernels": 30, "foreign": ["nvidia.flashmla"]}
OURS = "fused: sparse_decode triton.portable"


def line(kit: Any, out: Path, row: Any, who: str, *, served: str = OURS, selected: Any = None, **result: Any) -> Any:
    """The line of a job whose engine generated and selected what stock did, but for what is given here."""
    name, mode = f"{who}-fp8-h16-eager", "eager"
    jobs = {job.name: job for job in kit.jobs.indexer()}
    text = [
        {"length": 17, "tokens": [5], "logprobs": [{"5": -0.5}]},
        {"length": 3000, "tokens": [5], "logprobs": [{"5": -0.5}]},
    ]
    result = {"runs": [text], "watch": "", "rehearsed": STATE, "impl": ["MLAPortableImpl"], **result}
    ran = {each: kit.judge.Done(jobs[each], result, "", served) for each in (name, f"stock-fp8-h16-{mode}")}
    for each, its in ((name, selected or row), (f"stock-fp8-h16-{mode}", row)):
        torch.save({(0, 0, 3): (its.logits, its.chosen.int(), its.topk, its.decode)}, out / f"{each}.selections")
    return next(each for each in kit.judge.agreement(ran, list(jobs.values()), out) if each.name == name)


def test_a_rehearsed_engine_is_judged_by_what_it_took_itself_for(kit: Any, row: Any, tmp_path: Path):
    good = line(kit, tmp_path, row, "sm80")
    assert good.passed, good.found
    assert not line(kit, tmp_path, row, "sm80", served="").passed, "somebody else attended"
    assert not line(kit, tmp_path, row, "sm80", served="fused: sparse_decode nvidia.flashmla").passed
    for changed in ({"archs": {"torch": "sm80", "vllm": "sm90"}}, {"kernels": 0}):
        assert not line(kit, tmp_path, row, "sm80", rehearsed={**STATE, **changed}).passed, changed
    assert line(kit, tmp_path, row, "indexer", served="", impl=["FlashMLASparseImpl"]).passed
    assert not line(kit, tmp_path, row, "indexer").passed, "attention is not stock's"


def test_a_wrong_selection_fails_and_so_does_one_that_nobody_saw(kit: Any, row: Any, tmp_path: Path):
    wrong = line(kit, tmp_path, row, "bare", selected=replace(row, chosen=torch.tensor([0, 2, 4, 3])))
    assert not wrong.passed and "off by 3.3e-01" in wrong.found
    failed = line(kit, tmp_path, row, "bare", watch="AttributeError: cu_seqlen_ks")
    assert not failed.passed and "AttributeError" in failed.found


# ------------------------------------------------------------------ selections


def page(keys: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[64, 132] uint8 of 64 keys."""
    parts = [keys.to(torch.float8_e4m3fn).view(torch.uint8).flatten(), scales.view(torch.uint8).flatten()]
    return torch.cat(parts).view(64, 132)


def test_logits_are_computed_from_the_pages_of_the_request(kit: Any):
    drawn = torch.Generator().manual_seed(7)
    keys = torch.randn((3, 64, 128), generator=drawn).to(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-3, 3, (3, 64), generator=drawn).float()
    cache = torch.stack([page(*each) for each in zip(keys, scales, strict=True)])
    query = torch.randn((4, 128), generator=drawn).to(torch.float8_e4m3fn)
    weights = torch.randn(4, generator=drawn)
    found = kit.selections.exact_logits(query, weights, cache, torch.tensor([2, 0, 1, 1], dtype=torch.int32), 100)
    assert found.shape == (100,)
    for position, (block, offset) in {0: (2, 0), 63: (2, 63), 64: (0, 0), 99: (0, 35)}.items():
        key = keys[block, offset].double() * scales[block, offset].double()
        wanted = sum(float(weights[h]) * max(0.0, float(query[h].double() @ key)) for h in range(4))
        assert math.isclose(float(found[position]), wanted, rel_tol=1e-9, abs_tol=1e-9)


@pytest.fixture
def row(kit: Any) -> Any:
    """Of ten positions four are selected; the fourth and the fifth are nearly alike."""
    logits = torch.tensor([9.0, 1.0, 8.0, 2.0, 7.0, 5.0, 4.999, 0.0, 1.0, -3.0])
    return kit.selections.Row(logits, torch.tensor([0, 2, 4, 5]), 4, False)


def test_a_selection_is_judged_by_what_it_leaves_out(kit: Any, row: Any):
    assert row.wrong() == 0.0
    tie = replace(row, chosen=torch.tensor([0, 2, 4, 6]))
    assert 0 < tie.wrong() < kit.selections.NEAR
    assert replace(row, chosen=torch.tensor([0, 2, 4, 3])).wrong() > 0.3
    for chosen in ([0, 2, 4], [0, 2, 4, 4], [0, 2, 4, 10], [0, 2, 4, 5, 6]):
        assert replace(row, chosen=torch.tensor(chosen)).wrong() == math.inf, chosen
    assert replace(row, logits=row.logits * math.nan).wrong() == math.inf
    short = replace(row, topk=16, chosen=torch.arange(10))
    assert short.wrong() == 0.0 and replace(short, chosen=torch.arange(9)).wrong() == math.inf


def test_selections_are_compared_with_stocks(kit: Any, row: Any, tmp_path: Path):
    def judge(ours: dict[Any, Any], stock: dict[Any, Any]) -> tuple[bool, str]:
        return kit.selections.judge(ours, stock)

    tie = replace(row, chosen=torch.tensor([0, 2, 4, 6]))
    assert judge({(0, 0, 3): row}, {(0, 0, 3): tie}) == (True, judge({(0, 0, 3): row}, {(0, 0, 3): tie})[1])
    assert "1 of 4 positions of 1 differ" in judge({(0, 0, 3): row}, {(0, 0, 3): tie})[1]
    assert judge({(0, 0, 3): row}, None)[0] and not judge({(0, 0, 3): replace(row, topk=3)}, None)[0]
    assert not judge({}, {(0, 0, 3): row})[0], "nothing was seen"
    assert not judge({(0, 0, 3): row}, {(0, 1, 3): row})[0], "nothing to compare with"
    assert not judge({(0, 0, 3): row}, {(0, 0, 3): replace(row, logits=row.logits * 1.2)})[0], "other logits in layer 0"
    second = {(0, 1, 3): row}
    assert judge({(0, 0, 3): row, **second}, {(0, 0, 3): row, (0, 1, 3): replace(row, logits=row.logits * 1.2)})[0]
    assert not judge({(0, 0, 3): replace(row, chosen=torch.tensor([0, 2, 4, 3]))}, {(0, 0, 3): row})[0]
    short = replace(row, topk=16, chosen=torch.arange(10))
    assert not judge({(0, 0, 3): short}, {(0, 0, 3): short})[0], "no selection was made"


class SparseAttnIndexer(torch.nn.Module):
    """Selects the first positions of every row."""

    def __init__(self, cache: torch.Tensor, prefix: str = "layer") -> None:
        super().__init__()
        self.k_cache, self.topk_tokens = SimpleNamespace(prefix=prefix, kv_cache=cache), 2
        self.topk_indices_buffer = torch.full((8, 4), -1, dtype=torch.int32)

    def forward(self, hidden: Any, queries: torch.Tensor, keys: Any, weights: torch.Tensor) -> torch.Tensor:
        self.topk_indices_buffer[: len(queries), :2] = torch.tensor([1, 0], dtype=torch.int32)
        return self.topk_indices_buffer


def test_an_engines_steps_are_watched(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = torch.stack([page(torch.randn(64, 128), torch.ones(64)) for _ in range(3)])
    chunk = SimpleNamespace(
        token_start=1,
        token_end=4,
        cu_seqlen_ks=torch.tensor([0, 70, 70]),
        cu_seqlen_ke=torch.tensor([70, 73, 74]),
        cu_seq_lens=torch.tensor([0, 70, 74]),
        block_table=torch.tensor([[0, 1], [2, 0]]),
    )
    decode = SimpleNamespace(seq_lens=torch.tensor([[65]]), block_table=torch.tensor([[2, 1]]))
    step = {"num_prefills": 2, "num_decodes": 1, "num_decode_tokens": 1}
    metadata = SimpleNamespace(**step, prefill=SimpleNamespace(chunks=[chunk]), decode=decode)
    context = SimpleNamespace(attn_metadata=dict.fromkeys("ab", metadata))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.forward_context", SimpleNamespace(get_forward_context=lambda: context))
    model = torch.nn.Sequential(SparseAttnIndexer(cache, "a"), SparseAttnIndexer(cache, "b"))
    queries, weights = torch.randn(4, 2, 128).to(torch.float8_e4m3fn), torch.randn(4, 2)

    def operator(hidden: Any, prefix: str, kv_cache: Any, queries: torch.Tensor, *rest: Any, more: bool) -> torch.Tensor:
        return model[1].forward(hidden, queries, None, rest[2])

    attention = SimpleNamespace(sparse_attn_indexer=operator)
    monkeypatch.setitem(sys.modules, "vllm.models.deepseek_v32.attention", attention)
    watch = kit.selections.Watch(model)
    model[0](None, queries, None, weights)
    buffer = model[1].topk_indices_buffer
    attention.sparse_attn_indexer(None, "b", cache, queries, None, None, weights, 128, None, 2, 128, 4, 4, buffer, more=True)
    context.attn_metadata = None  # a dummy run
    model[0](None, queries, None, weights)
    assert watch.end(tmp_path / "rows") == ""
    assert attention.sparse_attn_indexer is operator
    rows = kit.selections.read(tmp_path / "rows")
    assert rows.keys() == {(0, layer, row) for layer in (0, 1) for row in range(4)}
    assert [len(rows[0, 1, row].logits) for row in range(4)] == [65, 70, 3, 4]
    assert [rows[0, 0, row].decode for row in range(4)] == [True, False, False, False]
    assert rows[0, 0, 2].chosen.tolist() == [1, 0]
    exact = kit.selections.exact_logits(queries[2], weights[2], cache, torch.tensor([2, 0]), 3)
    assert torch.equal(rows[0, 0, 2].logits, exact.float())
    assert kit.selections.read(tmp_path / "absent") == {}


class Selecting(SparseAttnIndexer):
    """Selects two of the positions that a row sees, the last ones, with an absent entry in front where it sees one alone."""

    sees: torch.Tensor

    def forward(self, hidden: Any, queries: torch.Tensor, keys: Any, weights: torch.Tensor) -> torch.Tensor:
        self.topk_indices_buffer[: len(queries), 0] = self.sees - 2
        self.topk_indices_buffer[: len(queries), 1] = self.sees - 1
        return self.topk_indices_buffer


def test_selections_of_runs_of_tokens_are_captured_for_benchmarks(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = torch.randn(3, 64, 128).to(torch.float8_e4m3fn)
    cache = torch.stack([page(each, torch.full((64,), 2.0)) for each in keys])
    chunk = SimpleNamespace(  # after a decode: 3 tokens of one prompt, 1 of another that sees nothing else
        token_start=1,
        token_end=5,
        cu_seqlen_ks=torch.tensor([0, 0, 0, 70]),
        cu_seqlen_ke=torch.tensor([68, 69, 70, 71]),
        cu_seq_lens=torch.tensor([0, 70, 71]),
        block_table=torch.tensor([[2, 0], [1, 0]]),
    )
    metadata = SimpleNamespace(num_prefills=2, num_decodes=1, prefill=SimpleNamespace(chunks=[chunk]))
    context = SimpleNamespace(attn_metadata=dict.fromkeys("ab", metadata))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.forward_context", SimpleNamespace(get_forward_context=lambda: context))
    model = torch.nn.Sequential(Selecting(cache, "a"), Selecting(cache, "b"))
    capture = kit.selections.Capture(model, name="tiny", made="a test", rows=2, input_rows=1)
    queries, weights = torch.randn(5, 2, 128).to(torch.float8_e4m3fn), torch.randn(5, 2)
    for indexer in model:
        indexer.sees = torch.tensor([9, 68, 69, 70, 1], dtype=torch.int32)
        indexer(None, queries, None, weights)
    assert capture.end(tmp_path / "tiny.npz") == ""
    found = read_selections(tmp_path / "tiny.npz")
    assert (found.model, found.seen.tolist(), found.request.tolist()) == ("tiny", [69, 70], [0, 0])
    assert found.positions.tolist() == [[[67, 68], [68, 69]]] * 2 and found.layers.tolist() == [0, 1]
    index = found.index
    assert index is not None and index.seen.tolist() == [70] and index.keys.shape == (2, 70, 128)
    assert torch.equal(index.keys[1, 64], keys[0, 0].bfloat16() * 2) and torch.equal(
        index.keys[0, 63], keys[2, 63].bfloat16() * 2
    )
    assert torch.equal(index.queries[0, 0], queries[3].bfloat16()) and torch.equal(index.weights[1, 0], weights[3])
    other = kit.selections.Capture(model, name="tiny", made="a test")
    assert other.end(tmp_path / "none.npz") == "no prompt saw more keys than are selected"
    assert not (tmp_path / "none.npz").exists()


def test_a_watch_that_fails_does_not_stop_the_engine(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.forward_context", SimpleNamespace())
    indexer = SparseAttnIndexer(torch.zeros((1, 64, 132), dtype=torch.uint8))
    watch = kit.selections.Watch(indexer)
    indexer(None, torch.zeros((1, 2, 128)), None, torch.zeros((1, 2)))
    assert "get_forward_context" in watch.end(tmp_path / "rows")


# ------------------------------------------------------------------ all of it, on a stand-in for vLLM

ENGINE = """
import os
from importlib.util import find_spec
from types import SimpleNamespace as Some

import torch
from selections import exact_logits
from vllm import forward_context

SamplingParams = Some


class SparseAttnIndexer(torch.nn.Module):
    def __init__(self, pages):
        super().__init__()
        self.k_cache, self.topk_tokens = Some(prefix="cache", kv_cache=pages), 4
        self.topk_indices_buffer = torch.full((16, 4), -1, dtype=torch.int32)

    def forward(self, hidden, queries, keys, weights):
        for row in range(len(queries)):
            logits = exact_logits(queries[row], weights[row], self.k_cache.kv_cache, torch.tensor([0]), 20 + row)
            best = logits.topk(4, largest=not os.environ.get("WORST")).indices
            self.topk_indices_buffer[row] = best.int()
        return self.topk_indices_buffer


class LLM:
    def __init__(self, **given):
        if os.environ["MLA_PORTABLE_VLLM"] != "off":
            here = find_spec("vllm.third_party.deep_gemm") is not None
            print("mla_portable serves 2 layers on x by route fused: sparse_decode triton.portable; cache")
            print(f"the DSA indexer is mla_portable's (fused): DeepGEMM is {here}", flush=True)
        drawn = torch.Generator().manual_seed(1)
        codes = torch.randn((64, 128), generator=drawn).to(torch.float8_e4m3fn).view(torch.uint8).flatten()
        pages = torch.cat([codes, torch.ones(64).view(torch.uint8)]).view(1, 64, 132)
        self.inputs = torch.randn((3, 2, 128), generator=drawn).to(torch.float8_e4m3fn), torch.rand((3, 2), generator=drawn)
        self.model = SparseAttnIndexer(pages)
        worker = Some(model_runner=Some(get_model=lambda: self.model))
        layers = {"a": Some(impl=None)}
        cache, parallel = Some(num_gpu_blocks=10, block_size=64), Some(decode_context_parallel_size=1)
        config = Some(compilation_config=Some(static_forward_context=layers), cache_config=cache, parallel_config=parallel)
        core = Some(engine_core=Some(scheduler=Some(connector=None)))
        self.llm_engine = Some(vllm_config=config, model_executor=Some(driver_worker=Some(worker=worker)), engine_core=core)

    def generate(self, requests, sampling, use_tqdm):
        row = torch.arange(3)
        chunk = Some(token_start=0, token_end=3, cu_seqlen_ks=0 * row, cu_seqlen_ke=20 + row, cu_seq_lens=torch.tensor([0, 22]))
        chunk.block_table = torch.tensor([[0]])
        step = Some(num_prefills=1, num_decodes=0, prefill=Some(chunks=[chunk]))
        forward_context.now = Some(attn_metadata={"cache": step})
        self.model(None, self.inputs[0], None, self.inputs[1])
        texts = [Some(token_ids=[7] * one.max_tokens, logprobs=[{7: Some(logprob=-0.5)}] * one.max_tokens) for one in sampling]
        return [Some(outputs=[text], num_cached_tokens=0, **request) for text, request in zip(texts, requests, strict=True)]
"""


def test_a_whole_run_is_judged(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {**STAND_INS, "vllm/__init__.py": ENGINE, "vllm/config/attention.py": "class AttentionConfig:\n    pass\n"}
    files |= {"vllm/config/__init__.py": "", "vllm/forward_context.py": "def get_forward_context():\n    return now\n"}
    for name, text in files.items():
        file = tmp_path / "modules" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "modules"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(kit.named_models, "write_model", lambda folder, name: None)
    monkeypatch.setattr(kit.kit.metadata, "version", lambda name: "0")

    def report(folder: str, only: str) -> tuple[int, str]:
        status = kit.kit.main([str(tmp_path / folder), "--indexer", "--only", only, "--parallel", "2"])
        return status, (tmp_path / folder / "report.txt").read_text()

    status, text = report("both", "stock-fp8-h16-eager,bare-fp8-h16-eager")
    assert status == 0 and "ok   bare-fp8-h16-eager" in text, text
    assert (
        "3 selections, 3 of more keys than top-k, off by 0.0e+00 of a logit; against stock's 0 of 12 positions of 3 differ"
        in text
    )
    assert "indexer mla_portable's (fused): DeepGEMM is False" in text
    status, text = report("alone", "bare-fp8-h16-eager")
    assert status == 0 and "without stock; 3 selections" in text, text
    monkeypatch.setenv("WORST", "1")
    assert report("worst", "bare-fp8-h16-eager")[0] == 1
