# SPDX-License-Identifier: Apache-2.0
"""Tuning: the fastest configuration that is right everywhere wins, and kernels are bound with it from then on."""

from __future__ import annotations

import errno
import json
import math
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

from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.bench.tune import Attempt, TuneResult, tune
from mla_portable.choose import Registry
from mla_portable.choose.own_times import OwnTimes, times_folder, tuned_file
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
from mla_portable.judge.problems.bench import KernelCase
from mla_portable.primitives import CACHE_WRITE, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.times.adding import add_to_file, check_can_add
from mla_portable.times.configurations import Configurations
from mla_portable.times.files import parse_times, times_text
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
    def __init__(self, configurations: list[dict[str, int]] = CONFIGURATIONS, **limits: Any) -> None:
        self.tunable = Tunable(NAME, DECODE, lambda request: configurations)
        declared = {"device_types": ("cpu",), "kv_layouts": ("bf16",), "graph": False, **limits}
        self.support = Support(source="this test", **declared)
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
    kept = result.times()
    assert {each.configuration for each in kept} == {tuple(CONFIGURATIONS[1].items())} and [each.rows for each in kept] == [
        1,
        3,
    ]


def test_configurations_are_ranked_as_implementations_are():
    """By one rule: the time that all sizes take together, which a ratio on a small one cannot outweigh."""
    small, large = {1: 1.0, 256: 200.0}, {1: 4.0, 256: 60.0}
    attempts = Attempt({"a": 1}, small), Attempt({"a": 2}, large)
    result = TuneResult(NAME, "sparse_decode", "bf16", 16, attempts, Measurement("a device"))
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


def test_what_serves_only_where_it_is_forced_is_tuned():
    (result,) = run(Plugin(accuracy="low"))
    assert result.best is not None and result.best.configuration == {"delay": 0, "wrong": 0}


# ---------------------------------------------------------------------- the file of times


def tuned(configuration: Mapping[str, int] | None = None, *, device: str = H200.name, **changes: Any) -> list[MeasuredTime]:
    """A row as `tune` writes it."""
    given = {"block_n": 32} if configuration is None else configuration
    values: dict[str, Any] = {"implementation": NAME, "primitive": "sparse_decode", "layout": "bf16", "heads": 16, "topk": None}
    origin = Measurement(device, (device,), "2026-11-02")
    values |= {"rows": 1, "us": 10.0, "measurement": origin, "configuration": tuple(given.items())}
    return [MeasuredTime(**(values | changes))]


def read(path: Path) -> list[MeasuredTime]:
    found = parse_times(path.read_text())
    assert found.problems == ()
    return list(found.times)


def request(**changes: Any) -> Request:
    return Request(DECODE, H200, kv_layout="bf16", num_heads=16, topk=2048).but(**changes)


OFFERED = {(NAME, "sparse_decode")}


