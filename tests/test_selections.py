# SPDX-License-Identifier: Apache-2.0
"""Files of selections: what is written is read, what no indexer selects is refused, what benchmarks make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import document, invoke
from kernel_bench import run, workshop
from spoiled import registry_with

from mla_portable.bench.kernel_records import measured_times
from mla_portable.bench.prompts import make_layer, time_step
from mla_portable.capability.run import read_run
from mla_portable.contracts import InvalidArgument
from mla_portable.dispatch import serving
from mla_portable.judge.problems.bench import kernel_cases
from mla_portable.judge.problems.selection_lists import LayerLists, statistics_of, typical_layers
from mla_portable.judge.problems.selections import IndexSample, Selections, read_selections, write_selections
from mla_portable.primitives import (
    CACHE_WRITE,
    INDEXER_SELECT,
    MASKED_PREFILL,
    PACK_SELECTION,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)

CPU = torch.device("cpu")
K, CONTEXT, ROWS = 8, 64, 40
LISTS = (SPARSE_DECODE, SPARSE_PREFILL, MASKED_PREFILL, PACK_SELECTION)
INDEX = (TOPK_SELECT, INDEXER_SELECT)
SHARED = (0.25, 0.5, 0.75)
"""Of the keys of neighbours, by layer."""


def lists(share: float, first: int = CONTEXT - ROWS + 1, last: int = CONTEXT, seed: int = 0) -> np.ndarray:
    """[rows, K] in no order: each row keeps so many of the keys before it, and takes others that it did not have."""
    g, rows = np.random.default_rng(seed), list[list[int]]()
    for seen in range(first, last + 1):
        before = rows[-1] if rows else []
        if seen <= K:
            rows.append([*range(seen), *[-1] * (K - seen)])
            continue
        had, kept = g.permutation([each for each in before if each >= 0]).tolist(), round(share * K)
        others = [key for key in g.permutation(seen).tolist() if key not in before]
        rows.append(g.permutation([*had[:kept], *others, *had[kept:]][:K]).tolist())
    return np.array(rows)


def sample(rows: int = 12, layers: tuple[int, ...] = (7,), seed: int = 0) -> IndexSample:
    g = torch.Generator().manual_seed(seed)
    keys, queries = (torch.randn(len(layers), *shape, 128, generator=g).bfloat16() for shape in ((CONTEXT,), (rows, 2)))
    return IndexSample(
        np.array(layers), keys, queries, torch.rand(len(layers), rows, 2, generator=g), CONTEXT - np.arange(rows)[::-1]
    )


def given(**changes: Any) -> dict[str, Any]:
    found = {
        "positions": np.stack([lists(share, seed=at) for at, share in enumerate(SHARED)]),
        "seen": np.arange(CONTEXT - ROWS + 1, CONTEXT + 1),
        "model": "tiny",
        "made": "drawn by a test",
        "layers": [2, 5, 7],
        "index": sample(),
    }
    return found | changes


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selections") / "tiny.npz"
    write_selections(path, **given())
    return path


@pytest.fixture(scope="module")
def selections(file: Path) -> Selections:
    return read_selections(file)


def test_what_is_written_is_read(selections: Selections):
    wanted = given()
    assert (selections.model, selections.made, selections.topk) == ("tiny", "drawn by a test", K)
    for name in ("positions", "seen", "layers"):
        assert np.array_equal(getattr(selections, name), wanted[name])
    assert selections.request.tolist() == [0] * ROWS
    kept, own = selections.index, wanted["index"]
    assert kept is not None and np.array_equal(kept.seen, own.seen) and kept.layers.tolist() == [7]
    for name in ("keys", "queries", "weights"):
        assert torch.equal(getattr(kept, name), getattr(own, name)), name


def test_tensors_are_written_too(tmp_path: Path):
    wanted = given()
    changed = {name: torch.as_tensor(wanted[name]) for name in ("positions", "seen")}
    written = write_selections(tmp_path / "x.npz", **wanted | changed | {"index": None, "layers": None})
    found = read_selections(tmp_path / "x.npz")
    assert np.array_equal(found.positions, written.positions) and found.layers.tolist() == [0, 1, 2] and found.index is None


def spoiled(**places: int) -> np.ndarray:
    """Positions with one value changed in the second layer's row 3."""
    positions = given()["positions"].copy()
    for entry, value in places.items():
        positions[1, 3, int(entry[1:])] = value
    return positions


