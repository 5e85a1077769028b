# SPDX-License-Identifier: Apache-2.0
"""Tuning: the fastest configuration that is right everywhere wins, and kernels are bound with it from then on."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_reference as reference
from machines import CPU, H200
from spoiled import WRONG, registry_with
from typer.testing import CliRunner

from mla_portable.bench.tune import Attempt, TuneResult, tune
from mla_portable.cli.app import app
from mla_portable.contracts import (
    Implementation,
    InvalidArgument,
    Registrar,
    Request,
    Support,
    Tunable,
    hookimpl,
)
from mla_portable.dispatch import serving
from mla_portable.primitives import CACHE_WRITE, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.problems.bench import KernelCase
from mla_portable.registry import Registry
from mla_portable.registry.tuned import TunedConfigurations, TunedEntry, read_table, table_path, write_table
from mla_portable.times.measured import MeasuredCosts
from mla_portable.times.records import MeasuredTime, Measurement

NAME = "acme.v1"
DECODE = SPARSE_DECODE
CASES = [KernelCase(DECODE, rows, "bf16", 2, 16, 64) for rows in (1, 3)]
CONFIGURATIONS = [{"delay": 4, "wrong": 0}, {"delay": 0, "wrong": 0}, {"delay": 0, "wrong": 1}, {"delay": 0, "wrong": 2}]
"""Untuned, the fastest, a wrong one, one that fails with several rows."""


class Clock:
    """Stands for the module `time`: it advances by what a call is said to take, however busy the machine is."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def times_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_portable.bench.timing.time", CLOCK)


def bind(request: Request, configuration: Mapping[str, int]) -> Callable[..., Any]:
    def decode(*args: Any, **options: Any) -> Any:
        CLOCK.now += (1 + configuration["delay"]) * 1e-3
        if configuration["wrong"] == 2 and args[0].shape[0] > 1:
            raise RuntimeError("out of resources")
        return (WRONG["sparse_decode"] if configuration["wrong"] == 1 else reference.sparse_decode)(*args, **options)

    return decode


class Plugin:
    def __init__(self, configurations: list[dict[str, int]] = CONFIGURATIONS, *, max_heads: int | None = None) -> None:
        self.tunable = Tunable(NAME, DECODE, lambda request: configurations)
        limits = {"device_types": ("cpu",), "kv_layouts": ("bf16",), "max_heads": max_heads, "graph": False}
        self.support = Support(source="this test", **limits)
        self.bound_with: list[Mapping[str, int]] = []

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add(Implementation(NAME, DECODE, self.support, self.bind, preference=10))
        registrar.add_tunables(lambda: [self.tunable])

    def bind(self, request: Request) -> Callable[..., Any]:
        configuration = dict(request.configuration or CONFIGURATIONS[0])
        if set(configuration) != set(CONFIGURATIONS[0]):
            raise InvalidArgument(NAME, "configuration", got=configuration, expected="delay and wrong")
        self.bound_with.append(configuration)
        return bind(request, configuration)


def run(plugin: Plugin, *cases: KernelCase, **options: Any) -> list[TuneResult]:
    registry = registry_with(("acme", plugin), probe=False)
    return tune(cases or CASES, [plugin.tunable], device=torch.device("cpu"), registry=registry, repeat=3, **options)


def test_the_fastest_that_is_right_on_every_size_wins():
    (result,) = run(Plugin())
    assert (result.implementation, result.primitive, result.layout, result.heads) == (NAME, "sparse_decode", "bf16", 2)
    assert result.best is not None and dict(result.best.configuration) == CONFIGURATIONS[1]
    assert set(result.best.us) == {1, 3} and result.gain == pytest.approx(5)
    first, _, wrong, failing = result.attempts
    assert list(first.us.values()) == pytest.approx([5000, 5000])
    assert "out[" in wrong.why and failing.why == "RuntimeError: out of resources" and set(failing.us) == {1}
    entry = result.entry()
    assert entry is not None and entry.configuration == CONFIGURATIONS[1] and set(entry.us) == {"1", "3"}


