# SPDX-License-Identifier: Apache-2.0
"""The hash of sources follows code, not wording: which edits make evidence stale, and which do not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import pytest

from mla_portable import sources
from mla_portable.contracts import SPLIT_KV, Implementation, Support
from mla_portable.primitives import CACHE_WRITE, SPARSE_DECODE, TOPK_SELECT
from mla_portable.reference import _bind_to
from mla_portable.registry import Registry
from mla_portable.sources import (
    SourceNotFound,
    code_of,
    imported,
    module_file,
    modules_hash,
    modules_of,
    source_hash,
    sources_of,
)
from mla_portable.tools.matrix import records
from mla_portable_iluvatar import PROVIDERS
from mla_portable_triton.bind_data import bind_convert_indices

MODULE = '''
"""A kernel."""
from __future__ import annotations
import math

LIMIT = 4  # tokens
OTHER = 9


def helper(x):
    """Twice x."""
    return x * 2


def kernel(x):
    return helper(x) + LIMIT


def apart(x):
    return math.sqrt(x)


_SMALL = (16, 2)
_LARGE = (64, helper(2))
TABLE: dict = {
    "default": {"bf16": _SMALL},
    "sm80": {"bf16": (32, 2)},
    "sm90": {"bf16": _LARGE},
}
"""Architecture -> tile."""


def pick(arch):
    return TABLE[arch]
'''
KERNEL = """
// a kernel
__global__ void add(int* to) {
    *to = 1; /* one */
    print("// no comment");
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "coded.py").write_text(MODULE)
    (tmp_path / "code.cu").write_text(KERNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    sources._top.cache_clear()
    yield tmp_path
    sources._top.cache_clear()


def moved(path: Path, old: str, new: str, *names: str, arch: str = "") -> bool:
    """An edit changes the hash."""
    text = path.read_text()
    assert old in text
    before = source_hash(names, arch)
    path.write_text(text.replace(old, new, 1))
    after = source_hash(names, arch)
    path.write_text(text)
    assert source_hash(names, arch) == before
    return before != after


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("A kernel.", "One kernel.", False),
        ("Twice x.", "x, doubled.", False),
        ("Architecture -> tile.", "Tiles.", False),
        ("  # tokens", "", False),
        ("\n\n\n", "\n\n\n\n", False),
        ("(16, 2)", "(\n    16,\n    2,\n)", False),
        ("x * 2", "x * 3", True),
        ("x * 2", "2 * x", True),
        ("LIMIT = 4", "LIMIT = 5", True),
        ("LIMIT = 4", 'LIMIT = "4"', True),
        ("OTHER = 9", "OTHER = None", True),
        ("def apart", "@helper\ndef apart", True),
    ],
)
def test_a_module_is_its_code(folder: Path, old: str, new: str, changed: bool) -> None:
    assert moved(folder / "coded.py", old, new, "coded") is changed


@pytest.mark.parametrize(
    ("source", "old", "new", "changed"),
    [
        ("kernel", "x * 2", "x * 3", True),
        ("kernel", "LIMIT = 4", "LIMIT = 5", True),
        ("kernel", "OTHER = 9", "OTHER = 8", False),
        ("kernel", "Twice", "Two times", False),
        ("kernel", "math.sqrt", "math.exp", False),
        ("apart", "import math", "import cmath as math", True),
        ("pick", "(32, 2)", "(32, 3)", True),
    ],
)
def test_an_object_is_its_code_and_what_it_uses(folder: Path, source: str, old: str, new: str, changed: bool) -> None:
    assert moved(folder / "coded.py", old, new, f"coded::{source}") is changed


@pytest.mark.parametrize(
    ("arch", "old", "new", "changed"),
    [
        ("sm80", "(32, 2)", "(32, 3)", True),
        ("sm90", "(32, 2)", "(32, 3)", False),
        ("sm90", "_LARGE = (64", "_LARGE = (48", True),
        ("sm90", "x * 2", "x * 3", True),
        ("sm80", "x * 2", "x * 3", False),
        ("xy1", "(16, 2)", "(16, 1)", True),
        ("xy1", "(32, 2)", "(32, 3)", False),
    ],
)
def test_of_a_table_the_row_of_the_architecture_counts(folder: Path, arch: str, old: str, new: str, changed: bool) -> None:
    assert moved(folder / "coded.py", old, new, "coded::TABLE[{arch}]", arch=arch) is changed
    both = ("coded::TABLE[{arch}]", "coded::pick")
    assert moved(folder / "coded.py", old, new, *both, arch=arch) is changed, "what is named apart counts as it is named"
    assert moved(folder / "coded.py", "return TABLE[arch]", "return TABLE['sm80']", *both, arch=arch)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("// a kernel", "// the kernel", False),
        ("/* one */", "", False),
        ("    *to", "\t\n  *to", False),
        ("*to = 1", "*to = 2", True),
        ("// no comment", "// another", True),
    ],
)
def test_device_code_is_its_code(folder: Path, old: str, new: str, changed: bool) -> None:
    assert moved(folder / "code.cu", old, new, "coded:code.cu") is changed


