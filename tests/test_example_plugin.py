# SPDX-License-Identifier: Apache-2.0
"""The plugin of docs/adding-a-vendor.md, really installed into an empty folder and really run."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mla_portable.capability.profiles import load_profiles
from mla_portable.contracts import Support
from mla_portable_common import Library, deep_gemm, flash_mla

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "mla-portable-acme"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "acme"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return os.environ | {"PYTHONPATH": str(target), "TRITON_INTERPRET": "0"}


def mla_portable(*arguments: str, env: dict[str, str], code: int = 0) -> dict:
    command = [sys.executable, "-m", "mla_portable", *arguments, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr + done.stdout
    return json.loads(done.stdout)


def test_the_commands_of_the_page_show_what_the_page_says(environment):
    page = (ROOT / "docs" / "adding-a-vendor.md").read_text()
    commands = re.findall(r"^mla-portable (explain .*?) +# (.*)$", page, flags=re.MULTILINE)
    assert [comment for _, comment in commands] == ["acme.v1 is chosen", "refused: its kernel takes multiples of 64"]
    chosen, refused = (mla_portable(*words.split(), env=environment) for words, _ in commands)
    assert chosen["chosen"] == "acme.v1"
    acme = next(c for c in refused["candidates"] if c["implementation"] == "acme.v1")
    assert [(r["subject"], r["limit"]) for r in acme["reasons"]] == [("topk", "a multiple of 64")]


def test_it_is_a_candidate_on_its_own_vendors_devices_alone(environment):
    for device in ("h200", "mi300x"):
        answer = mla_portable("explain", "sparse_decode", "--layout", "bf16", "--device", device, env=environment)
        acme = next(c for c in answer["candidates"] if c["implementation"] == "acme.v1")
        assert "vendor" in [reason["subject"] for reason in acme["reasons"]] and answer["chosen"] != "acme.v1"
    own = ["--device", "acme-1", "--records", str(EXAMPLE / "acme")]
    assert mla_portable("explain", "sparse_decode", "--layout", "bf16", *own, env=environment)["chosen"] == "acme.v1"


def test_it_conforms(environment):
    report = mla_portable("conform", "acme", "--level", "smoke", env=environment)
    assert report["totals"]["passed"] > 0
    assert report["totals"]["failed"] == report["totals"]["skipped"] == 0


def test_its_own_tests_pass_where_it_is_installed(environment):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(EXAMPLE),
        str(EXAMPLE / "tests"),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_a_decode_that_reads_behind_a_row_is_found(environment, tmp_path):
    """What the kernel reads but does not count may be NaN: without the adapter's care the probe refuses it."""
    changed = tmp_path / "mla_portable_acme"
    subprocess.run(["cp", "-r", str(Path(environment["PYTHONPATH"]) / "mla_portable_acme"), str(changed)], check=True)
    adapter = changed / "sparse_decode.py"
    text = adapter.read_text()
    assert "torch.where(uncounted, compact[:, :1], compact)" in text
    adapter.write_text(text.replace("torch.where(uncounted, compact[:, :1], compact)", "compact.masked_fill(uncounted, 0)"))
    env = environment | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"}
    request = ["--heads", "16", "--topk", "128", "--layout", "bf16", "--lengths"]
    answer = mla_portable("explain", "sparse_decode", *request, env=env)
    assert answer["chosen"] == "reference.torch"
    assert mla_portable("explain", "sparse_decode", *request, env=environment)["chosen"] == "acme.v1"
    acme = next(c for c in answer["candidates"] if c["implementation"] == "acme.v1")
    assert any("probe" in r["subject"] and "conform acme" in r["remedy"] for r in acme["reasons"])


def test_its_profile_describes_the_device_that_its_detector_finds():
    (profile,) = load_profiles(EXAMPLE / "acme/profiles").values()
    assert profile.matches("Acme One") and profile.arch == "acme10" and profile.slug == "acme-1"


