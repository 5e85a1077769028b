# SPDX-License-Identifier: Apache-2.0
"""Levels follow from declarations, evidence and source hashes alone; what is not whole proves nothing; pages show it."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from acme_records import (
    ALL,
    NOW,
    OLD,
    PROFILES,
    SUPPORT,
    acme_claim,
    benchmark,
    cases,
    cells,
    compiled,
    conformance,
    evidence,
    hashes,
    interpreted,
    profile,
)

from mla_portable.contracts import Reason, Support
from mla_portable.tools.matrix import evidence as evidence_module
from mla_portable.tools.matrix.arrange import make_table
from mla_portable.tools.matrix.claims import Declarations, support_data, wider
from mla_portable.tools.matrix.evidence import problems_of, without_folders
from mla_portable.tools.matrix.levels import Hashes, evaluate
from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.profiles import load_profiles, parse_profile
from mla_portable.tools.matrix.records import Records, read_records
from mla_portable.tools.matrix.render import FORMATS, markdown
from mla_portable.tools.matrix.table import Table, table_text
from mla_portable.tools.matrix.words import LETTERS, LEVELS, STATES, family

ROOT = Path(__file__).parents[1]


LADDER = ("declared", "compiled", "interpreted", "verified", "measured")
RAN_OLDER = conformance(mode="ptx", target="xy1")
BOTH_TARGETS = acme_claim(targets=("sm90", "xy1"))
BAD = conformance(cases=cases(8, failed=1))
NARROW = conformance(match="holes")


@pytest.mark.parametrize(
    ("records", "device", "level", "shown", "options"),
    [
        # each kind of evidence raises the level by one, and there is no level without it
        *((ALL[:count], "big", level, level, {}) for count, level in enumerate(LADDER)),
        ((compiled(), benchmark()), "big", "compiled", "partial", {}),
        ((interpreted(),), "big", "declared", "partial", {}),
        ((interpreted(),), "odd", "interpreted", "interpreted", {}),
        # one device says nothing of another
        (ALL, "odd", "interpreted", "interpreted", {}),
        (ALL, "cpu", "interpreted", "interpreted", {}),
        # code of an older device that ran on a newer one
        ((compiled(target="xy1"), RAN_OLDER), "odd", "compiled+run", "compiled+run", {"claimed": BOTH_TARGETS}),
        ((compiled(), compiled(target="xy1"), RAN_OLDER), "big", "compiled", "compiled", {"claimed": BOTH_TARGETS}),
        ((RAN_OLDER,), "odd", "declared", "partial", {"claimed": BOTH_TARGETS}),
        ((compiled(target="xy1"), RAN_OLDER | {"dirty": True}), "odd", "compiled", "partial", {"claimed": BOTH_TARGETS}),
        # a benchmark counts beside a conformance run of the same sources only
        ((benchmark(),), "big", "declared", "partial", {}),
        ((conformance(source_hash=OLD), benchmark()), "big", "declared", "stale", {}),
        ((conformance(), benchmark(source_hash=OLD)), "big", "verified", "stale", {}),
        ((conformance(), benchmark(dirty=True)), "big", "verified", "partial", {}),
        # of the same sources the newest counts, but a narrow run undoes nothing, and heals nothing
        ((conformance(), BAD), "big", "declared", "failing", {}),
        ((BAD, conformance()), "big", "verified", "verified", {}),
        ((conformance(), NARROW), "big", "verified", "verified", {}),
        ((NARROW,), "big", "declared", "partial", {}),
        ((compiled(), conformance(), BAD, NARROW), "big", "compiled", "partial", {}),
        ((compiled(), conformance(), BAD, NARROW, conformance()), "big", "verified", "verified", {}),
    ],
)
def test_what_is_proven(records: Any, device: str, level: str, shown: str, options: dict[str, Any]) -> None:
    cell = cells(*records, **options)[device]
    assert (cell.level, cell.state) == (level, shown), cell.reasons


@pytest.mark.parametrize(
    ("spoil", "shown", "word"),
    [
        ({"cases": cases(8, failed=1)}, "failing", "1 of 9 failed"),
        ({"cases": cases(8, skipped=1)}, "partial", "1 case skipped"),
        ({"cases": cases(0)}, "partial", "nothing ran"),
        ({"dirty": True}, "partial", "uncommitted changes"),
        ({"match": "holes"}, "partial", "only cases that contain 'holes'"),
        ({"level": "smoke"}, "partial", "level smoke"),
        ({"source_hash": OLD}, "stale", "the sources changed since 2026-11-01"),
        ({"suite_hash": OLD}, "stale", "the conformance suite changed"),
        ({"support": SUPPORT | {"max_heads": 64}}, "partial", "num_heads 65 to 128"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_not_whole_verifies_nothing(spoil: dict[str, Any], shown: str, word: str) -> None:
    cell = cells(compiled(), conformance(**spoil))["big"]
    assert (cell.level, cell.state) == ("compiled", shown)
    assert any(word in reason for reason in cell.reasons), cell.reasons


def test_cells_say_why() -> None:
    assert "interpreted, but not compiled for sm90" in cells(interpreted())["big"].reasons
    assert "no ahead-of-time target for xy1" in cells(interpreted())["odd"].reasons
    ran = cells(compiled(target="xy1"), RAN_OLDER, claimed=BOTH_TARGETS)["odd"]
    assert "the code for xy1 ran on Acme Big" in ran.reasons
    against = (Reason("arch", "xy1", "supports sm90"),)
    never = cells(claimed=acme_claim(devices={"big": (), "odd": against, "cpu": ()}))["odd"]
    assert (never.state, never.reasons) == ("never", ("arch xy1 (supports sm90)",))


def test_a_layout_is_proven_by_itself() -> None:
    both = acme_claim(support=SUPPORT | {"kv_layouts": ["bf16", "fp8_ds_mla"]})
    found = evaluate([both], evidence(conformance(support=both.support)), hashes(), PROFILES)
    assert {c.layout: c.state for c in found if c.device == "big"} == {"bf16": "verified", "fp8_ds_mla": "declared"}


def test_evidence_is_bound_to_the_code_of_the_architecture_that_ran() -> None:
    moved = {("acme.v1", "sparse_decode", arch): NOW if arch != "cpu" else OLD for arch in ("sm90", "xy1", "cpu")}
    found = evaluate([acme_claim()], evidence(*ALL), Hashes(moved, hashes().suite), PROFILES)
    assert {cell.device: cell.state for cell in found} == {"big": "measured", "odd": "stale", "cpu": "stale"}


def test_what_is_not_published_is_unknown_not_never() -> None:
    against = {"dim": (Reason("shared memory", "0 bytes", "needs 49152"),)}
    for facts, shown in (({"has_bf16": True}, "unknown"), ({"has_bf16": True, "shared_memory": 0}, "never")):
        dim = profile("dim", "xy2", "Acme Dim", facts=facts)
        assert evaluate([acme_claim(devices=against)], [], hashes(), {"dim": dim})[0].state == shown


# declarations


WIDER: dict[str, tuple[Any, Any, str]] = {
    # field -> what evidence covers, what is declared, word
    "num_heads": ((16,), (16, 64), "num_heads 64"),
    "max_heads": (128, 256, "num_heads 129 to 256"),
    "padded_heads": ((64,), (64, 128), "num_heads 65 to 128"),
    "kv_layouts": (("bf16",), ("bf16", "fp8_ds_mla"), "kv_layouts fp8_ds_mla"),
    "archs": (("sm90",), None, "archs any"),
    "topk_multiple": (64, 32, "topk_multiple 32"),
    "max_topk": (2048, 4096, "max_topk 4096 (evidence covers 2048)"),
    "max_query_len": (2, None, "max_query_len without limit"),
    "min_shared_memory": (9, 0, "min_shared_memory 0"),
}
"""Every other field of Support follows from its type."""
BY_TYPE: dict[str, tuple[Any, Any]] = {"bool": (False, True), "int": (16, 8), "int | None": (8, None)}


@pytest.mark.parametrize("name", [field.name for field in fields(Support) if field.name not in ("source", "workspace_bytes")])
def test_every_way_to_widen_a_declaration_is_noticed(name: str) -> None:
    annotation = next(str(field.type) for field in fields(Support) if field.name == name)
    before, after = WIDER[name][:2] if name in WIDER else BY_TYPE.get(annotation, (("pow2",), ("pow2", "amax")))
    if name.startswith("needs_"):
        before, after = True, False
    old = {**support_data(Support(source="s")), name: before}
    (found,) = wider(old, old | {name: after})
    assert (WIDER[name][2] if name in WIDER else name) in found
    assert wider(old, old) == [] == wider(old | {name: after}, old)
    assert wider(SUPPORT, {"source": "s"})[0].startswith("num_heads any")
    assert json.loads(json.dumps(support_data(Support(source="s")))).keys() == support_data(Support(source="s")).keys()


# profiles


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"facts": {"shared_memory": 1}, "sources": {"arch": "x"}}, "shared_memory: each fact"),
        ({"sources": {"arch": "x", "num_sms": "x"}}, "num_sms: each fact"),
        ({"facts": {"cores": 1}, "sources": {"arch": "x", "cores": "x"}}, "facts/cores"),
        ({"facts": {"num_sms": -1}, "sources": {"arch": "x", "num_sms": "x"}}, "facts/num_sms.*greater than or equal to 0"),
        ({"facts": {"has_bf16": 1}, "sources": {"arch": "x", "has_bf16": "x"}}, "facts/has_bf16.*boolean"),
        ({"pattern": "("}, "pattern"),
        ({"level": "verified"}, "level"),
        ({"vendor": ""}, "vendor"),
    ],
)
def test_a_profile_without_sources_or_with_nonsense_is_refused(change: dict[str, Any], word: str) -> None:
    words = {"name": "n", "vendor": "v", "arch": "a", "device_type": "cuda", "pattern": "p"}
    with pytest.raises(RecordError, match=word):
        parse_profile("x", words | {"sources": {"arch": "x"}} | change)


def test_every_device_of_interest_has_a_profile_and_no_two_share_a_name() -> None:
    profiles = load_profiles(ROOT / "capability" / "profiles")
    wanted = (
        "a100-80g a10 rtx3090 l40s rtx4090 h20 h100 h200 b200 rtx5090 gb10 mi300x mi355x bi-v100 bi-v150 mr-v100 tg-v200 cpu"
    )
    assert set(wanted.split()) <= set(profiles)
    names = {
        "NVIDIA A100-SXM4-80GB": "a100-80g",
        "NVIDIA A10": "a10",
        "NVIDIA H20": "h20",
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "Iluvatar BI-V150": "bi-v150",
        "CPU x86_64": "cpu",
    }
    for name, slug in names.items():
        assert [p.slug for p in profiles.values() if p.matches(name)] == [slug]
    assert profiles["h200"].device_facts().shared_memory == 227 << 10


# pages


def drawn() -> Table:
    return make_table(Records(Path(), PROFILES, Declarations((acme_claim(),)), tuple(evidence(*ALL)), hashes()))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_shows_the_same_states(form: str) -> None:
    text = FORMATS[form](drawn())
    assert text == FORMATS[form](drawn())
    assert all(word in text for word in ("measured", "interpreted", "never") if (form, word) != ("json", "never"))
    assert "2026-11-01" in text and "<script" not in text
    if form == "md":
        assert "measured: acme.v1 on Acme Big, 2026-11-01" in text
        assert "no ahead-of-time target for xy1" in text
        for said in ("1 benchmark", "9 cases", "3 kernel variants, one that serves two primitives counted twice"):
            assert f"`make it so` ({said}; " in text


def test_the_picture_and_the_page_stand_alone() -> None:
    picture, page = (FORMATS[form](drawn()) for form in ("svg", "html"))
    squares = [each.text for each in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}title")]
    assert len(squares) == len(drawn().devices) * len(drawn().columns)
    assert "big, sparse_decode BF16: measured acme.v1" in squares
    assert "ran on this device" in picture and "never ran on this device" in picture
    for needed in ('name="viewport"', "position: sticky", "What the words mean", '<td class="measured">'):
        assert needed in page
    assert not re.search(r"(?:src|href)=\"(?!#)|/tmp/", page)


def test_the_file_holds_the_whole_table_a_claim_a_line() -> None:
    assert Table.model_validate_json(table_text(drawn())) == drawn()
    lines = [line for line in table_text(drawn()).splitlines() if "acme.v1" in line and '"devices"' in line]
    assert len(lines) == len(drawn().offers) == 1


def test_a_place_names_the_best_and_tells_what_ran_there_from_what_did_not() -> None:
    columns = [column.primitive for column in drawn().columns]
    states = {d.slug: entries[columns.index("sparse_decode")].known.state for d, entries in drawn().rows}
    assert states == {"big": "measured", "odd": "interpreted", "cpu": "interpreted"}
    assert [family(state) for state in LEVELS] == ["other"] * 4 + ["ran"] * 2
    assert len(set(LETTERS.values())) == len(STATES) == len(LETTERS)


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("bench --out /tmp/w2/decode.jsonl --plot=/home/me/a.svg", "bench --out decode.jsonl --plot=a.svg"),
        ("python ci/record_evidence.py conform triton", "python ci/record_evidence.py conform triton"),
        ("/usr/bin/python3 -m acme '/x y'", "python3 -m acme 'x y'"),
    ],
)
def test_no_record_names_a_folder_of_the_machine(command: str, kept: str) -> None:
    assert without_folders(command) == kept
    assert problems_of(compiled(command=kept), PROFILES) == []
    assert bool(problems_of(compiled(command=command), PROFILES)) == (command != kept)


def test_drawing_reads_each_file_and_validates_each_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "capability"
    read: list[Path] = []
    validated: list[str] = []
    original, check = Path.read_text, evidence_module.problems_of
    monkeypatch.setattr(Path, "read_text", lambda path, **options: (read.append(path), original(path, **options))[1])
    monkeypatch.setattr(evidence_module, "problems_of", lambda data, known: (validated.append(""), check(data, known))[1])
    found = read_records(folder)
    markdown(make_table(found))
    lines = sum(len(original(path).splitlines()) for path in (folder / "evidence").rglob("*.jsonl"))
    assert len(validated) == lines == len(found.evidence) > 100
    records = [path for path in read if path.suffix == ".jsonl"]
    assert len(records) == len(set(records))
