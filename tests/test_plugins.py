# SPDX-License-Identifier: Apache-2.0
"""A plugin may fail in any way: it is reported, nothing of it stays, and nobody else notices."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pluggy
import pytest
import torch
from commands import document, invoke
from fake_plugins import ANYWHERE, implementation, make_plugin
from machines import CPU, H200

from mla_portable import __version__
from mla_portable.choose import Registry
from mla_portable.choose.plugin_sources import PluginSource, given_plugins, installed_plugins
from mla_portable.choose.plugins import load_plugins
from mla_portable.contracts import DeviceFacts, Engine, EngineStatus, InvalidArgument, Registrar, Request, Variable, hookimpl
from mla_portable.primitives import MERGE_STATES, SPARSE_DECODE

GOOD = ("good", make_plugin(implementation("good.v1")))


def registry_with(*plugins: tuple[str, object]) -> Registry:
    return Registry(plugins=[*plugins, GOOD], environ={})


def names(registry: Registry) -> list[str]:
    return [f"{i.name} / {i.primitive}" for i in registry.implementations()]


HOOK = """
from fake_plugins import implementation
from mla_portable.contracts import DeviceFacts, hookimpl

{mark}
def {name}(registrar{more}):
{body}
"""


def hook(*body: str, mark: str = "@hookimpl", name: str = "mla_portable_register", more: str = "") -> str:
    return HOOK.format(mark=mark, name=name, more=more, body="\n".join(f"    {line}" for line in body or ("pass",)))


ADD = 'registrar.add(implementation("broken.v1", preference=0))'
CLAIM = 'registrar.add_detector(lambda device: DeviceFacts("half", "half", "half", device_type=device.type))'
FAIL = 'raise OSError("the second half of the library is missing")'
BROKEN: dict[str, tuple[str | None, str]] = {
    "the vendor's library is broken": (
        'raise ImportError("libacme.so.4: cannot open shared object file")',
        "ImportError: libacme.so.4: cannot open shared object file",
    ),
    "it thinks it is a program": ('raise SystemExit("no licence found")', "SystemExit: no licence found"),
    "it is not there": (None, "ModuleNotFoundError: No module named 'broken_plugin'"),
    "the hook's name has a letter too few": (
        hook(ADD, name="mla_portable_registr"), "PluginValidationError: unknown hook 'mla_portable_registr'",
    ),
    "no @hookimpl": (
        hook(ADD, mark=""), "PluginError: broken_plugin has no @hookimpl named mla_portable_register; did you mean",
    ),
    "the hook wants an argument that nobody passes": (hook(more=", device"), "PluginValidationError"),
    "one implementation twice": (
        hook(ADD, ADD), "PluginError: broken.v1 / merge_states: already registered by the plugin 'broken'",
    ),
    "it fails when half is registered": (hook(ADD, CLAIM, FAIL), "OSError: the second half of the library is missing"),
    "it has a hook that is no more": (
        hook(ADD) + hook(name="mla_portable_register_baselines"),
        "PluginValidationError: unknown hook 'mla_portable_register_baselines'",
    ),
    "it registers nothing": (hook(), "PluginError: broken_plugin registered nothing"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_is_reported_and_isolated(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, error = BROKEN[how]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
    if source is not None:
        (tmp_path / "broken_plugin.py").write_text(source)
    registry = registry_with(("broken", "broken_plugin"))
    sys.modules.pop("broken_plugin", None)
    report, good = registry.plugin_reports
    assert (report.name, report.module, report.ok, report.implementations) == ("broken", "broken_plugin", False, ())
    assert report.error.startswith(error) and "\n" not in report.error
    assert report.traceback.startswith("Traceback") and report.error.partition(":")[0] in report.traceback
    assert good.ok and good.implementations == ("good.v1 / merge_states",) and (good.error, good.traceback) == ("", "")
    assert names(registry) == ["good.v1 / merge_states"], "nothing half registered stays"
    assert registry.facts("cpu").vendor == "cpu", "nor does a detector"
    decision = registry.decide(Request(MERGE_STATES, CPU))
    assert decision.chosen == "good.v1"
    assert decision.plugin_failures == (("broken", f"did not load: {report.error}"),)
    assert f"plugin did not load: {error}" in decision.text()


def with_hook(hook: Callable[[Registrar], None]) -> ModuleType:
    module = ModuleType("slow")
    vars(module)["mla_portable_register"] = hookimpl(hook)
    return module


def interrupted(registrar: Registrar) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_that_a_plugin_raises_is_its_own_failure():
    registry = registry_with(("slow", with_hook(interrupted)))
    report, good = registry.plugin_reports
    assert not report.ok and report.error == "KeyboardInterrupt" and "in interrupted" in report.traceback and good.ok


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Unreadable(), "Unreadable: (its text cannot be read: RuntimeError)"),
        (ImportError("\x1b[2Jlibacme.so\x07: not found\r\n\x1b]0;more"), r"ImportError: \x1b[2Jlibacme.so\x07: not found"),
        (GeneratorExit("a panic"), "GeneratorExit: a panic"),
    ],
    ids=["without a text", "with terminal escapes", "no Exception"],
)
def test_any_error_of_a_plugin_is_one_printable_line(error: BaseException, text: str):
    def hook(registrar: Registrar) -> None:
        raise error

    report, good = registry_with(("odd", with_hook(hook))).plugin_reports
    assert report.error == text and good.ok
    assert "\x1b" not in report.traceback and "in hook" in report.traceback


def test_plugins_share_one_manager_and_none_finds_what_another_left(monkeypatch: pytest.MonkeyPatch):
    made: list[pluggy.PluginManager] = []
    init = pluggy.PluginManager.__init__
    monkeypatch.setattr(pluggy.PluginManager, "__init__", lambda self, name: (made.append(self), init(self, name))[1])
    misspelt = ModuleType("misspelt")
    vars(misspelt)["mla_portable_registr"] = hookimpl(lambda registrar: None)
    same = make_plugin(implementation("first.v1"))
    odd = make_plugin(implementation("odd.v1"))
    registry = Registry(plugins=[("odd", odd), ("misspelt", misspelt), ("first", same), ("second", same), GOOD], environ={})
    errors = {report.name: report.error for report in registry.plugin_reports}
    assert [name for name, error in errors.items() if not error] == ["odd", "first", "good"]
    assert "unknown hook 'mla_portable_registr'" in errors["misspelt"]
    assert "expected a name that starts with 'second.'" in errors["second"], "a module may be tried under a second name"
    (manager,) = made
    assert manager.list_name_plugin() == []


def test_a_users_interrupt_goes_through():
    """Signals reach the main thread, where plugins run only without a time limit."""
    with pytest.raises(KeyboardInterrupt):
        Registry(plugins=[("slow", with_hook(interrupted)), GOOD], environ={"MLA_PORTABLE_PLUGIN_TIMEOUT": "0"})


def test_a_variable_whose_check_raises_is_refused_by_name():
    def accepts(value: str) -> bool:
        raise GeneratorExit("panic")

    def hook(registrar: Registrar) -> None:
        registrar.add(implementation("odd.v1"))
        registrar.add_variable(Variable("MLA_PORTABLE_ODD_MODE", "a mode", accepts))

    registry = Registry(plugins=[("odd", with_hook(hook)), GOOD], environ={"MLA_PORTABLE_ODD_MODE": "fast"})
    with pytest.raises(InvalidArgument, match=r"MLA_PORTABLE_ODD_MODE: got 'fast', expected a mode\..*GeneratorExit: panic"):
        registry.decide(Request(MERGE_STATES, CPU))


def test_a_plugin_that_hangs_is_reported_and_registers_nothing_afterwards():
    go, done = threading.Event(), threading.Event()
    late: list[BaseException] = []

    def hangs(registrar: Registrar) -> None:
        go.wait(20)
        try:
            registrar.add(implementation("slow.v1"))
        except BaseException as error:
            late.append(error)
        done.set()

    registry = Registry(plugins=[("slow", with_hook(hangs)), GOOD], environ={"MLA_PORTABLE_PLUGIN_TIMEOUT": "0.05"})
    go.set()
    assert done.wait(20)
    report, good = registry.plugin_reports
    assert report.error.startswith("PluginTimeout: loading the plugin slow did not finish within 0.05 s") and good.ok
    assert len(late) == 1 and names(registry) == ["good.v1 / merge_states"]


def test_what_hangs_at_import_reaches_no_other_plugin_when_it_goes_on():
    go, registered, end = threading.Event(), threading.Event(), threading.Event()
    calls: list[Registrar] = []

    def hook(registrar: Registrar) -> None:
        calls.append(registrar)
        registered.set()
        end.wait(20)

    def hangs() -> object:
        go.wait(20)
        return with_hook(hook)

    def waits() -> object:
        go.set()
        assert registered.wait(20), "the plugin that hung has gone on, and is registered with pluggy"
        return make_plugin(implementation("patient.v1"))

    sources = [PluginSource("late", "late", hangs), PluginSource("patient", "patient", waits), *given_plugins([GOOD])]
    loaded = load_plugins(sources, seconds=1)
    end.set()
    late, patient, good = loaded.reports
    assert late.error.startswith("PluginTimeout: loading the plugin late") and (patient.error, good.error) == ("", "")
    assert len(calls) == 1, "its hook gets the registrar that was closed, and no other"
    assert [each.name for each in loaded.implementations] == ["patient.v1", "good.v1"]


def test_a_disabled_plugin_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "hang-mla", "1", "hang = hang_plugin", hang_plugin="raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry(environ={"MLA_PORTABLE_DISABLE": "hang"})
    report = next(r for r in registry.plugin_reports if r.name == "hang")
    assert (report.ok, report.loaded, report.error) == (True, False, "")
    assert report.disabled == "MLA_PORTABLE_DISABLE"
    assert "hang_plugin" not in sys.modules
    registry.decide(Request(MERGE_STATES, CPU))
    assert "hang" not in dict(registry.tunables().failures)
    assert "imported" in dict(Registry(environ={}).tunables().failures)["hang"]


def test_the_reference_is_loaded_even_where_it_is_disabled():
    registry = Registry(plugins=[("reference", "mla_portable.reference")], environ={"MLA_PORTABLE_DISABLE": "reference"})
    assert registry.implementations() and registry.decide(Request(MERGE_STATES, CPU)).chosen is None


def test_a_disabled_plugin_may_have_a_kernel_for_the_accelerator():
    plugins = [("reference", "mla_portable.reference"), ("acme", make_plugin(implementation("acme.v1")))]
    registry = Registry(plugins=plugins, facts={"cuda": H200}, environ={"MLA_PORTABLE_DISABLE": "acme"})
    decision = registry.decide(Request(MERGE_STATES, H200))
    assert decision.chosen is None and "take acme out of MLA_PORTABLE_DISABLE" in decision.failure_text()
    assert json.loads(json.dumps(decision.as_dict(), allow_nan=False))["candidates"][-1]["implementation"] == "acme"


def test_a_variable_belongs_to_its_plugin():
    def registers(*variables: object) -> str:
        def hook(registrar: Registrar) -> None:
            registrar.add(implementation("acme.v1"))
            for variable in variables:
                registrar.add_variable(variable)

        return registry_with(("acme", with_hook(hook))).plugin_reports[0].error

    own = Variable("MLA_PORTABLE_ACME_PATH", "a path")
    assert registers(own) == "" and registers(Variable("MLA_PORTABLE_ACME", "on")) == ""
    assert "starts with MLA_PORTABLE_ACME_" in registers(Variable("MLA_PORTABLE_ACMEX", "on"))
    assert "declared already" in registers(own, own)
    assert "expected a Variable, got str" in registers("MLA_PORTABLE_ACME_PATH")


def test_an_adapter_s_variables_and_engine_are_declared_by_the_hook_of_plugins():
    """This package's own are there in every registry; a plugin may bring another engine's, and none that is there."""

    def registers(engine: object, *variables: Variable, name: str = "acme") -> Registry:
        def hook(registrar: Registrar) -> None:
            registrar.add_engine(engine)
            for variable in variables:
                registrar.add_variable(variable)

        return Registry(plugins=[("reference", "mla_portable.reference"), (name, with_hook(hook))], environ={})

    own = [each.name for each in Registry(plugins=[]).engines]
    assert own == ["vLLM", "SGLang"]
    status = EngineStatus("1.0", True, "on", "serves")
    served = Engine("AcmeServe", lambda registry, device: status)
    registry = registers(served)
    assert registry.engines[2:] == (served,) and [report.error for report in registry.plugin_reports] == ["", ""]
    answer = document("doctor", "--device", "cpu", registry=registry)
    assert answer["acmeserve"]["note"] == "serves" and {"vllm", "sglang"} < answer.keys()
    assert "AcmeServe 1.0: plugin registered (serves)" in invoke("doctor", "--device", "cpu", registry=registry).stdout

    def error(*given: object, **named: str) -> str:
        return registers(*given, **named).plugin_reports[1].error

    assert "engine 'vllm': declared already" in error(Engine("VLLM", served.status))
    assert "expected an Engine, got str" in error("AcmeServe")
    mode = Variable("MLA_PORTABLE_VLLM", "on")
    assert "variable 'MLA_PORTABLE_VLLM': declared already" in error(served, mode, name="vllm")
    with pytest.raises(InvalidArgument, match="MLA_PORTABLE_FLASH_MLA_MAX_LOGITS: got 'maybe', expected one of on, off"):
        assert Registry(plugins=[], environ={"MLA_PORTABLE_FLASH_MLA_MAX_LOGITS": "maybe"}).policy


def test_what_adapters_declare_needs_no_engine():
    code = (
        "import sys\nsys.modules.update(vllm=None, sglang=None)\n"
        "from mla_portable.choose import Registry\n"
        "known = {'MLA_PORTABLE_VLLM': 'off', 'MLA_PORTABLE_SGLANG': 'off'}\n"
        "assert dict(Registry(environ=known).environment) == known"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_plugins_of_one_name():
    second = make_plugin(implementation("other.v1"))
    registry = registry_with(("twin", make_plugin(implementation("twin.v1"))), ("twin", second))
    assert [r.ok for r in registry.plugin_reports] == [True, False, True]
    assert "duplicate plugin name 'twin'" in registry.plugin_reports[1].error
    assert names(registry) == ["good.v1 / merge_states", "twin.v1 / merge_states"]


@pytest.mark.parametrize(("plugin", "name"), [("aaa", "good.v1"), ("nova", "novaa.v1"), ("nova", "nov.v1")])
def test_a_plugin_registers_only_under_its_own_name(plugin, name):
    registry = registry_with((plugin, make_plugin(implementation(name, preference=0))))
    (report,) = [each for each in registry.plugin_reports if each.name == plugin]
    assert f"{name}: expected a name that starts with '{plugin}.'" in report.error
    assert f"rename it to '{plugin}.v1'" in report.error
    assert names(registry) == ["good.v1 / merge_states"]


def test_a_pair_of_name_and_primitive_is_taken_once_and_the_whole_plugin_goes():
    twice = make_plugin(implementation("twice.v1"), implementation("twice.v1"))
    registry = registry_with(("twice", twice))
    (report,) = [each for each in registry.plugin_reports if each.name == "twice"]
    assert "twice.v1 / merge_states: already registered by the plugin 'twice'" in report.error
    assert names(registry) == ["good.v1 / merge_states"]
    both = make_plugin(implementation("both.v1"), implementation("both.v1", SPARSE_DECODE))
    assert all(r.ok for r in registry_with(("both", both)).plugin_reports)


def bad_support(**fields: object) -> object:
    return implementation("bad.v1", support=replace(ANYWHERE, **fields))


NONSENSE = {
    "no implementation": lambda: "bad.v1",
    "name without a variant": lambda: implementation("bad"),
    "the reserved name": lambda: implementation("auto.v1"),
    "unknown primitive": lambda: implementation("bad.v1", "sparse_attention"),
    "support is a dict": lambda: implementation("bad.v1", support={"archs": ("sm90",)}),
    "unknown layout": lambda: bad_support(kv_layouts=("int4",)),
    "archs is one string": lambda: bad_support(archs="sm90"),
    "heads is one number": lambda: bad_support(num_heads=64),
    "a limit is a text": lambda: bad_support(max_topk="2048"),
    "a head count is a text": lambda: bad_support(padded_heads=("64",)),
    "negative preference": lambda: implementation("bad.v1", preference=-1),
    "preference is not a number": lambda: implementation("bad.v1", preference=float("nan")),
    "preference is a text": lambda: implementation("bad.v1", preference="x"),
    "no preference": lambda: implementation("bad.v1", preference=None),
    "preference is a truth": lambda: implementation("bad.v1", preference=True),
    "bind cannot be called": lambda: implementation("bad.v1", bind="kernel"),
    "check cannot be called": lambda: implementation("bad.v1", check=True),
    "a schedule kind in words": lambda: implementation("bad.v1", schedule_kind="tiles"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_fails_on_the_plugins_own_line(what: str):
    @hookimpl
    def register(registrar: Registrar) -> None:
        registrar.add(implementation("bad.fine"))
        registrar.add(NONSENSE[what]())  # the line that the traceback must show

    module = ModuleType("bad")
    vars(module)["mla_portable_register"] = register
    registry = registry_with(("bad", module))
    report = registry.plugin_reports[0]
    assert not report.ok and report.error
    assert "the line that the traceback must show" in report.traceback
    assert names(registry) == ["good.v1 / merge_states"]


def test_a_detector_must_be_callable():
    registry = registry_with(("bad", make_plugin(implementation("bad.v1"), detectors=("sm90",))))
    assert "a detector must be callable, got str" in registry.plugin_reports[0].error


def test_registering_after_the_hook_has_returned_is_refused():
    kept: list[Registrar] = []

    def hook(registrar: Registrar) -> None:
        registrar.add(implementation("late.v1"))
        kept.append(registrar)

    registry = registry_with(("late", with_hook(hook)))
    assert registry.plugin_reports[0].ok
    with pytest.raises(Exception, match="registers after its hook has returned"):
        kept[-1].add(implementation("late.v2"))
    assert "late.v2 / merge_states" not in names(registry)


@pytest.mark.parametrize(
    "failure",
    [OSError("no driver"), SystemExit("no licence"), KeyboardInterrupt(), GeneratorExit(), "nonsense", H200],
    ids=["raises", "exits", "interrupts", "panics", "lies", "speaks of another device"],
)
def test_a_detector_that_fails_is_passed_over_and_reported(failure: object, caplog: pytest.LogCaptureFixture):
    def broken(device: torch.device) -> DeviceFacts | None:
        if isinstance(failure, BaseException):
            raise failure
        return failure

    vendor = DeviceFacts("vendor", "Vendor 1", "v1", device_type="cpu")
    plugins = [
        ("bad", make_plugin(implementation("bad.v1"), detectors=(broken,))),
        ("fine", make_plugin(implementation("fine.v1"), detectors=(lambda device: vendor,))),
    ]
    registry = registry_with(*plugins)
    assert all(report.ok for report in registry.plugin_reports)
    assert registry.facts("cpu") is vendor, "the next detector is asked"
    report = registry.plugin_reports[0]
    assert not report.ok and report.error.startswith("its detector failed on cpu: ")
    text = registry.decide(Request(MERGE_STATES, vendor)).text()
    assert f"plugin loaded, but {report.error}" in text and "did not load" not in text
    assert "bad.v1 / merge_states" in names(registry), "the implementations stay"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert registry.facts("cpu") is vendor and len(caplog.records) == 1, "asked once"


def test_detector_memory_errors_reach_the_user():
    def broken(device: torch.device) -> DeviceFacts | None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    registry = registry_with(("bad", make_plugin(implementation("bad.v1"), detectors=(broken,))))
    with pytest.raises(torch.OutOfMemoryError):
        registry.facts("cpu")


# Entry points


def install(site: Path, distribution: str, version: str, points: str, **modules: str) -> None:
    """A distribution as pip leaves it: metadata, entry points and modules."""
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[mla_portable.backends]\n{points}\n")
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


WORKING = """
from fake_plugins import implementation
from mla_portable.contracts import hookimpl