def test_a_configuration_holds_for_its_requests_alone(tmp_path: Path):
    path = tmp_path / "new" / "tuned.json"

    def of(request: Request, name: str = NAME) -> Mapping[str, int] | None:
        own = OwnTimes.read({"MLA_PORTABLE_TIMES": str(path.parent)}, OFFERED)
        found = Configurations(own.files).of(name, request)
        assert own.ignored == () and (found is None or found.file == str(path))
        return None if found is None else dict(found.configuration)

    assert of(request()) is None, "no file, no configuration"
    add_to_file(path, tuned())
    add_to_file(path, tuned({"block_n": 64}, heads=64, topk=512))
    assert of(request(rows=7, graph=True)) == {"block_n": 32}
    assert of(request(num_heads=64, topk=512)) == {"block_n": 64} and of(request(num_heads=64)) is None
    for other in (request(num_heads=32), request(kv_layout="fp8_ds_mla"), request(primitive=SPARSE_PREFILL)):
        assert of(other) is None
    assert of(request(device=CPU)) is None and of(request(), "acme.v2") is None
    add_to_file(path, [*tuned({"block_n": 16}, rows=1), *tuned({"block_n": 16}, rows=8)])
    assert of(request()) == {"block_n": 16}
    assert [each.rows for each in read(path)] == [1, 8, 1], "the new rows take the place of the old one"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"device": 5, "times": []}',
        '{"device": "x", "times": [{"implementation": "acme.v1", "primitive": "sparse_decode", "us": {"1": "2"}}]}',
        "[" * 100_000,
        " " * (1 << 20) + "{}",
        "",
        '{"device": "x", "tim',
    ],
    ids=range(8),
)
def test_a_file_that_is_damaged_is_ignored_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str):
    """Whether its folder is named or the default one: times are hints, and no process fails for want of one."""
    folder = tmp_path / "mla-portable" / "times"
    folder.mkdir(parents=True)
    bad, good = folder / "bad.json", folder / "good.json"
    add_to_file(good, tuned(CONFIGURATIONS[1], device=CPU.name))
    for environ in ({"MLA_PORTABLE_TIMES": str(folder)}, {"XDG_CONFIG_HOME": str(tmp_path)}):
        bad.write_text(text)
        caplog.clear()
        plugin = Plugin()
        registry = Registry(plugins=[("acme", plugin)], facts={"cpu": CPU}, environ=environ)
        asked = request(device=CPU)
        for _ in range(2):
            registry.reload_policy()
            assert registry.decide(asked).chosen == NAME and registry.policy is not None
            registry.bind(asked)
        assert plugin.bound_with == [CONFIGURATIONS[1]] * 2, "the other file counts"
        (said,) = (record for record in caplog.records if str(bad) in record.getMessage())
        assert said.levelname == "WARNING" and "correct or delete it" in said.getMessage()
        assert any(str(bad) in each.what for each in registry.times_ignored)
        bad.unlink()
        registry.reload_policy()
        assert registry.times_ignored == ()


def test_what_cannot_be_read_at_all_is_ignored_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "latin.json").write_bytes(b'{"device": "\xe9"}')
    registry = Registry(plugins=[("acme", Plugin())], facts={"cpu": CPU}, environ={"MLA_PORTABLE_TIMES": str(tmp_path)})
    assert registry.decide(request(device=CPU)).chosen == NAME
    folder, latin = (each.what for each in registry.times_ignored)
    assert "folder.json: " in folder and "not a regular file" in folder and "latin.json: " in latin


def unreadable(tmp_path: Path) -> dict[str, dict[str, str]]:
    """Environments whose folder cannot be read, whoever runs the tests."""
    (tmp_path / "file").write_text("")
    (tmp_path / "config" / "mla-portable").mkdir(parents=True)
    (tmp_path / "config" / "mla-portable" / "times").write_text("")
    return {
        "HOME is no directory": {"HOME": "/dev/null"},
        "no HOME": {},
        "a file in the way": {"XDG_CONFIG_HOME": str(tmp_path / "file")},
        "a file": {"XDG_CONFIG_HOME": str(tmp_path / "config")},
    }


def test_a_default_folder_that_cannot_be_read_holds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    for what, environ in unreadable(tmp_path).items():
        caplog.clear()
        plugin = Plugin()
        registry = Registry(plugins=[("acme", plugin)], environ=environ)
        asked = Request(DECODE, registry.facts("cpu"), kv_layout="bf16", num_heads=2, topk=16)
        assert registry.decide(asked).chosen == NAME, what
        registry.bind(asked)
        levels = [r.levelname for r in caplog.records if "no times of your own" in r.getMessage()]
        assert levels == (["INFO"] if environ else []) and registry.times_ignored == (), what
        assert plugin.bound_with[-1] == CONFIGURATIONS[0]


def test_a_named_folder_that_cannot_be_read_is_ignored_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "file"
    path.write_text("")
    registry = Registry(plugins=[("acme", Plugin())], facts={"cpu": CPU}, environ={"MLA_PORTABLE_TIMES": str(path)})
    assert registry.decide(request(device=CPU)).chosen == NAME
    (ignored,) = registry.times_ignored
    assert str(path) in ignored.what and f"{ignored.what}; {ignored.remedy}" in caplog.text
    missing = {"MLA_PORTABLE_TIMES": str(tmp_path / "new")}
    registry = Registry(plugins=[("acme", Plugin())], facts={"cpu": CPU}, environ=missing)
    assert registry.decide(request(device=CPU)).chosen == NAME, "tune is going to write it"
    assert "does not exist" in caplog.text and registry.times_ignored == ()