def test_every_version_of_python_makes_the_same_hash(folder: Path) -> None:
    text = "def show(x, w):\n    return f'a{x:<{w}}b' 'c' f'{x!r}{{}}', None, ..., 1.5, b'x'\n\n\nclass A(dict): pass\n"
    (folder / "coded.py").write_text(text)
    assert modules_hash(["coded"]) == "b506cb2e20b8feff37e03fa45b34255564f8ec1a41dab6b57d1fbeb352f5d9e2"


def test_no_order_plays_a_part_and_every_name_does(folder: Path) -> None:
    both = ("coded", "coded:code.cu")
    assert source_hash(both) == source_hash(both[::-1]) == source_hash((*both, *both))
    assert len({source_hash(names) for names in ((), both[:1], both[1:], both, ("coded::kernel",), ("coded::pick",))}) == 6
    assert module_file("coded:code.cu") == folder / "code.cu" and module_file("coded::kernel") == folder / "coded.py"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("mla_portable.nothing_here", "no such file"),
        ("no_such_package.kernel", "not installed"),
        ("no_such_package:code.cu", "not installed"),
        ("coded:none.cu", r"file none.cu of coded: no such file: .*none\.cu"),
        ("coded::nothing", "defines no nothing"),
        ("coded::LIMIT[{arch}]", "no table with a row"),
    ],
)
def test_what_is_not_there_is_said(folder: Path, source: str, word: str) -> None:
    with pytest.raises(SourceNotFound, match=word):
        source_hash([source], "sm90")


PACKAGE = {
    "__init__": "from __future__ import annotations\nfrom maker.bound import bind as bind\nSHIPPED = 1\n",
    "bound": """
from __future__ import annotations
from typing import TYPE_CHECKING
import functools
import torch_of_somebody
from mla_portable.contracts import Request, split_kv
from mla_portable.errors import InvalidArgument
from mla_portable.primitives import SPARSE_DECODE
from . import tables as known
from .other import Shape, unused
if TYPE_CHECKING:
    from maker.typed import Word
SETTINGS = {}
SETTINGS["limit"] = 3

def bind(request: Request, shape: Shape, word: Word):
    from maker.late import launch
    if request.primitive is SPARSE_DECODE:
        raise InvalidArgument
    return functools.partial(launch, split_kv, known.ROWS, SETTINGS)

def sibling(x):
    return unused(x)
""",
    "late": "KERNEL = 'code'\ndef launch(*_):\n    return KERNEL\n",
    "tables": "ROWS = (1, 2)\nCOLUMNS = (3,)\n",
    "other": "class Shape:\n    side = 1\ndef unused(x):\n    return x\n",
    "typed": "Word = str\n",
}
DEVICE = '#include "shared.cuh"\n__global__ void code() {}\n'


@pytest.fixture
def maker(folder: Path) -> Path:
    (folder / "maker").mkdir()
    for name, text in PACKAGE.items():
        (folder / "maker" / f"{name}.py").write_text(text)
    (folder / "maker" / "code.cu").write_text(DEVICE)
    (folder / "maker" / "shared.cuh").write_text("int shared;\n")
    return folder / "maker"


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("bound.py", "return functools", "return  functools", False),
        ("bound.py", "functools.partial(launch, split_kv", "functools.partial(launch, launch, split_kv", True),
        ("bound.py", "return unused(x)", "return unused(x, x)", False),
        ("bound.py", '["limit"] = 3', '["limit"] = 4', True),
        ("late.py", "return KERNEL", "return KERNEL * 2", True),
        ("tables.py", "(1, 2)", "(2, 1)", True),
        ("tables.py", "(3,)", "(4,)", False),
        ("other.py", "side = 1", "side = 2", False),
        ("typed.py", "str", "int", False),
        ("__init__.py", "SHIPPED = 1", "SHIPPED = 2", False),
        ("code.cu", "code() {}", "code() { return; }", True),
        ("shared.cuh", "int shared", "long shared", True),
    ],
)
def test_imports_are_followed_to_what_is_used_and_no_further(maker: Path, file: str, old: str, new: str, changed: bool) -> None:
    assert moved(maker / file, old, new, "maker.bound::bind") is changed
    assert moved(maker / file, old, new, "maker::bind") is changed, "through a name that a package passes on"


def test_of_the_core_what_computes_is_followed_and_what_declares_is_not(maker: Path) -> None:
    found = code_of(["maker.bound::bind"])
    assert "mla_portable.contracts.split_kv::split_kv" in found
    assert not any(name.startswith(("mla_portable.errors", "mla_portable.contracts.request")) for name in found)
    assert found["mla_portable.primitives.sparse_decode::SPARSE_DECODE"] == "Primitive", "a name of what others compute"
    assert [name for name in found if name.startswith("mla_portable.primitives.")] == [
        "mla_portable.primitives.sparse_decode::SPARSE_DECODE"
    ]


