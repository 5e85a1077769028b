# SPDX-License-Identifier: Apache-2.0
"""The pages as a reader uses them: links lead somewhere, commands run as written, quoted messages exist in the code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compiling import KEPT

from mla_portable.capability.run import EngineTime, Run, runs_in

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT, *ROOT.glob("docs/**/"), ROOT / "capability", *ROOT.glob("backends/*"), *ROOT.glob("examples/*"))
PAGES = sorted(page for folder in FOLDERS for page in folder.glob("*.md") if page.name != "MATRIX.md")
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

NOT_RUN = {
    r"\bpip (install|uninstall|wheel)\b|python3 -m venv": "installs or removes packages: ci/install and .ci/run do it",
    r"\bcurl\b|serve\.log|^ray start": "needs a server, or several nodes",
    r"\bvllm serve\b|\bsglang\.launch_server\b|ci/gpu_vllm|ci/vllm_own": "needs an engine and a GPU",
    r"^ci/(gpu|contribute)|--device cuda|--graph|conform nvidia": "needs a GPU",
    r"--device npu": "needs an NPU",
    r"^mla-portable bench |\bmla-portable tune": "minutes on a CPU: tests/test_bench_command.py, tests/test_tune.py",
    r"^mla-portable conform triton|_triton\.compile_all": "minutes on a CPU: ci/conformance, ci/compile",
    r"^mla-portable run": "half a minute each: ci/main_job",
    r"\bacme\b|^mla-portable explain sparse_prefill": "needs the example plugin: tests/test_example_plugin.py",
    r"^ci/release/bench": "reads a run of the reader's: tests/test_bench_engines.py",
    r"^git |ci/release/matrix|ci/gates|ci/check_runs": "changes or judges the checkout: ci/gates.py",
    r"^ci/lint|^ci/site|^pytest": "is run by .ci/run",
    r"^export ": "sets a variable of the reader's shell",
}
"""Commands that this test does not run, and why."""


def commands() -> Iterator[str]:
    """Each line of the pages' bash blocks, once, without the remark at its end."""
    texts = [body for page in PAGES for language, body in BLOCK.findall(page.read_text()) if language == "bash"]
    lines = [re.sub(r"\s+# .*", "", line).strip() for text in texts for line in text.splitlines()]
    yield from dict.fromkeys(line for line in lines if line and not line.startswith("#"))


def why_not(command: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, command)), None)