def test_tables_of_older_releases_are_said_with_the_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    old = json.dumps({"schema": 1, "entries": [{"device": "x", "implementation": NAME}]})
    for path in (tmp_path / "mla-portable" / "tuned.json", tmp_path / "mla-portable" / "times" / "tuned.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(old)
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "MLA_PORTABLE_TUNED": "/x/tuned.json"}
    registry = Registry(plugins=[("acme", Plugin())], facts={"cpu": CPU}, environ=environ)
    assert registry.decide(request(device=CPU)).chosen == NAME
    variable, default, inside = registry.times_ignored
    assert variable.what == "MLA_PORTABLE_TUNED is set, which is no longer read" and variable.remedy.endswith("unset it")
    for ignored, where in ((default, "mla-portable/tuned.json"), (inside, "times/tuned.json")):
        assert ignored.what.endswith(f"{where}: a tuning table of release 0.2 or older, which is no longer read")
        assert ignored.remedy.startswith("run `mla-portable tune` again") and ignored.remedy.endswith("delete it")
        assert f"{ignored.what}; {ignored.remedy}" in caplog.text


def test_a_write_that_is_interrupted_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tuned.json"
    add_to_file(path, tuned())

    def interrupted(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        add_to_file(path, tuned(heads=64))
    assert read(path) == tuned()
    assert {each.name for each in tmp_path.iterdir()} == {"tuned.json", "tuned.json.lock"}


WRITER = """
import sys
from pathlib import Path
from mla_portable.times.adding import add_to_file
from mla_portable.times.records import MeasuredTime, Measurement
path, first = Path(sys.argv[1]), int(sys.argv[2])
what, origin = ("acme.v1", "sparse_decode", "bf16"), Measurement("a device")
print("ready", flush=True)
sys.stdin.readline()
for heads in range(first, first + 20):
    add_to_file(path, [MeasuredTime(*what, heads + 1, None, 1, 2.0, origin, configuration=(("block_n", 32),))])
"""


def test_processes_that_tune_at_once_keep_the_rows_of_all(tmp_path: Path):
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
        if path.exists():
            assert read(path), "whoever reads meanwhile sees a whole file"
    assert [each.wait() for each in writers] == [0, 0]
    assert {each.heads for each in read(path)} == set(range(1, 41))


def test_a_file_system_without_locks_is_written_to_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    add_to_file(tmp_path / "tuned.json", tuned())
    assert read(tmp_path / "tuned.json") == tuned() and "No locks available" in caplog.text


def test_what_a_link_leads_to_is_written(tmp_path: Path):
    path, target = tmp_path / "tuned.json", tmp_path / "kept" / "tuned.json"
    add_to_file(target, tuned(heads=64))
    path.symlink_to(target)
    add_to_file(path, tuned())
    assert path.is_symlink() and read(target) == [*tuned(), *tuned(heads=64)]


def test_a_file_is_of_one_device(tmp_path: Path):
    path = tmp_path / "h200.json"
    add_to_file(path, tuned())
    check_can_add("tune", path, H200.name)
    check_can_add("tune", tmp_path / "new.json", CPU.name)
    with pytest.raises(
        InvalidArgument, match=rf"h200\.json: got times of {H200.name}, expected times of {CPU.name}: a file is of one"
    ):
        check_can_add("tune", path, CPU.name)


def test_records_of_another_device_are_not_added_under_the_name_of_the_file_s(tmp_path: Path):
    path = tmp_path / "h200.json"
    add_to_file(path, tuned())
    text = path.read_text()
    with pytest.raises(ValueError, match=f"of one device; it has {H200.name}, got {CPU.name}"):
        add_to_file(path, tuned(device=CPU.name))
    assert path.read_text() == text


def test_what_is_added_takes_the_name_and_the_place_that_the_file_has(tmp_path: Path):
    path = tmp_path / "h200.json"
    origin = Measurement("H200 of the lab", ("NVIDIA H200*",), "2026-11-02", "0.1.0")
    add_to_file(path, tuned(measurement=origin))
    add_to_file(path, tuned({"block_n": 16}))
    (row,) = read(path)
    assert (row.measurement.device, row.measurement.names) == (origin.device, origin.names)
    assert row.configuration == (("block_n", 16),) and row.measurement.recorded == "2026-11-02"


def test_of_a_damaged_file_the_good_rows_stay_and_the_rest_is_kept_beside_it(tmp_path: Path):
    path = tmp_path / "h200.json"
    add_to_file(path, tuned(heads=64))
    document = json.loads(path.read_text())
    document["times"].append({"implementation": "b.v1"})
    path.write_text(text := json.dumps(document))
    kept = add_to_file(path, tuned())
    assert kept == tmp_path / "h200.json.damaged" and kept.read_text() == text
    assert read(path) == [*tuned(), *tuned(heads=64)]


@pytest.mark.parametrize(
    ("configuration", "why"),
    [(CONFIGURATIONS[2], "wrong values"), (CONFIGURATIONS[3], "out of resources"), ({"delya": 0}, "expected delay and wrong")],
    ids=["wrong", "fails", "refused"],
)
def test_a_tuned_configuration_is_probed_as_it_will_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, configuration: dict[str, int], why: str
):
    """A kernel that is right as shipped and not as a file of times has it runs as shipped, and that is said once."""
    path, plugin = tmp_path / "tuned.json", Plugin()
    registry = Registry(plugins=[("acme", plugin)], environ={"MLA_PORTABLE_TIMES": str(tmp_path)})
    asked = Request(DECODE, registry.facts("cpu"), kv_layout="bf16", num_heads=16, topk=16)
    add_to_file(path, tuned(configuration, device=asked.device.name))
    registry.reload_policy()
    implementation, decision = registry.select(asked)
    assert decision.chosen == NAME and decision.verdicts[0].reasons == (), "a file of times is no reason against a kernel"
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