@pytest.mark.parametrize(
    ("bind", "root"),
    [
        (bind_convert_indices, "mla_portable_triton.bind_data::bind_convert_indices"),
        (partial(bind_convert_indices, {}), "mla_portable_triton.bind_data::bind_convert_indices"),
        (lru_cache(bind_convert_indices), "mla_portable_triton.bind_data::bind_convert_indices"),
        (PROVIDERS[0].implementation().bind, "mla_portable_iluvatar::Provider"),
        (PROVIDERS[0].implementation().bind, "mla_portable_iluvatar.attention::flash_mla_sparse_v2"),
        (_bind_to(TOPK_SELECT.reference, None), "mla_portable.primitives.topk_select::reference"),
        (lambda request: request, "test_sources"),
    ],
    ids=["function", "partial", "cached", "method", "what a method's value holds", "closure", "lambda"],
)
def test_an_implementation_starts_at_what_its_bind_is_and_holds(bind: Callable[..., object], root: str) -> None:
    made = Implementation("acme.v1", TOPK_SELECT, Support(source="this test"), bind, sources=("acme::more",))
    roots = sources_of(made)
    assert "acme::more" in roots and root in roots
    assert {*sources_of(replace(made, schedule_kind=SPLIT_KV))} > {*roots}


def test_imports_are_followed_within_the_packages(folder: Path) -> None:
    texts = {
        "__init__": "import json\n",
        "cases": "from suite.more import A\nimport os.path\n",
        "more": "def f():\n    from suite import deep\nA = 1\n",
        "deep": "from suite.cases import A\n",
        "other": "",
    }
    (folder / "suite").mkdir()
    for name, text in texts.items():
        (folder / "suite" / f"{name}.py").write_text(text)
    assert modules_of("suite") == ["suite", *(f"suite.{name}" for name in ("cases", "deep", "more", "other"))]
    assert imported(["suite.cases"], ["suite"]) == {"suite", "suite.cases", "suite.deep", "suite.more"}
    assert imported(["suite.other"], ["suite"]) == {"suite.other"}


def test_the_suite_of_a_primitive_has_its_own_problems_and_what_judges_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    monkeypatch.setattr(records, "modules_hash", lambda sources: seen.append(set(sources)) or "")
    for primitive in (CACHE_WRITE, TOPK_SELECT, CACHE_WRITE):
        records.suite_hash(primitive)
    assert seen[0] == seen[2], "read again at each call: a run is refused whose suite changes meanwhile"
    problems = {name.rpartition(".")[2] for name in seen[0] ^ seen[1]}
    assert problems == {"cache_write", "topk_select"}
    assert {"mla_portable.problems.stage", "mla_portable.tools.conformance.runner"} <= seen[0] & seen[1]


def test_an_sm80_row_of_the_attention_kernel_is_no_source_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(plugins=[("triton", "mla_portable_triton")], environ={}, probe=False)
    decode = next(
        each for each in registry.implementations() if (each.name, each.primitive) == ("triton.portable", "sparse_decode")
    )
    path = module_file("mla_portable_triton.attention_configs")
    text = path.read_text()
    archs = ("sm80", "sm90", "cpu")
    roots = sources_of(decode)
    before = {arch: source_hash(roots, arch) for arch in archs}
    assert len(set(before.values())) == 3
    edited = text.replace('"sm80": _layouts(_FP8, ((16,', '"sm80": _layouts(_FP8, ((8,')
    assert edited != text
    original = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **options: edited if self == path else original(self, **options))
    assert {arch for arch in archs if source_hash(roots, arch) != before[arch]} == {"sm80"}


def test_what_a_list_would_forget_is_found() -> None:
    """Of Triton's decode: its schedule, its results, its configuration, the layouts that the core's table brings."""
    registry = Registry(plugins=[("triton", "mla_portable_triton")], environ={}, probe=False)
    (decode,) = [each for each in registry.implementations(SPARSE_DECODE) if each.name == "triton.portable"]
    found = code_of(sources_of(decode), "sm90")
    assert found.keys() >= {
        "mla_portable.contracts.split_kv::split_kv",
        "mla_portable.contracts.results::attention_results",
        "mla_portable_triton::_program",
        "mla_portable_triton.attention_tuning::bound_config",
        "mla_portable_triton.attention_configs::attention_config",
        "mla_portable.layouts.fp8_ds_mla::FP8_DS_MLA",
    }
    assert "mla_portable_triton.attention_configs::CONFIGS" not in found, "of the table the row alone"


def test_hashing_needs_no_torch() -> None:
    code = "import sys, mla_portable.sources as s; s.source_hash(['mla_portable.sources']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
