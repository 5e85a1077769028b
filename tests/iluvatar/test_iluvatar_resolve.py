# SPDX-License-Identifier: Apache-2.0
"""Finding ops where a generation puts them, and telling a kernel from its twin."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from corex_machine import BI_V150, NEWEST, installed

from mla_portable_iluvatar import PROVIDERS
from mla_portable_iluvatar.resolve import Place, twins_called


def nothing() -> None:
    return None


def ref_op() -> None:
    return None


def test_a_twin_is_found_by_its_name_however_deep():
    assert twins_called(lambda: (lambda: ref_op())()) == ("ref_op",)
    assert twins_called(nothing) == ()


def test_the_profile_hook_of_others_is_given_back():
    def theirs(frame, event, argument):
        return None

    sys.setprofile(theirs)
    try:
        twins_called(nothing)
        assert sys.getprofile() is theirs
    finally:
        sys.setprofile(None)


def test_a_stream_under_capture_is_not_disturbed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with installed(NEWEST):
        (reason,) = PROVIDERS[0].check(replace(BI_V150, device_type="cuda"))
    assert "before capturing" in reason.remedy


def test_an_attribute_of_an_extension_is_found_behind_a_dotted_name():
    with installed({"ixtriturbo._C:ops.thing": nothing}):
        assert Place("ixtriturbo._C.ops", "thing").find() is nothing
        assert [r.subject for r in Place("ixtriturbo._C.ops", "other").missing()] == ["symbol"]
        assert [r.subject for r in Place("ixtriturbo._D.ops", "thing").missing()] == ["library"]
        assert [r.subject for r in Place("ixtriturbo._C.cuda", "thing").missing()] == ["library"]


def test_vllm_is_imported_before_packages_that_need_it(tmp_path, monkeypatch):
    """As the real ones, whose circular import fails otherwise."""
    (tmp_path / "vllm_iluvatar").mkdir()
    (tmp_path / "vllm.py").write_text("READY = True\n")
    (tmp_path / "vllm_iluvatar" / "__init__.py").write_text(
        "import sys\nif 'vllm' not in sys.modules:\n    raise ImportError('circular')\ndef thing(): return 1\n"
    )
    with installed({}):
        for name in ("vllm", "vllm_iluvatar"):
            sys.modules.pop(name, None)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert [r.subject for r in Place("vllm_iluvatar", "thing").missing()] == ["library"]
        assert list(Place("vllm_iluvatar", "thing", before=("vllm",)).missing()) == []


def test_a_compiled_op_without_a_signature_is_judged_by_its_results():
    with installed({"ixformer.functions:op": torch.relu}):
        assert list(Place("ixformer.functions", "op", parameters=("x", "y")).missing()) == []