@pytest.mark.parametrize("configuration", CONFIGURATIONS[1:3], ids=["right", "wrong"])
def test_a_layer_plans_with_the_configuration_that_its_kernel_is_bound_with(tmp_path: Path, configuration: dict[str, int]):
    plugin = Plugin()
    registry = registry_with(("acme", plugin), environ={"MLA_PORTABLE_TIMES": str(tmp_path)})
    add_to_file(tmp_path / "tuned.json", tuned(configuration, device=registry.facts("cpu").name, heads=2))
    registry.reload_policy()
    sizes = {"max_num_tokens": 8, "max_num_reqs": 4, "max_model_len": 64, "topk": 16, "block_size": 16}
    spec = AttentionSpec(2, 0.1, kv_layout="bf16", graph=False, **sizes)
    layer = SparseMLAAttention(spec, device="cpu", registry=registry)
    planned = layer.planner_config().decode_request
    assert layer.route_decision.verdict.part("decode").decision.chosen == NAME and planned is not None
    assert dict(planned.configuration or CONFIGURATIONS[0].items()) == plugin.bound_with[-1]
    assert (planned.configuration is None) == (configuration["wrong"] == 1)


def test_a_tuned_configuration_that_is_right_is_bound_after_its_probe(tmp_path: Path):
    path, plugin = tmp_path / "tuned.json", Plugin()
    registry = Registry(plugins=[("acme", plugin)], environ={"MLA_PORTABLE_TIMES": str(tmp_path)})
    asked = Request(DECODE, registry.facts("cpu"), kv_layout="bf16", num_heads=16, topk=16)
    add_to_file(path, tuned(CONFIGURATIONS[1], device=asked.device.name))
    registry.reload_policy()
    registry.bind(asked)
    assert plugin.bound_with == [CONFIGURATIONS[1]] * 2, "once for the probe, once for the call, never as shipped"


def test_a_configuration_that_the_implementation_refuses_names_the_file(tmp_path):
    path = tmp_path / "tuned.json"
    plugin = Plugin()
    registry = Registry(plugins=[("acme", plugin)], environ={"MLA_PORTABLE_TIMES": str(tmp_path)}, probe=False)
    asked = Request(DECODE, registry.facts("cpu"), kv_layout="bf16", num_heads=16, topk=16)
    add_to_file(path, tuned({"delya": 0}, device=asked.device.name))
    registry.reload_policy()
    assert registry.decide(asked).chosen == NAME, "a file of times is no reason against a kernel"
    with pytest.raises(InvalidArgument, match=r"tuned\.json: got for acme\.v1 / sparse_decode: .*delya.*tune` again"):
        registry.bind(asked)
    assert registry.bind(asked.but(num_heads=2)) is not None