def test_configurations_are_ranked_as_implementations_are():
    """By one rule: the time that all sizes take together, which a ratio on a small one cannot outweigh."""
    small, large = {1: 1.0, 256: 200.0}, {1: 4.0, 256: 60.0}
    attempts = Attempt({"a": 1}, small), Attempt({"a": 2}, large)
    result = TuneResult(NAME, "sparse_decode", "bf16", 16, attempts, "a device", "now")
    assert math.prod(small.values()) < math.prod(large.values()), "a geometric mean would say otherwise"
    assert result.best is attempts[1] and result.gain == pytest.approx(201 / 64)
    support = Support(source="this test", kv_layouts=("bf16",))
    made = [Implementation(name, DECODE, support, lambda r: reference.sparse_decode) for name in ("acme.v1", "acme.v2")]
    times = [
        MeasuredTime(each.name, "sparse_decode", "bf16", 16, 2048, rows, us, Measurement(H200.name))
        for each, by_rows in zip(made, (small, large), strict=True)
        for rows, us in by_rows.items()
    ]
    costs = [MeasuredCosts(times)(each, request()) for each in made]
    assert [each and each[0] for each in costs] == [pytest.approx(10 * us / 61, abs=0.01) for us in (201, 64)]


def test_what_cannot_serve_or_was_not_asked_for_is_not_tuned():
    assert run(Plugin(max_heads=1)) == []
    assert run(Plugin(), KernelCase(CACHE_WRITE, 3, "bf16")) == []
    assert run(Plugin(), backends=["triton"]) == []
    assert len(run(Plugin(), backends=["acme"])) == 1


# ---------------------------------------------------------------------- the table


def entry(**changes: Any) -> TunedEntry:
    values: dict[str, Any] = {
        "device": H200.name,
        "implementation": NAME,
        "primitive": "sparse_decode",
        "layout": "bf16",
        "heads": 16,
        "configuration": {"block_n": 32},
        "us": {"1": 10.0},
        "recorded": "2026-11-02T00:00:00Z",
    }
    return TunedEntry(**(values | changes))


def request(**changes: Any) -> Request:
    return Request(DECODE, H200, kv_layout="bf16", num_heads=16, topk=2048).but(**changes)


def test_an_entry_holds_for_its_requests_alone(tmp_path):
    path = tmp_path / "new" / "tuned.json"

    def tuned(request: Request, name: str = NAME) -> Mapping[str, int] | None:
        found = TunedConfigurations.read({"MLA_PORTABLE_TUNED": str(path)}).of(name, request)
        return None if found is None else dict(found)

    assert tuned(request()) is None, "no table, no entry"
    write_table(path, [entry()])
    write_table(path, [entry(heads=64, configuration={"block_n": 64})])
    assert tuned(request(rows=7, graph=True)) == {"block_n": 32}
    assert tuned(request(num_heads=64)) == {"block_n": 64}
    for other in (request(num_heads=32), request(kv_layout="fp8_ds_mla"), request(primitive=SPARSE_PREFILL)):
        assert tuned(other) is None
    assert tuned(request(), "acme.v2") is None
    write_table(path, [entry(configuration={"block_n": 16})])
    assert tuned(request()) == {"block_n": 16}
    assert len(read_table(path)) == 2, "a new entry takes the place of the old one"
    path.write_text("\ufeff" + path.read_text())
    assert tuned(request()) == {"block_n": 16}, "an editor may put a byte-order mark in front"