@hookimpl
def mla_portable_register(registrar):
    registrar.add(implementation("{backend}.v1"))
"""


def test_installed_distributions_are_found_and_one_broken_takes_nothing_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "zeta-mla", "1.2", "zeta = zeta_mla_plugin", zeta_mla_plugin=WORKING.format(backend="zeta"))
    install(tmp_path, "beta-mla", "0.3", "beta = beta_mla_plugin", beta_mla_plugin="def mla_portable_register(:\n")
    install(tmp_path, "beta-second", "9", "beta = zeta_mla_plugin")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry(environ={})
    by_pair = {(r.name, r.distribution): r for r in registry.plugin_reports}
    zeta, beta = by_pair["zeta", "zeta-mla"], by_pair["beta", "beta-mla"]
    assert zeta.ok and (zeta.module, zeta.version) == ("zeta_mla_plugin", "1.2")
    assert not beta.ok and beta.error.startswith("SyntaxError: ") and beta.version == "0.3"
    assert "duplicate plugin name 'beta'" in by_pair["beta", "beta-second"].error
    assert by_pair["reference", "mla-portable"].ok
    assert "zeta.v1" in [i.name for i in registry.implementations(MERGE_STATES)]
    assert "reference.torch" in [i.name for i in registry.implementations(MERGE_STATES)]


def test_a_second_distribution_of_the_cores_name_is_not_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "mla-portable", "99", "aaa = false_core", false_core=WORKING.format(backend="aaa"))
    monkeypatch.syspath_prepend(tmp_path)
    sources = installed_plugins()
    assert (sources[0].name, sources[0].module, sources[0].version) == ("reference", "mla_portable.reference", __version__)
    assert ("aaa", "false_core") in [(source.name, source.module) for source in sources[1:]]
    assert "reference.torch" in [i.name for i in Registry(environ={}).implementations()]


@pytest.mark.parametrize(
    ("requirement", "ok"), [("mla_portable>=99", False), ("mla-portable>=0.0.1", True), ("numpy>=99", True)]
)
def test_a_plugin_for_another_version_of_the_core_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requirement: str, ok: bool
):
    pytest.importorskip("packaging")
    install(tmp_path, "zeta-mla", "1.2", "zeta = zeta_mla_plugin", zeta_mla_plugin=WORKING.format(backend="zeta"))
    metadata = next(tmp_path.glob("*.dist-info")) / "METADATA"
    metadata.write_text(metadata.read_text() + f"Requires-Dist: {requirement}\n")
    monkeypatch.syspath_prepend(tmp_path)
    report = next(r for r in Registry(environ={}).plugin_reports if r.name == "zeta")
    wanted = "" if ok else f"PluginError: zeta-mla 1.2 requires {requirement}, and {__version__} is installed"
    assert (report.ok, report.error) == (ok, wanted)


def test_the_cores_own_plugin_is_first_whatever_others_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "aaa", "1", "reference = aaa_plugin", aaa_plugin=WORKING.format(backend="aaa"))
    monkeypatch.syspath_prepend(tmp_path)
    sources = installed_plugins()
    assert (sources[0].name, sources[0].distribution) == ("reference", "mla-portable")
    assert "aaa_plugin" not in sys.modules, "listing imports nothing"
    rest = [(source.name, source.distribution) for source in sources[1:]]
    assert rest == sorted(rest)