def test_the_probe_finds_a_wrong_convention(environment, tmp_path):
    """The vendor's next release marks absent indices with 0: the probe must notice, name it, and pass over the kernel."""
    package = Path(environment["PYTHONPATH"]) / "mla_portable_acme"
    changed = tmp_path / "mla_portable_acme"
    subprocess.run(["cp", "-r", str(package), str(changed)], check=True)
    library = changed / "vendor_library.py"
    text = library.read_text()
    assert "valid = chosen >= 0" in text
    library.write_text(text.replace("valid = chosen >= 0", "chosen = chosen.clamp(min=0)\n    valid = chosen >= 0"))
    env = environment | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"}
    answer = mla_portable("explain", "sparse_prefill", "--heads", "16", "--topk", "128", "--layout", "bf16", env=env)
    assert answer["chosen"] == "reference.torch"
    acme = next(c for c in answer["candidates"] if c["implementation"] == "acme.v1")
    assert any("probe" in r["subject"] for r in acme["reasons"])


def test_the_page_quotes_the_plugin_word_for_word():
    page = (ROOT / "docs" / "adding-a-vendor.md").read_text()
    shared = [ROOT / "tests" / "fake_plugins" / f"musa.{kind}" for kind in ("py", "toml")]  # adapters: mla_portable_common
    sources = "\n".join(path.read_text() for path in [*EXAMPLE.rglob("*.py"), EXAMPLE / "pyproject.toml", *shared])
    quoted = [body for language, body in re.findall(r"```(python|toml)\n(.*?)```", page, flags=re.DOTALL)]
    assert len(quoted) >= 5
    for body in quoted:
        assert body.strip("\n") in sources, f"not in the example:\n{body}"


def test_the_two_files_of_the_page_are_a_plugin_that_installs(tmp_path):
    page = (ROOT / "docs" / "adding-a-vendor.md").read_text()
    toml = (ROOT / "tests" / "fake_plugins" / "musa.toml").read_text()
    assert f"```toml\n{toml}```" in page
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "pyproject.toml").write_text(toml)
    (source / "mla_portable_musa.py").write_text((ROOT / "tests" / "fake_plugins" / "musa.py").read_text())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(target)]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = mla_portable("doctor", env=os.environ | {"PYTHONPATH": str(target), "TRITON_INTERPRET": "0"})
    (plugin,) = [each for each in answer["plugins"] if each["name"] == "musa"]
    assert plugin["ok"] and len(plugin["implementations"]) == 5


def test_the_page_shows_the_shared_adapters_with_their_defaults():
    page = (ROOT / "docs" / "adding-a-vendor.md").read_text()
    for name, function in (
        ("Library", Library),
        ("flash_mla.decode", flash_mla.decode),
        ("flash_mla.prefill", flash_mla.prefill),
        ("deep_gemm.scores", deep_gemm.scores),
    ):
        shown = []
        for each in inspect.signature(function).parameters.values():
            if each.kind is each.KEYWORD_ONLY and "*" not in shown:
                shown.append("*")
            default = getattr(each.default, "__name__", repr(each.default))
            shown.append(each.name if each.default is each.empty else f"{each.name}={default}")
        assert f"\n{name}({', '.join(shown)})\n" in page


def test_the_table_of_support_has_every_field_with_its_default():
    page = (ROOT / "docs" / "adding-a-vendor.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S.*?) \| ", page, flags=re.MULTILINE))

    def shown(field: dataclasses.Field) -> str:
        if field.default is dataclasses.MISSING:
            return "required"
        value = repr(field.default).replace("'", '"')
        return f"`{value}`"

    assert {field.name: shown(field) for field in dataclasses.fields(Support)}.items() <= rows.items()


def test_the_detector_knows_the_vendors_devices_alone(environment, monkeypatch):
    monkeypatch.syspath_prepend(environment["PYTHONPATH"])
    detect = importlib.import_module("mla_portable_acme").detect
    properties = SimpleNamespace(name="Acme One", major=1, minor=0, multi_processor_count=8, total_memory=1 << 34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    facts = detect(torch.device("cuda", 0))
    assert (facts.vendor, facts.arch, facts.num_sms) == ("acme", "acme10", 8)
    assert detect(torch.device("cpu")) is None
    properties.name = "NVIDIA H200"
    assert detect(torch.device("cuda", 0)) is None