WORDS = dict.fromkeys(TunedEntry.__slots__, "x")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 2, "entries": []}',
        '{"schema": 1, "entries": [{"device": "x"}]}',
        json.dumps({"schema": 1, "entries": [{**WORDS, "configuration": {"block_n": "32"}}]}),
        json.dumps({"schema": 1, "entries": [{**WORDS, "configuration": {}, "heads": [16]}]}),
        "[" * 100_000,
        " " * (1 << 20) + "{}",
        "",
        '{"schema": 1, "entr',
    ],
    ids=range(10),
)
def test_a_file_that_is_no_table_is_ignored_and_said_once(tmp_path, caplog, text):
    """Whether it is named or at the default path: a table makes kernels faster, and no process fails for want of one."""
    path = tmp_path / "mla-portable" / "tuned.json"
    path.parent.mkdir()
    for environ in ({"MLA_PORTABLE_TUNED": str(path)}, {"XDG_CONFIG_HOME": str(tmp_path)}):
        path.write_text(text)
        caplog.clear()
        plugin = Plugin()
        registry = Registry(plugins=[("acme", plugin)], facts={"cpu": CPU}, environ=environ)
        asked = request(device=CPU)
        for _ in range(2):
            registry.reload_policy()
            assert registry.decide(asked).chosen == NAME and registry.policy is not None
            registry.bind(asked)
        assert plugin.bound_with == [CONFIGURATIONS[0]] * 2
        (said,) = (record for record in caplog.records if "tuning table" in record.getMessage())
        assert said.levelname == "WARNING" and str(path) in said.getMessage() and "delete the file" in said.getMessage()
        assert registry.tuned_problem in said.getMessage() and registry.tuned_problem
        path.unlink()
        registry.reload_policy()
        assert registry.tuned_problem == ""