def programs() -> Iterator[tuple[str, str]]:
    """(page, text) of each Python block that is complete: it begins with its imports."""
    for page in PAGES:
        for language, body in BLOCK.findall(page.read_text()):
            if language == "python" and body.startswith(("import ", "from ")):
                yield page.name, body


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the checkout and can be written to, with `mla-portable` and `python` on its path."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "bin").mkdir()
    for name, run in {"mla-portable": "-m mla_portable", "python": ""}.items():
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {run} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(command: list[str], checkout: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MLA_PORTABLE_")}
    environ |= KEPT | {"TRITON_INTERPRET": "0", "PATH": f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True)


@pytest.mark.parametrize("command", [each for each in commands() if why_not(each) is None])
def test_a_command_runs_as_written(command: str, checkout: Path) -> None:
    done = run(["bash", "-c", command], checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("script", "usage"), [("contribute", "ci/contribute WHO"), ("gpu", "ci/gpu [FOLDER]")])
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_the_scripts_for_a_gpu_have_help(script: str, usage: str, option: str, checkout: Path) -> None:
    (checkout / "ci").unlink()
    (checkout / "ci").mkdir()
    (checkout / "ci" / script).write_bytes((ROOT / "ci" / script).read_bytes())  # it works in the folder that it lies in
    before = sorted(checkout.iterdir())
    done = run(["bash", str(checkout / "ci" / script), option], checkout)
    assert done.returncode == 0 and usage in done.stdout and "set -" not in done.stdout and not done.stderr
    assert sorted(checkout.iterdir()) == before


def test_every_reason_for_not_running_a_command_is_used() -> None:
    given = {why_not(each) for each in commands()}
    assert given >= set(NOT_RUN.values())
    assert sum(why_not(each) is None for each in commands()) >= 10


@pytest.mark.parametrize(("page", "program"), list(programs()), ids=lambda value: value if len(value) < 40 else "")
def test_a_complete_program_runs_as_written(page: str, program: str, checkout: Path) -> None:
    done = run([sys.executable, "-c", program], checkout)
    assert done.returncode == 0 and done.stdout, done.stderr


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    missing: list[str] = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            name, _, anchor = target.partition("#")
            path = (page.parent / name).resolve() if name else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                missing.append(f"{page.relative_to(ROOT)}: {target}")
    assert not missing


def recorded_rank_times(runs: Iterable[Run]) -> dict[tuple[str, int], tuple[float, float]]:
    """(row, heads) -> times of stock and of the plugin of DeepSeek-V3.2 in the newest run that has them."""
    whole = ([time for time in run.engine_times if "," not in time.engine] for run in sorted(runs, key=lambda run: run.date))
    times = [several for several in whole if several]  # another model's name, or a smaller number of layers, follows a comma
    found: dict[tuple[str, int], dict[str, float]] = {}
    for each in times[-1] if times else []:
        if each.quantity != "layer":
            prompts = f"{each.requests} x {each.tokens:,}"
            row = prompts if each.quantity == "first_token" else str(each.requests)
            found.setdefault((row, each.heads), {})[each.backend] = each.us
    return {row: (both["stock"], both["plugin"]) for row, both in found.items() if both.keys() >= {"stock", "plugin"}}


def rank_times() -> dict[tuple[str, int], tuple[float, float]]:
    """(row, heads) -> times of stock and of the plugin: those of a run, otherwise those of the table in docs/vllm.md."""
    table = re.search(r"^\| \| 16 heads, stock .*?\n\n", (ROOT / "docs/vllm.md").read_text(), re.MULTILINE | re.DOTALL)
    found = recorded_rank_times(run for _, run in runs_in(ROOT / "capability"))
    assert bool(found) != bool(table), "docs/benchmarks.md has the table of a run, so docs/vllm.md must link to it instead"
    if table is None:
        return found
    for line in table.group().strip().splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        numbers = [float(cell.replace(",", "")) for cell in cells]
        short = re.sub(r"first token of | tokens, ms|a decode step of | requests?.*", "", name)
        found[short, 16], found[short, 128] = (numbers[0], numbers[1]), (numbers[2], numbers[3])
    return found


def test_rank_times_of_a_run() -> None:
    def time(engine: str, backend: str, us: float, **named: Any) -> EngineTime:
        given = {"quantity": "first_token", "heads": 16, "requests": 2, "tokens": 4000, "kernels": ""} | named
        return EngineTime.model_validate({"engine": engine, "backend": backend, "us": us, **given})

    times = [
        time("vllm 0.26.0", "stock", 8.0),
        time("vllm 0.26.0", "plugin", 4.0),
        time("vllm 0.30, GLM-5.3-Flash", "plugin", 1.0),
    ]
    times += [time("vllm 0.26.0", name, us, quantity="decode") for name, us in (("stock", 3.0), ("plugin", 2.0))]
    plain = next(run for _, run in runs_in(ROOT / "capability"))
    run = plain.model_copy(update={"engine_times": times})
    half = [time("vllm 0.26.0, 31 of 61 layers", name, 1.0, mode="default") for name in ("stock", "plugin")]
    newer = run.model_copy(update={"engine_times": half, "date": "2999-01-01"})
    assert recorded_rank_times([newer, plain, run]) == {("2 x 4,000", 16): (8.0, 4.0), ("2", 16): (3.0, 2.0)}


def test_the_gain_in_the_readme_is_that_of_the_times() -> None:
    times = rank_times()
    text = (ROOT / "README.md").read_text()
    columns = ["16 x 128", "8 x 1,000", "4 x 2,000", "2 x 4,000", "1 x 8,000", "1 x 16,000", "1", "16", "64"]
    later = (ROOT / "docs/dev/vllm-testing.md").read_text()  # a run that is not kept: 16 x 128, milliseconds
    found = re.search(r"16 x 128 took (\d+) ms \(stock (\d+)\), and (\d+) with 128\nheads \(stock (\d+)\)", later)
    assert found is not None
    again = {16: int(found[1]) / int(found[2]), 128: int(found[3]) / int(found[4])}
    rows = re.findall(r"^\| (16|128) \(\w+ parallel 8\) \| (.*) \|$", text, re.MULTILINE)
    assert [heads for heads, _ in rows] == ["16", "128"]
    for heads, stated in rows:
        ratios = [f"{times[name, int(heads)][1] / times[name, int(heads)][0]:.2f}" for name in columns]
        ratios[0] += f" to {again[int(heads)]:.2f}"
        assert stated.replace("*", "").split(" | ") == ratios
    first, one, four = (LONG[size] for size in (("first_token", 1, 64_000), ("decode", 1, 60_000), ("decode", 4, 60_000)))
    prose = " ".join(text.split())
    assert f"a prompt of 64,000 tokens: {first:.2f}; decode steps behind 60,000: {one:.2f} and {four:.2f}" in prose


def long_ratios() -> dict[tuple[str, int, int], float]:
    """(quantity, requests, tokens) -> the plugin's time in units of stock's, of the runs of long contexts."""
    times: dict[tuple[str, int, int], dict[str, float]] = {}
    for _, run in runs_in(ROOT / "capability"):
        for each in run.engine_times:
            if each.engine.endswith("long contexts"):
                times.setdefault((each.quantity, each.requests, each.tokens), {})[each.backend] = each.us
    return {size: both["plugin"] / both["stock"] for size, both in times.items()}


LONG = long_ratios()


def test_the_set_ups_hold_the_weights() -> None:
    """Of README's table: whole nodes of eight, filled to three quarters at most, and no smaller number of them is."""
    memory = {"H200": 141, "H100 80 GB": 80, "H20 96 GB": 96, "A100 80 GB": 80, "L40S 48 GB": 48, "RTX 4090 24 GB": 24}
    memory |= {"B200": 180, "RTX PRO 6000 96 GB": 96, "MI300X": 192, "BI-V150 32 GB": 32}
    stated = re.findall(r"^\| ([\w\- ]+?) \| (\d+)(?:;[^|]*)? \| ", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [name for name, _ in stated] == list(memory)
    for name, number in stated:
        assert int(number) == next(gpus for gpus in range(8, 999, 8) if 0.75 * gpus * memory[name] >= 671), name


def test_the_arithmetic_of_fitting() -> None:
    """docs/deploy.md: weights per GPU, and bytes of the cache."""
    text = (ROOT / "docs/deploy.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (\d+) billion \| (\d+) GB \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 3
    for parameters, weights, each in rows:
        assert parameters == weights
        *shares, half, of_half = (float(cell) for cell in re.findall(r"([\d.]+) GB", each))
        assert all(abs(share - int(weights) / gpus) <= 0.5 for share, gpus in zip(shares, (8, 16, 24, 40), strict=True))
        assert abs(half - int(weights) / 2) <= 0.5 and abs(of_half - half / 8) <= 0.5 and half <= 0.75 * 8 * 80
    products = re.findall(r"(\d+) x \(([\d,]+) \+ 132\) = ([\d,]+) \| ([\d.]+) GB", text)
    assert len(products) == 4
    for layers, row, total, context in products:
        own = int(layers) * (int(row.replace(",", "")) + 132)
        assert f"{own:,}" == total and f"{own * 131072 / 1e9:.1f}" == context


def messages(tree: ast.AST) -> Iterator[str]:
    """Every string of a module; values that are put into it are three dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sdg]", "...", node.value)


@pytest.mark.parametrize(("engine", "least"), [("vLLM", 25), ("SGLang", 8)])
def test_quoted_messages_exist_in_the_code(engine: str, least: int) -> None:
    """The first column of an engine's tables of messages, but for those of others; `...` stands for values."""
    text = (ROOT / "docs/troubleshooting.md").read_text()
    sections = [each for each in text.split("\n## ") if each.startswith(engine)]
    cells = re.findall(r"^\| (`.*?) \| ", "\n".join(sections), flags=re.MULTILINE)
    found = [each for cell in cells for each in re.findall(r"`([^`]+)`( \((?:vLLM|DeepGEMM|Triton)'s\))?", cell)]
    known = "\n".join(text for path in (ROOT / "mla_portable").rglob("*.py") for text in messages(ast.parse(path.read_text())))
    pieces = {
        (message, piece.strip(" ,:"))
        for message, owner in found
        if not owner
        # InvalidArgument puts "where: argument: got X, expected Y." together
        for piece in re.split(r"\.\.\.|^(?:vLLM|SGLang|environment): [^:]*:|got |, expected |\.$", message)
        if len(piece.split()) > 1
    }
    assert len(pieces) >= least
    assert not {(message, piece) for message, piece in pieces if piece not in known}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_uses_the_terms_of_the_field(page: Path) -> None:
    """Words of this project's own that were replaced: baseline, roofline bound, reference, forced."""
    found = re.findall(r"\b(rivals?|yardstick|mends?|mended|demanded|who serves|is told|tells no)\b", page.read_text().lower())
    assert not found