TWICE = given()["positions"][1, 3, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": spoiled(_2=CONTEXT)}, "positions: got 7 distinct positions below 28 in row 3 of layer 5, expected min"),
        ({"positions": spoiled(_2=28)}, "7 distinct positions below 28 in row 3"),
        ({"positions": spoiled(_2=-1)}, "7 distinct positions below 28 in row 3"),
        ({"positions": spoiled(_2=-7)}, "7 distinct positions below 28 in row 3"),
        ({"positions": spoiled(_2=TWICE)}, "7 distinct positions below 28 in row 3"),
        ({"positions": np.zeros((3, ROWS, K))}, "positions: got float64"),
        ({"positions": np.zeros((3, ROWS), int)}, "integers of 3 dimensions"),
        ({"positions": np.zeros((3, ROWS, 0), int)}, "not empty"),
        ({"seen": np.arange(5, 5 + ROWS - 1)}, r"seen: got shape \[39\]"),
        (
            {"seen": np.arange(CONTEXT, CONTEXT - ROWS, -1)},
            "seen: got 64, then 63 in row 1, expected ascending within a request",
        ),
        ({"seen": np.arange(ROWS)}, "seen: got 0, expected at least 1"),
        ({"request": [0, 1] * (ROWS // 2)}, "request: got rows of one request apart"),
        ({"layers": [2, 2, 7]}, "layers: got .* ascending"),
        ({"layers": [2, 5]}, r"layers: got shape \[2\], expected \[3\]"),
        ({"model": " "}, "model: got ' ', expected a line of text"),
        ({"made": "a\nb"}, "made: "),
        ({"index": sample(layers=(3,))}, r"index_layers: got \[3\], expected layers of the file"),
    ],
)
def test_what_no_indexer_selects_is_refused(changes: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(InvalidArgument, match=words):
        write_selections(tmp_path / "x.npz", **given(**changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("keys", torch.zeros(1, CONTEXT, 64), "64 numbers a key"),
        ("queries", torch.zeros(1, 12, 128), "not empty"),
        ("weights", torch.zeros(1, 12, 3), "index_weights"),
        ("seen", np.arange(60, 72), "index_seen: got 60 to 71, expected ascending numbers from 1 to 64"),
        ("weights", torch.full((1, 12, 2), float("nan")), "not finite"),
    ],
)
def test_inputs_of_an_indexer_fit_one_another(name: str, value: Any, words: str):
    own = sample()
    changed = {each: getattr(own, each) for each in ("layers", "keys", "queries", "weights", "seen")} | {name: value}
    with pytest.raises(InvalidArgument, match=words):
        IndexSample(**changed)


def broken(path: Path, **changes: Any) -> None:
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays |= changes
    with path.open("wb") as file:
        np.savez_compressed(file, **{name: value for name, value in arrays.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": np.int32(2)}, "format: got 2, expected 1"),
        ({"seen": None, "index_keys": None}, "arrays: got without seen, index_keys"),
        ({"extra": np.zeros(1)}, "arrays: got with extra"),
        ({"positions": given()["positions"].astype(np.int64)}, "positions: got int64, expected int32"),
        ({"about": np.str_("no json")}, "file of selections"),
        ({"about": np.str_(json.dumps({"model": 3}))}, 'JSON with the texts "model" and "made"'),
        ({"about": np.array([{}], object)}, "file: got ValueError: .*pickle"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(changes: dict[str, Any], words: str, file: Path, tmp_path: Path):
    path = tmp_path / "mine.npz"
    path.write_bytes(file.read_bytes())
    broken(path, **changes)
    with pytest.raises(InvalidArgument, match=f"mine.npz: .*{words}"):
        read_selections(path)


def test_what_is_no_archive_is_refused_with_its_name(file: Path, tmp_path: Path):
    half, text, array = (tmp_path / name for name in ("half.npz", "text.npz", "array.npz"))
    half.write_bytes(file.read_bytes()[:4000])
    text.write_text("[]")
    with array.open("wb") as opened:
        np.save(opened, np.zeros(3))
    for path in (half, text, array, tmp_path / "none.npz"):
        with pytest.raises(InvalidArgument, match=f"{path.name}: file: got .*expected a"):
            read_selections(path)
    with pytest.raises(InvalidArgument, match=r"a name that ends in \.npz"):
        write_selections(tmp_path / "mine.txt", **given())


def test_statistics_are_those_of_the_lists(selections: Selections):
    for layer, share in zip((2, 5, 7), SHARED, strict=True):
        found = statistics_of(selections, layer)
        assert found.overlap == pytest.approx(share) and (found.rows, found.pairs) == (ROWS, ROWS - 1)
        assert 0.3 < found.ascending < 0.7 and 0.3 < found.distance < 0.7 and sum(found.profile) == pytest.approx(1)
        assert found.first == found.last == 1  # of at most 64 keys
        assert found.distinct is None
    assert typical_layers(selections) == (2, 5, 7)
    with pytest.raises(InvalidArgument, match="layer: got 3, expected one of 2, 5, 7"):
        statistics_of(selections, 3)


def window(rows: int = 80, context: int = 400) -> Selections:
    """One layer: the last 6 keys and the first 2, in order."""
    seen = np.arange(context - rows + 1, context + 1)
    positions = np.concatenate([np.tile([0, 1], (rows, 1)), seen[:, None] - 6 + np.arange(6)], axis=1)
    return Selections("window", "by hand", positions[None], seen, np.zeros(rows, int), np.array([0]))


def test_a_window_is_near_in_order_and_side_by_side():
    found = statistics_of(window(), 0)
    assert (found.overlap, found.ascending, found.first, found.last) == (7 / 8, 1, 0.25, 0.75)
    assert found.distance < 0.02 and found.side_by_side == 6 / 8
    assert found.distinct == pytest.approx((2 + 6 + 63) / 8)
    assert sum(found.profile[:5]) == 0.25 and sum(found.profile[-7:]) == 0.75  # the first and the last 64th, in parts


def test_rows_that_see_no_more_than_k_keys_do_not_count():
    seen = np.arange(1, K + 1)
    short = Selections("short", "by hand", lists(0.5, 1, K)[None], seen, np.zeros(K, int), np.array([0]))
    with pytest.raises(InvalidArgument, match="one that sees more than K = 8"):
        statistics_of(short, 0)
    both = Selections("both", "by hand", lists(0.5, 1, 40)[None], np.arange(1, 41), np.zeros(40, int), np.array([0]))
    assert statistics_of(both, 0).rows == 40 - K


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(("topk", "first", "last"), [(K, 30, 60), (24, 400, 430), (16, 5, 60)])
def test_lists_are_drawn_like_a_layer(selections: Selections, layer: int, topk: int, first: int, last: int):
    """Neighbours share exactly what they share in the file, each request by itself; rows are what an indexer can select."""
    number, g = int(selections.layers[layer]), torch.Generator().manual_seed(1)
    drawn = LayerLists(selections, number, drawn=True)
    found = drawn.of_neighbours(first, last, topk, batch=2, device=CPU, generator=g)
    assert str(drawn) == f"drawn like layer {number} of tiny" and not torch.equal(found[0], found[1])
    seen = np.arange(first, last + 1)
    for rows in found.numpy():
        mine = Selections("drawn", "here", rows[None], seen, np.zeros(len(seen), int), np.array([0]))  # refuses what cannot be
        stats = statistics_of(mine, 0)
        room = (seen - topk).max() >= topk
        if room and first > 2 * topk:
            assert stats.overlap == pytest.approx(round(SHARED[layer] * topk) / topk)
        assert stats.ascending == 1


def test_drawn_lists_lie_where_the_layers_do():
    """The first and last parts of a context have the keys that they have in the file, in proportion to its length."""
    narrow, g = window(), torch.Generator().manual_seed(2)
    found = LayerLists(narrow, 0, drawn=True).of_requests(200, 4000, 80, device=CPU, generator=g)
    near, far = (found >= 4000 - 80).float().mean(), (found < 40).float().mean()
    assert near == pytest.approx(0.75, abs=0.1) and far == pytest.approx(0.25, abs=0.1)


def test_a_layer_without_neighbours_draws_single_rows_alone(selections: Selections):
    alone = Selections("alone", "by hand", selections.positions, selections.seen, np.arange(ROWS), selections.layers)
    drawn, g = LayerLists(alone, 2, drawn=True), torch.Generator().manual_seed(0)
    assert drawn.of_requests(3, 100, 16, device=CPU, generator=g).shape == (3, 16)
    with pytest.raises(InvalidArgument, match="request: got no neighbours"):
        drawn.of_neighbours(90, 99, 16, device=CPU, generator=g)
    assert typical_layers(alone) == (2, 5, 7)
    with pytest.raises(InvalidArgument, match="no neighbours"):
        kernel_cases([SPARSE_PREFILL], rows=(4,), heads=(2,), topk=16, widths=(64,), selections=alone, selected_by=(2,))


SMALL: dict[str, Any] = {"heads": (2,), "topk": K, "layouts": None}


def cases(selections: Selections, *primitives: Any, **changes: Any) -> tuple[Any, ...]:
    return kernel_cases(primitives, selections=selections, **{**SMALL, "rows": (4,), "selected_by": (7,), **changes})


@pytest.mark.parametrize("primitive", [SPARSE_PREFILL, PACK_SELECTION])
def test_lists_of_the_file_are_replayed_where_they_fit(primitive: Any, selections: Selections):
    case = cases(selections, primitive)[0]
    assert str(case.selection) == "layer 7 of tiny" and case.width == CONTEXT and case.shape.endswith("layer 7 of tiny")
    name = "indices" if primitive is SPARSE_PREFILL else "topk_indices"
    assert np.array_equal(workshop().make(case).arguments[name].numpy(), selections.positions[2, -4:])


def test_decode_rows_have_lists_of_their_own_in_contexts_of_their_own(selections: Selections):
    case = cases(selections, SPARSE_DECODE)[0]
    indices = workshop().make(case).arguments["indices"][:, 0].numpy()
    assert case.width == 4 * CONTEXT and str(case.selection) == "layer 7 of tiny"
    assert np.array_equal(indices - CONTEXT * np.arange(4)[:, None], selections.positions[2, [0, 13, 26, 39]])


@pytest.mark.parametrize(
    "changes", [{"topk": 2 * K}, {"rows": (ROWS + 1,)}, {"widths": (512,)}], ids=["K", "more rows", "a width"]
)
@pytest.mark.parametrize("primitive", [SPARSE_DECODE, SPARSE_PREFILL, PACK_SELECTION])
def test_what_does_not_fit_is_drawn_and_says_so(primitive: Any, changes: dict[str, Any], selections: Selections):
    for case in cases(selections, primitive, **changes):
        assert case.shape.endswith(", drawn like layer 7 of tiny")


def test_a_size_that_fits_the_file_at_several_widths_is_one_case(selections: Selections):
    """masked_prefill has two widths by default, and both become the file's."""
    found = cases(selections, MASKED_PREFILL)
    assert len(found) == len({each.shape for each in found}) == 2, "one for each pair of head dims"


def test_more_tokens_of_a_request_than_it_has_keys_are_refused(selections: Selections):
    with pytest.raises(InvalidArgument, match="width: got 16, expected at least 20, the rows"):
        cases(selections, SPARSE_PREFILL, rows=(20,), widths=(16,))


def test_a_primitive_that_takes_no_selections_is_refused_where_it_is_named(selections: Selections):
    with pytest.raises(InvalidArgument, match="primitive: got cache_write, expected one of sparse_decode"):
        cases(selections, CACHE_WRITE)
    found = {case.primitive for case in cases(selections, rows=(2,))}
    assert found == {*LISTS, *INDEX}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"selected_by": (2,)}, r"index: got inputs of layers \[7\], expected those of layer 2"),
        ({"rows": (13,)}, "rows: got 13, expected at most 12 rows"),
        ({"widths": (128,)}, "width: got 128, expected 64, as the indexer's inputs have"),
    ],
)
@pytest.mark.parametrize("primitive", INDEX)
def test_inputs_of_an_indexer_are_replayed_or_refused(
    primitive: Any, changes: dict[str, Any], words: str, selections: Selections
):
    with pytest.raises(InvalidArgument, match=words):
        cases(selections, primitive, **changes)


def test_scores_of_a_case_are_those_of_the_inputs(selections: Selections):
    (case,) = cases(selections, TOPK_SELECT)
    arguments, index = workshop().make(case).arguments, selections.index
    assert index is not None and arguments["row_ends"].tolist() == [53, 57, 60, 64]
    for row, at in enumerate((0, 4, 7, 11)):
        scores = (index.queries[0, at].double() @ index.keys[0].double().T).relu()
        wanted = index.weights[0, at].double() @ scores
        torch.testing.assert_close(arguments["logits"][row].double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layout", ["index_fp8", "index_bf16"])
def test_the_indexer_is_given_the_model_s_inputs(layout: str, selections: Selections):
    """It selects what the scores of the inputs say, but for what FP8 rounds."""
    (case,) = cases(selections, INDEXER_SELECT, layouts=(layout,), heads=None)
    assert (case.num_heads, case.width) == (2, CONTEXT)
    problem, index = workshop().make(case), selections.index
    assert index is not None
    factors = index.queries[0, [0, 4, 7, 11]].double() * index.weights[0, [0, 4, 7, 11]].double().unsqueeze(2)
    given_to_it = problem.arguments["q"].double() * problem.arguments["weights"].double().unsqueeze(2)
    torch.testing.assert_close(given_to_it, factors, rtol=0.07, atol=0.01)
    got = problem.call(INDEXER_SELECT.reference)
    assert not [each.message for each in problem.check(got) if each.message]
    (scored,) = cases(selections, TOPK_SELECT)
    exact = workshop().make(scored).arguments
    for row, end in enumerate(exact["row_ends"].tolist()):
        want = exact["logits"][row, :end].topk(K).indices
        same = int(torch.isin(got[row], want).sum())
        assert same == K if layout == "index_bf16" else same >= K - 2


def test_a_mask_selects_what_the_lists_name(selections: Selections):
    case = cases(selections, MASKED_PREFILL)[0]
    words = workshop().make(case).arguments["selection"]
    chosen = torch.stack([words[:, bit // 32] >> (bit % 32) & 1 for bit in range(CONTEXT)], dim=1).bool()
    wanted = torch.zeros(4, CONTEXT, dtype=torch.bool).scatter_(1, torch.from_numpy(selections.positions[2, -4:]).long(), True)
    assert torch.equal(chosen, wanted)


def test_every_case_is_right_and_says_what_was_selected(selections: Selections):
    report = run(*cases(selections, rows=(3,), layouts=("bf16", "index_fp8")), *cases(selections, SPARSE_PREFILL, topk=12))
    assert report.ok, report.defects()
    named = {str(each.case.selection) for each in report.cases}
    assert named == {"layer 7 of tiny", "drawn like layer 7 of tiny"}


def test_absent_entries_are_neither_read_nor_counted():
    """Tokens at the beginning of a prompt see fewer than K keys."""
    short = Selections("short", "by hand", lists(0.5, 1, 12)[None], np.arange(1, 13), np.zeros(12, int), np.array([0]))
    for case in kernel_cases(LISTS[1:3], rows=(12,), heads=(2,), topk=K, layouts=("bf16",), selections=short, selected_by=(0,)):
        report = run(case)
        assert report.ok, report.defects()
        if case.primitive is SPARSE_PREFILL:
            assert report.cases[0].flops == 2 * 2 * (576 + 512) * sum(min(K, seen) for seen in range(1, 13))


def test_prompts_attend_to_the_files_lists_or_to_some_like_them(selections: Selections):
    whole = Selections("whole", "by hand", lists(0.5, 1, 70)[None], np.arange(1, 71), np.zeros(70, int), np.array([0]))
    with serving(registry_with()):
        layer = make_layer(CPU, num_heads=2, layout="bf16", topk=K, max_num_tokens=128, max_model_len=128)
        named = []
        for requests, source in (
            (((20, 70),), whole),
            (((20, 70),) * 2, whole),
            (((20, 90),), whole),
            (((30, 30),), selections),
        ):
            times = time_step(layer, requests, repeat=1, selected=(source, int(source.layers[-1])))
            assert times.error < 0.02
            named.append(times.selection)
        assert time_step(layer, ((20, 70),), repeat=1).selection == ""
    assert named == ["layer 0 of whole"] * 2 + ["drawn like layer 0 of whole", "drawn like layer 7 of tiny"]


def test_the_command_shows_each_layer(file: Path):
    shown = " ".join(invoke("bench", "selections", str(file)).stdout.split())
    assert "tiny" in shown and "drawn by a test" in shown and "of layers 7" in shown
    found = document("bench", "selections", str(file))
    assert [each["layer"] for each in found["layers"]] == [2, 5, 7] and found["topk"] == K
    assert [each["overlap"] for each in found["layers"]] == pytest.approx(SHARED)


def test_the_benchmark_records_whose_selections_it_used(file: Path, tmp_path: Path):
    out = tmp_path / "run.json.gz"
    words = f"bench kernels --primitive sparse_prefill --layout bf16 --heads 2 --rows 4 --repeat 1 --selections {file}"
    done = document(*words.split(), "--layers", "5", "--out", str(out), "--who", "me", "--backend", "reference")
    assert {line["selection"] for line in done["lines"]} == {"layer 5 of tiny"}
    assert {(time.selection, time.random) for time in read_run(out).times} == {("layer 5 of tiny", False)}
    (time,) = read_run(out).times
    assert time.problem != time.model_copy(update={"selection": ""}).problem, "they are never compared"
    assert not measured_times(read_run(out), {}) and measured_times(
        read_run(out).model_copy(update={"times": [time.model_copy(update={"selection": ""})]}), {}
    )
    assert "layer 5 of tiny" in invoke(*words.split(), "--layers", "5", "--backend", "reference").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("kernels --layers 3", "--layers needs --selections"),
        ("kernels --selections FILE --layers 3", "--layers must be of 2, 5, 7 (got 3)"),
        ("kernels --selections FILE --overlap 50", "--overlap must be 0 beside --selections"),
        ("kernels --selections none.npz", "none.npz: file: got FileNotFoundError"),
        ("prompts --selections FILE --fit --out x.json", "--out must not be given beside --selections"),
        ("selections none.npz", "FILE must be a file that is there"),
    ],
)
def test_what_cannot_be_meant_is_code_2(words: str, says: str, file: Path):
    done = invoke("bench", *words.replace("FILE", str(file)).split(), code=2)
    assert says in " ".join(done.stderr.split())