def unreadable(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Environments whose table cannot be read, whoever runs the tests."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "mla-portable" / "tuned.json").mkdir(parents=True)
    return {
        "HOME is no directory": {"HOME": "/dev/null"},
        "no HOME": {},
        "a file in the way": {"XDG_CONFIG_HOME": str(tmp_path / "file")},
        "a directory": {"XDG_CONFIG_HOME": str(tmp_path / "folder")},
    }


def test_a_default_table_that_cannot_be_read_is_no_table(tmp_path, caplog):
    caplog.set_level("INFO")
    for what, environ in unreadable(tmp_path).items():
        caplog.clear()
        plugin = Plugin()
        registry = Registry(plugins=[("acme", plugin)], environ=environ)
        asked = Request(DECODE, registry.facts("cpu"), kv_layout="bf16", num_heads=2, topk=16)
        assert registry.decide(asked).chosen == NAME, what
        registry.bind(asked)
        levels = [r.levelname for r in caplog.records if "no tuning table" in r.getMessage()]
        assert levels == (["INFO"] if environ else []), what
        assert plugin.bound_with[-1] == CONFIGURATIONS[0]


def test_a_named_table_that_cannot_be_read_is_ignored_and_said(tmp_path, caplog):
    paths = [tmp_path, tmp_path / "file" / "tuned.json", tmp_path / "fifo", Path("nul\0")]
    paths[1].parent.write_text("")
    os.mkfifo(paths[2])
    for path in paths:
        caplog.clear()
        registry = Registry(plugins=[("acme", Plugin())], facts={"cpu": CPU}, environ={"MLA_PORTABLE_TUNED": str(path)})
        assert registry.decide(request(device=CPU)).chosen == NAME
        assert f"the tuning table {path} is ignored" in caplog.text and str(path) in registry.tuned_problem
    missing = {"MLA_PORTABLE_TUNED": str(tmp_path / "new.json")}
    registry = Registry(plugins=[("acme", Plugin())], facts={"cpu": CPU}, environ=missing)
    assert registry.decide(request(device=CPU)).chosen == NAME, "tune is going to write it"
    assert "does not exist" in caplog.text and registry.tuned_problem == ""


def test_a_write_that_is_interrupted_leaves_the_table_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    write_table(path, [entry()])

    def interrupted(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_table(path, [entry(heads=64)])
    assert read_table(path) == (entry(),)
    assert {each.name for each in tmp_path.iterdir()} == {"tuned.json", "tuned.json.lock"}


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from mla_portable.registry.tuned import TunedEntry, write_table
path, first = Path(sys.argv[1]), int(sys.argv[2])
entry = TunedEntry("a device", "acme.v1", "sparse_decode", "bf16", 0, {"block_n": 32}, {"1": 2.0}, "now")
print("ready", flush=True)
sys.stdin.readline()
for heads in range(first, first + 20):
    write_table(path, [replace(entry, heads=heads)])
"""


def test_processes_that_tune_at_once_keep_the_entries_of_all(tmp_path):
    path = tmp_path / "tuned.json"
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(20 * k)], **options) for k in range(2)]
    for each in writers:
        assert each.stdout is not None and each.stdout.readline() == "ready\n"
    for each in writers:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    while any(each.poll() is None for each in writers):
        assert all(type(each.heads) is int for each in read_table(path)), "whoever reads meanwhile sees a whole table"
    assert [each.wait() for each in writers] == [0, 0]
    assert {each.heads for each in read_table(path)} == set(range(40))


def test_a_file_system_without_locks_is_written_to_and_said(tmp_path, monkeypatch, caplog):
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    write_table(tmp_path / "tuned.json", [entry()])
    assert read_table(tmp_path / "tuned.json") == (entry(),) and "No locks available" in caplog.text


def test_what_a_link_leads_to_is_written(tmp_path):
    path, target = tmp_path / "tuned.json", tmp_path / "kept" / "tuned.json"
    target.parent.mkdir()
    target.write_text('{"schema": 1, "entries": []}')
    path.symlink_to(target)
    write_table(path, [entry()])
    assert path.is_symlink() and read_table(target) == (entry(),)


@pytest.mark.parametrize(
    ("configuration", "why"),
    [(CONFIGURATIONS[2], "wrong values"), (CONFIGURATIONS[3], "out of resources"), ({"delya": 0}, "expected delay and wrong")],
    ids=["wrong", "fails", "refused"],
)
def test_a_tuned_configuration_is_probed_as_it_will_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, configuration: dict[str, int], why: str
):
    """A kernel that is right as shipped and not as the table has it runs as shipped, and that is said once."""
    path, plugin = tmp_path / "tuned.json", Plugin()
    registry = Registry(plugins=[("acme", plugin)], environ={"MLA_PORTABLE_TUNED": str(path)})
    asked = Request(DECODE, registry.facts("cpu"), kv_layout="bf16", num_heads=16, topk=16)
    write_table(path, [entry(device=asked.device.name, configuration=configuration)])
    registry.reload_policy()
    implementation, decision = registry.select(asked)
    assert decision.chosen == NAME and decision.verdicts[0].reasons == (), "a table is no reason against a kernel"
    bound = registry.bind(asked)
    assert plugin.bound_with[-1] == CONFIGURATIONS[0] and registry.configured(implementation, asked) == asked
    for again in (asked.but(rows=7), asked.but(lse=True)):
        registry.bind(again)
        assert plugin.bound_with[-1] == CONFIGURATIONS[0]
    generator = torch.Generator().manual_seed(1)
    q, cache = (torch.randn(shape, generator=generator).bfloat16() for shape in ((2, 1, 16, 576), (2, 16, 576)))
    call = q, cache, torch.arange(32, dtype=torch.int32).view(2, 1, 16)
    out = bound(*call, softmax_scale=0.1)
    assert torch.equal(out[0], reference.sparse_decode(*call, softmax_scale=0.1)[0])
    (said,) = (record for record in caplog.records if "is not used" in record.getMessage())
    assert said.levelname == "WARNING" and why in said.getMessage() and str(path) in said.getMessage()
    assert "mla-portable tune" in said.getMessage()


def test_a_tuned_configuration_that_is_right_is_bound_after_its_probe(tmp_path: Path):
    path, plugin = tmp_path / "tuned.json", Plugin()
    registry = Registry(plugins=[("acme", plugin)], environ={"MLA_PORTABLE_TUNED": str(path)})
    asked = Request(DECODE, registry.facts("cpu"), kv_layout="bf16", num_heads=16, topk=16)
    write_table(path, [entry(device=asked.device.name, configuration=CONFIGURATIONS[1])])
    registry.reload_policy()
    registry.bind(asked)
    assert plugin.bound_with == [CONFIGURATIONS[1]] * 2, "once for the probe, once for the call, never as shipped"


def test_a_configuration_that_the_implementation_refuses_names_the_file(tmp_path):
    path = tmp_path / "tuned.json"
    plugin = Plugin()
    registry = Registry(plugins=[("acme", plugin)], environ={"MLA_PORTABLE_TUNED": str(path)}, probe=False)
    asked = Request(DECODE, registry.facts("cpu"), kv_layout="bf16", num_heads=16, topk=16)
    write_table(path, [entry(device=asked.device.name, configuration={"delya": 0})])
    registry.reload_policy()
    assert registry.decide(asked).chosen == NAME, "a table is no reason against a kernel"
    with pytest.raises(InvalidArgument, match=r"tuned\.json: got for acme\.v1 / sparse_decode: .*delya.*tune` again"):
        registry.bind(asked)
    assert registry.bind(asked.but(num_heads=2)) is not None


def test_where_the_table_is():
    assert table_path({"MLA_PORTABLE_TUNED": "/x/y.json", "XDG_CONFIG_HOME": "/home"}) == Path("/x/y.json")
    assert table_path({"XDG_CONFIG_HOME": "/home"}) == Path("/home/mla-portable/tuned.json")
    assert table_path({"MLA_PORTABLE_TUNED": " ", "HOME": "/me"}) == Path("/me/.config/mla-portable/tuned.json")
    assert table_path({"MLA_PORTABLE_TUNED": "~/y.json"}) == Path.home() / "y.json"
    both = {"XDG_CONFIG_HOME": "/config", "HOME": "/me"}
    assert table_path(both) == Path("/config/mla-portable/tuned.json")
    assert table_path(both | {"XDG_CONFIG_HOME": " "}) == Path("/me/.config/mla-portable/tuned.json")
    assert table_path({}) is None


# ---------------------------------------------------------------------- the command


def command(monkeypatch: pytest.MonkeyPatch, path: Path, *words: str, plugin: Plugin | None = None, code: int = 0) -> str:
    plugin = plugin or Plugin()
    monkeypatch.setenv("MLA_PORTABLE_TUNED", str(path))
    registry: Registry = registry_with(("acme", plugin), probe=False)
    with serving(registry):
        done = CliRunner().invoke(app, ["tune", "--device", "cpu", "--heads", "2", "--rows", "1,3", "--repeat", "2", *words])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done.stdout


def test_tuning_changes_what_is_bound(monkeypatch, tmp_path):
    path = tmp_path / "tuned.json"
    assert "speed-up over default" in command(monkeypatch, path)
    assert [each.configuration for each in read_table(path)] == [CONFIGURATIONS[1]]
    plugin = Plugin()
    registry = registry_with(("acme", plugin), probe=False, environ={"MLA_PORTABLE_TUNED": str(path)})
    for heads in (2, 4):
        registry.bind(Request(DECODE, registry.facts("cpu"), kv_layout="bf16", num_heads=heads, topk=16))
    assert plugin.bound_with == [CONFIGURATIONS[1], CONFIGURATIONS[0]], "four heads were not tuned"


def test_the_command_as_json_and_its_exit_codes(monkeypatch, tmp_path):
    path = tmp_path / "tuned.json"
    answer = json.loads(command(monkeypatch, path, "--json"))
    assert answer["ok"] and answer["table"] == str(path) and len(answer["results"][0]["attempts"]) == 4
    assert answer["entries"][0]["configuration"] == CONFIGURATIONS[1]
    other = tmp_path / "other.json"
    text = command(monkeypatch, path, "--out", str(other), plugin=Plugin(CONFIGURATIONS[2:3]), code=1)
    assert "WRONG  acme.v1 / sparse_decode bf16 2 delay=0 wrong=1" in text and not other.exists()
    assert "no tunable kernel supports this device" in command(monkeypatch, path, plugin=Plugin(max_heads=1), code=1)
    command(monkeypatch, tmp_path, code=2)


@pytest.mark.parametrize("text", ["", "{", '{"schema": 2, "entries": []}'])
def test_the_command_writes_a_fresh_table_in_the_place_of_a_file_that_is_none(monkeypatch, tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    monkeypatch.setenv("MLA_PORTABLE_TUNED", str(path))
    with serving(registry_with(("acme", Plugin()), probe=False)):
        done = CliRunner().invoke(app, ["tune", "--device", "cpu", "--heads", "2", "--rows", "1", "--repeat", "2"])
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert [each.configuration for each in read_table(path)] == [CONFIGURATIONS[1]]
    assert "was no table: a fresh one was written" in done.stderr.replace("\n", " ")
    assert (tmp_path / "tuned.json.damaged").read_text() == text, "entries that someone wrote by hand are not lost"