def test_where_the_files_are():
    assert times_folder({"MLA_PORTABLE_TIMES": "/x/y", "XDG_CONFIG_HOME": "/home"}) == Path("/x/y")
    assert times_folder({"XDG_CONFIG_HOME": "/home"}) == Path("/home/mla-portable/times")
    assert times_folder({"MLA_PORTABLE_TIMES": " ", "HOME": "/me"}) == Path("/me/.config/mla-portable/times")
    assert times_folder({"MLA_PORTABLE_TIMES": "~/y"}) == Path.home() / "y"
    both = {"XDG_CONFIG_HOME": "/config", "HOME": "/me"}
    assert times_folder(both) == Path("/config/mla-portable/times")
    assert times_folder(both | {"XDG_CONFIG_HOME": " "}) == Path("/me/.config/mla-portable/times")
    assert times_folder({}) is None
    folder = Path("/x")
    assert tuned_file(folder, "NVIDIA A100-SXM4-80GB") == folder / "tuned-nvidia-a100-sxm4-80gb.json"
    assert tuned_file(folder, "../../天") == folder / "tuned-device.json"


# ---------------------------------------------------------------------- the command


def command(monkeypatch: pytest.MonkeyPatch, path: Path, *words: str, plugin: Plugin | None = None, code: int = 0) -> str:
    plugin = plugin or Plugin()
    monkeypatch.setenv("MLA_PORTABLE_TIMES", str(path))
    registry: Registry = registry_with(("acme", plugin), probe=False)
    with serving(registry):
        done = CliRunner().invoke(app, ["tune", "--device", "cpu", "--heads", "2", "--rows", "1,3", "--repeat", "2", *words])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done.stdout


def test_tuning_changes_what_is_bound(monkeypatch, tmp_path):
    assert "speed-up over default" in command(monkeypatch, tmp_path / "new")
    (path,) = (tmp_path / "new").glob("*.json")
    assert {each.configuration for each in read(path)} == {tuple(CONFIGURATIONS[1].items())}
    plugin = Plugin()
    registry = registry_with(("acme", plugin), probe=False, environ={"MLA_PORTABLE_TIMES": str(path.parent)})
    for heads in (2, 4):
        registry.bind(Request(DECODE, registry.facts("cpu"), kv_layout="bf16", num_heads=heads, topk=16))
    assert plugin.bound_with == [CONFIGURATIONS[1], CONFIGURATIONS[0]], "four heads were not tuned"


def test_the_command_as_json_and_its_exit_codes(monkeypatch, tmp_path):
    path = tmp_path / "times"
    answer = json.loads(command(monkeypatch, path, "--json"))
    assert (
        answer["ok"]
        and Path(answer["file"]).parent == path
        and Path(answer["file"]).exists()
        and len(answer["results"][0]["attempts"]) == 4
    )
    assert answer["entries"][0]["configuration"] == CONFIGURATIONS[1]
    other = tmp_path / "other.json"
    text = command(monkeypatch, path, "--out", str(other), plugin=Plugin(CONFIGURATIONS[2:3]), code=1)
    assert "WRONG  acme.v1 / sparse_decode bf16 2 delay=0 wrong=1" in text and not other.exists()
    assert "no tunable kernel supports this device" in command(monkeypatch, path, plugin=Plugin(max_heads=1), code=1)
    other.write_text(times_text(tuned()))
    command(monkeypatch, path, "--out", str(other), code=2)
    (tmp_path / "file").write_text("")
    command(monkeypatch, tmp_path / "file", code=2)


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1, "entries": []}'])
def test_the_command_writes_a_fresh_file_in_the_place_of_one_that_cannot_be_used(monkeypatch, tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with serving(registry_with(("acme", Plugin()), probe=False)):
        words = ["tune", "--device", "cpu", "--heads", "2", "--rows", "1", "--repeat", "2", "--out", str(path)]
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert [each.configuration for each in read(path)] == [tuple(CONFIGURATIONS[1].items())]
    assert "could not be used as a whole" in " ".join(done.stderr.split())
    assert (tmp_path / "mine.json.damaged").read_text() == text, "what someone wrote by hand is not lost"
