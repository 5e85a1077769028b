# SPDX-License-Identifier: Apache-2.0
"""`doctor --engine`: a server that answers as vLLM's or SGLang's sources do, and logs as engines write them.

That real workers' metrics are read as they are written: tests/vllm/test_vllm_serving.py.
"""

from __future__ import annotations

import json
import os
import re
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from commands import document, in_a_process, invoke

from mla_portable.cli.doctor.instead import REPLACED
from mla_portable.cli.doctor.reading import Serving, in_log, in_metrics
from mla_portable.cli.doctor.running import look_at
from mla_portable.cli.doctor.tested import TESTED
from mla_portable.engines.common.metrics import NOT_SERVING

pytestmark = pytest.mark.usefixtures("a_bare_machine")

ROOT = Path(__file__).parents[1]
GAUGE = "# HELP mla_portable_serves Processes.\n# TYPE mla_portable_serves gauge\n"
ONE_PROCESS = "# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.7e+09\n"
COUNTED = 'vllm:prompt_tokens_total{engine="0",model_name="m"} 12.0\n'
DECODE = 'mla_portable_serves{device="NVIDIA H200",implementation="nvidia.native",primitive="sparse_decode"} 8.0\n'
PREFILL = 'mla_portable_serves{device="NVIDIA H200",implementation="nvidia.native",primitive="sparse_prefill"} 8.0\n'
GONE = 'mla_portable_serves{device="NVIDIA H200",implementation="triton.portable",primitive="sparse_prefill"} 0.0\n'


def card(owner: str) -> str:
    """What both engines answer at /v1/models (`ModelList` of `ModelCard`)."""
    model = {"id": "m", "object": "model", "created": 1, "owned_by": owner, "root": "m", "parent": None, "max_model_len": 64}
    return json.dumps({"object": "list", "data": [model]})


def vllm(metrics: str) -> dict[str, str]:
    return {"/version": '{"version":"0.33.0"}', "/v1/models": card("vllm"), "/metrics": metrics}


def sglang(metrics: str, **options: str) -> dict[str, str]:
    """SGLang answers its options and its version at /server_info."""
    info = {"model_path": "m", "attention_backend": "dsa", "version": "0.5.16", "internal_states": [{}], **options}
    return {"/v1/models": card("sglang"), "/metrics": metrics, "/server_info": json.dumps(info)}


@contextmanager
def server(pages: Mapping[str, str | int]) -> Iterator[str]:
    """A server of these pages alone; a number is a status, 0 an answer after two seconds. Else the test is wrong."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path, 404)
            assert self.path in ("/version", "/v1/models", "/metrics", "/server_info"), self.path
            if page == 0:
                time.sleep(2)
                return
            self.send_response(page if isinstance(page, int) else 200)
            self.end_headers()
            self.wfile.write(b"" if isinstance(page, int) else page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{found.server_port}"
    finally:
        found.shutdown()
        found.server_close()


def test_a_server_whose_workers_serve():
    with server(vllm(COUNTED + GAUGE + DECODE + PREFILL + GONE)) as url:
        answer = document("doctor", "--engine", f"{url}/v1")
        text = invoke("doctor", "--engine", url).stdout
    engine = answer["engine"]
    assert answer["ok"] and engine["serves"] is True and engine["engine"] == "vLLM 0.33.0" and engine["models"] == ["m"]
    served = {(each["primitive"], each["implementation"], each["device"], each["processes"]) for each in engine["served"]}
    assert served == {(name, "nvidia.native", "NVIDIA H200", 8) for name in ("sparse_decode", "sparse_prefill")}
    assert "mla_portable serves there." in text and "nvidia.native" in text and "triton.portable" not in text


@pytest.mark.parametrize(
    ("pages", "serves", "words"),
    [
        (vllm(COUNTED), False, "those of all its processes, and none has mla_portable_serves"),
        (vllm(COUNTED), False, "start vLLM with --attention-backend CUSTOM, or with MLA_PORTABLE_VLLM=override"),
        (vllm(ONE_PROCESS + COUNTED), None, "PROMETHEUS_MULTIPROC_DIR"),
        (sglang(COUNTED), False, "SGLang's own kernels serve; its /metrics"),
        (sglang(COUNTED), False, "start SGLang with MLA_PORTABLE_SGLANG=on"),
        (
            sglang(COUNTED, dsa_prefill_backend="flashmla_kv", dsa_decode_backend="trtllm"),
            False,
            "--dsa-prefill-backend flashmla_kv and --dsa-decode-backend trtllm, and the plugin does not replace trtllm; its",
        ),
        ({**sglang(COUNTED), "/server_info": 500}, False, "SGLang's own kernels serve"),
        ({"/v1/models": card("sglang")}, None, "--enable-metrics"),
        ({"/version": '{"version":"0.33.0"}', "/v1/models": 401, "/metrics": COUNTED}, False, "none has mla_portable_serves"),
        ({"/version": "<html>", "/v1/models": "[]", "/metrics": 500}, None, "the server has no /metrics"),
    ],
)
def test_a_server_that_does_not_serve_or_does_not_say(pages: Mapping[str, str | int], serves: bool | None, words: str):
    with server(pages) as url:
        answer = document("doctor", "--engine", url, code=1)
        text = " ".join(invoke("doctor", "--engine", url, code=1).stdout.split())
    assert answer["ok"] is False and answer["engine"]["serves"] is serves
    assert words in text and ("does NOT serve" if serves is False else "is unknown") in text and "remedy" in text


def test_options_of_sglang_that_do_not_come_are_done_without():
    with server({**sglang(COUNTED), "/server_info": 0}) as url:
        found = look_at(url, seconds=1.5)
    assert found.serves is False and found.engine == "SGLang" and found.why[0].startswith("SGLang's own kernels serve; its")


def test_what_is_no_engine_is_refused(tmp_path: Path):
    with server({}) as url:
        pass
    for where, words in ((url, "the URL of a server that answers"), (str(tmp_path / "no.log"), "the file of its log")):
        stderr = invoke("doctor", "--engine", where, code=2).stderr
        assert stderr.startswith("error: --engine must be the URL of a server") and words in stderr
    for option in (["--device", "cpu"], ["--all"], ["--verbose"]):
        assert f"{option[0]} does not apply to --engine" in invoke("doctor", "--engine", url, *option, code=2).stderr


def test_a_server_is_examined_without_torch(tmp_path: Path):
    code = "import sys; from mla_portable.cli import main\ntry: main()\nfinally: sys.exit(int('torch' in sys.modules))"
    log = tmp_path / "log"
    log.write_text(VLLM_LOG)
    done = subprocess.run([sys.executable, "-c", code, "doctor", "--engine", str(log)], capture_output=True, text=True)
    assert done.returncode == 0 and "mla_portable serves there." in done.stdout, done.stderr


ROUTE = "convert_indices triton.portable, sparse_decode nvidia.native, sparse_prefill nvidia.native; cache fp8_ds_mla, 16 heads"
VLLM_LOG = "".join(
    f"(Worker_TP{rank} pid={100 + rank}) INFO 11-26 10:00:0{rank} [builder.py:77] "
    f"mla_portable serves {layers} layers on NVIDIA H200 (sm90) by route direct: {ROUTE}, written by vllm\n"
    for rank in range(2)
    for layers in (61, 1)
)
INDEXER_LOG = (
    "(EngineCore_DP0 pid=7) INFO [indexer.py:246] mla_portable serves the DSA indexer on NVIDIA A100 80GB PCIe (sm80), "
    "64 heads, top-2048: indexer_select triton.portable, keys written by vLLM; "
    "because DeepGEMM does not support compute capability 8.0\n"
)
SGLANG_LOG = (
    "[2026-11-26 10:00:00 TP0] mla_portable serves _forward_flashmla_sparse, _forward_fa3 for flashmla_sparse (prefill), "
    "fa3 (decode) on NVIDIA A100 (sm80), 16 heads: bf16: sparse_decode nvidia.native_sm80, "
    "sparse_prefill nvidia.native_sm80; because ...\n"
)


def served_in(text: str) -> tuple[Serving, ...]:
    return in_log(text.splitlines()).served


def test_the_lines_of_logs():
    roles = ("convert_indices", "triton.portable"), ("sparse_decode", "nvidia.native"), ("sparse_prefill", "nvidia.native")
    assert served_in(VLLM_LOG) == tuple(Serving(*role, "NVIDIA H200", 2) for role in roles)
    assert served_in(INDEXER_LOG) == (Serving("indexer_select", "triton.portable", "NVIDIA A100 80GB PCIe"),)
    names = {(each.primitive, each.implementation, each.device) for each in served_in(SGLANG_LOG)}
    assert names == {(name, "nvidia.native_sm80", "NVIDIA A100") for name in ("sparse_decode", "sparse_prefill")}
    assert served_in("mla_portable serves in place of FLASHMLA_SPARSE: no reason\nmla_portable hooks nothing\n") == ()


@pytest.mark.parametrize(
    "line",
    [
        "ERROR mla_portable is NOT in use, SGLang runs without it: this SGLang is not one that it knows",
        "WARNING stock FLASHMLA_SPARSE serves this model, mla_portable does not: sinks",
        "WARNING SGLang's own kernels serve this model, mla_portable does not: sinks",
    ],
)
def test_a_log_in_which_the_plugin_does_not_serve(line: str, tmp_path: Path):
    log = tmp_path / "serve.log"
    log.write_text(f"INFO start\n{line}\n{line}\n")
    answer = document("doctor", "--engine", str(log), code=1)
    assert answer["engine"]["serves"] is False and answer["engine"]["why"] == [line]
    log.write_text("INFO start\n")
    assert "no line of the plugin" in invoke("doctor", "--engine", str(log), code=1).stdout


VLLM_BEGINS = "(EngineCore pid=7) INFO 11-26 10:00:00 [core.py:124] Initializing a V1 LLM engine (v0.30.0) with config: ...\n"
STOCK = "(Worker pid=8) INFO Using FLASHMLA_SPARSE attention backend out of potential backends: ['FLASHMLA_SPARSE'].\n"
SGLANG_BEGINS = "[2026-11-26 10:00:00] Use dsa attention backend for DeepSeek with DSA.\n"
SGLANG_SETS = "[2026-11-26 10:00:00] Set DSA backends for fp8_e4m3 KV Cache: prefill={}, decode={}.\n"
HOOKS = "[2026-11-26 10:00:01] mla_portable hooks dsa_backend.DeepseekSparseAttnBackend._forward_fa3\n"
START_VLLM = "remedy start vLLM with --attention-backend CUSTOM, or with MLA_PORTABLE_VLLM=override in its environment"
INSTEAD: dict[str, tuple[str, bool | None, tuple[str, ...]]] = {
    "the flag is forgotten": (
        VLLM_BEGINS + STOCK,
        False,
        ("another backend serves: vLLM chose FLASHMLA_SPARSE, which is its own", START_VLLM, "engine vLLM 0.30.0", "tested"),
    ),
    "another of vLLM's backends": (
        STOCK.replace("FLASHMLA_SPARSE", "FLASH_ATTN_MLA_SPARSE"),
        False,
        ("FLASH_ATTN_MLA_SPARSE",),
    ),
    "a backend that was asked for": ("INFO Using AttentionBackendEnum.FLASHMLA_SPARSE backend.\n", False, (START_VLLM,)),
    "on ROCm": ("INFO Using ROCM_AITER_MLA_SPARSE backend (selected via --attention-backend).\n", False, (START_VLLM,)),
    "on ROCm, by vLLM": ("INFO Using ROCM_AITER_MLA_SPARSE backend out of potential backends: [].\n", False, (START_VLLM,)),
    "on ROCm, 0.17": ("INFO Using Sparse MLA backend.\n", False, (START_VLLM,)),
    "on XPU": ("INFO Using XPU MLA Sparse backend.\n", False, (START_VLLM,)),
    "another model": (
        VLLM_BEGINS + STOCK.replace("FLASHMLA_SPARSE", "FLASH_ATTN"),
        False,
        ("vLLM chose FLASH_ATTN, none of which is for sparse MLA", "serve a model with sparse MLA"),
    ),
    "ours without its layers": (
        VLLM_BEGINS + "INFO Using AttentionBackendEnum.CUSTOM backend.\n",
        None,
        ("vLLM chose CUSTOM, and no line of the plugin", "at level INFO"),
    ),
    "ours in another's place without its layers": (
        "INFO mla_portable serves in place of FLASHMLA_SPARSE: compute capability\n" + STOCK,
        None,
        ("vLLM chose FLASHMLA_SPARSE, and no line of the plugin",),
    ),
    "a plugin that is not there": (
        VLLM_BEGINS + "ValueError: Backend CUSTOM must be registered before use. Use register_backend(...)\n",
        False,
        ("is not registered: vLLM did not load the plugin", "check VLLM_PLUGINS"),
    ),
    "a log that begins too late": (VLLM_BEGINS, False, ("no line of the plugin", "from the engine's start", "CUSTOM")),
    "SGLang, hooked": (
        HOOKS + SGLANG_BEGINS + SGLANG_SETS.format("flashmla_kv", "trtllm"),
        False,
        ("SGLang's own kernels serve", "does not replace trtllm", "remedy start SGLang with MLA_PORTABLE_SGLANG=on in"),
    ),
    "SGLang, hooked, in mode auto": (
        HOOKS + SGLANG_BEGINS + SGLANG_SETS.format("flashmla_kv", "fa3"),
        False,
        ("--dsa-decode-backend fa3 mla_portable does NOT", "remedy start SGLang with MLA_PORTABLE_SGLANG=on in"),
    ),
    "SGLang, not hooked": (SGLANG_BEGINS, False, ("no line of the plugin says that it hooked SGLang", "check SGLANG_PLUGINS")),
}


@pytest.mark.parametrize("case", INSTEAD)
def test_a_log_in_which_another_backend_serves(case: str, tmp_path: Path):
    """Lines as vLLM 0.17 to 0.33 and SGLang 0.5.16 and 0.5.23 write them."""
    text, serves, words = INSTEAD[case]
    log = tmp_path / "serve.log"
    log.write_text(text)
    assert document("doctor", "--engine", str(log), code=1)["engine"]["serves"] is serves
    shown = " ".join(invoke("doctor", "--engine", str(log), code=1).stdout.split())
    assert [each for each in words if each not in shown] == []


def test_the_backend_that_vllm_names_is_no_matter_where_the_plugin_serves_attention(tmp_path: Path):
    log = tmp_path / "serve.log"
    log.write_text(VLLM_BEGINS + STOCK + VLLM_LOG + INDEXER_LOG)
    assert document("doctor", "--engine", str(log))["engine"]["why"] == []
    log.write_text(VLLM_BEGINS + STOCK + INDEXER_LOG)
    (note,) = document("doctor", "--engine", str(log))["engine"]["why"]
    assert "the plugin serves the indexer alone; attention is computed by FLASHMLA_SPARSE of vLLM: start vLLM with" in note
    for pages, engine in ((vllm, "vLLM"), (sglang, "SGLang")):
        with server(pages(GAUGE + DECODE.replace("sparse_decode", "indexer_select"))) as url:
            (note,) = document("doctor", "--engine", url)["engine"]["why"]
        assert f"the plugin serves the indexer alone; attention is computed by kernels of {engine}: start {engine} with" in note


def test_implementations_of_sglang_that_are_replaced_are_those_of_the_adapter():
    from mla_portable.engines.sglang.model import METHOD_OF

    assert {*REPLACED} == {*METHOD_OF, "flashmla_auto"}


def test_a_version_is_said_to_be_tested_or_not(tmp_path: Path):
    with server(vllm(GAUGE + DECODE)) as url:
        answer = document("doctor", "--engine", url)["engine"]
        shown = " ".join(invoke("doctor", "--engine", url).stdout.split())
    assert answer["tested"] == "vLLM 0.33.0 was tested: on H200s: nothing; on a CPU with its real classes: all"
    assert f"tested {answer['tested']}" in shown
    log = tmp_path / "serve.log"
    log.write_text(VLLM_BEGINS.replace("0.30.0", "0.29.1+cu129") + VLLM_LOG)
    answer = document("doctor", "--engine", str(log))["engine"]
    assert answer["engine"] == "vLLM 0.29.1+cu129" and answer["tested"].startswith(
        "vLLM 0.29.1 was not tested; tested on H200s: 0.24"
    )
    with server(sglang(GAUGE + DECODE)) as url:
        answer = document("doctor", "--engine", url)["engine"]
    assert answer["engine"] == "SGLang 0.5.16" and "on H200s: offline engines with a small model" in answer["tested"]
    for pages in ({**vllm(GAUGE + DECODE), "/version": "{}"}, {**vllm(GAUGE + DECODE), "/v1/models": card("acme")}):
        with server(pages) as url:
            assert document("doctor", "--engine", url)["engine"]["tested"] == ""


def documented(page: str) -> dict[str, list[str]]:
    """Version -> the other cells of the first table of a page, links as their words."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", (ROOT / "docs" / page).read_text())
    table = re.split(r"\n\n", text[text.index("|---|") :])[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[1:]]
    return {row[0]: row[1:] for row in rows}


def run_in_ci(script: str) -> set[str]:
    """The versions of an engine that a script in ci/ runs."""
    return {*re.findall(r"^ *run (\d[\d.]*)", (ROOT / "ci" / script).read_text(), re.MULTILINE)}


def test_versions_are_those_of_ci_and_of_the_documentation():
    vllm_s, sglang_s = TESTED["vLLM"], TESTED["SGLang"]
    assert documented("vllm.md") == {each.version: [each.cpu, each.names, each.gpu] for each in vllm_s}
    assert documented("sglang.md") == {each.version: [each.cpu, each.gpu] for each in sglang_s}
    for script, listed in (("vllm", vllm_s), ("sglang", sglang_s)):
        assert run_in_ci(script) == {each.version for each in listed if each.cpu}
        (installed,) = re.findall(rf"^ci/engine_sources {script} (.*)$", (ROOT / "ci" / script).read_text(), re.MULTILINE)
        assert {*installed.split()} == run_in_ci(script)
    assert {path.stem for path in (ROOT / "tests/vllm/interfaces").glob("*.json")} == {
        each.version for each in vllm_s if each.names
    }


def test_plain_torch_among_what_serves_is_pointed_out(tmp_path: Path):
    log = tmp_path / "serve.log"
    log.write_text(VLLM_LOG.replace("sparse_decode nvidia.native", "sparse_decode reference.torch"))
    text = " ".join(invoke("doctor", "--engine", str(log)).stdout.split())
    assert "plain torch (reference.torch) serves sparse_decode, which is slow" in text and "mla_portable serves there" in text
    log.write_text(VLLM_LOG)
    text = invoke("doctor", "--engine", str(log)).stdout
    assert "plain torch" not in text and "unknown" not in text and f"log     {log}" in text.replace("\n", "")[:400]


def test_a_label_is_read_as_prometheus_escapes_it():
    escaped = r'mla_portable_serves{device="a \"b\" \\ c, d=e}",implementation="x.y",primitive="sparse_decode"} 1.0'
    assert in_metrics(escaped) == (Serving("sparse_decode", "x.y", r'a "b" \ c, d=e}'),)
    assert in_metrics('mla_portable_serves{primitive="sparse_decode"} 1.0\nmla_portable_serves_other{a="b"} 1.0') == ()


@contextmanager
def raw_server(first: bytes, rest: bytes = b"", end: bytes = b"") -> Iterator[str]:
    """A server that answers with `first`, with `rest` again and again for some seconds or until it is left, and with `end`."""
    left = threading.Event()

    class Answers(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            with suppress(OSError):  # the client has gone
                self.request.sendall(first)
                pause = 0.05 if len(rest) < 100 else 0.0
                stop = time.monotonic() + 5
                while rest and not left.wait(pause) and time.monotonic() < stop:
                    self.request.sendall(rest)
                self.request.sendall(end)

    found = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answers)
    found.daemon_threads = True
    threading.Thread(target=found.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{found.server_address[1]}"
    finally:
        left.set()
        found.shutdown()
        found.server_close()


BEGIN = b"HTTP/1.1 200 OK\r\n"
DRIPS = {
    "status line": (b"", b"H", b""),
    "headers": (BEGIN, b"a", b": b\r\n\r\n"),
    "body": (BEGIN + b"\r\n", b"a", b""),
    "chunks": (BEGIN + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n", b"0\r\n\r\n"),
}


@pytest.mark.parametrize("what", DRIPS)
def test_a_server_that_drips_is_given_up(what: str):
    with raw_server(*DRIPS[what]) as url, pytest.raises(typer.BadParameter, match=r"no whole answer within 0\.3 s"):
        look_at(url, seconds=0.3)


BLOCK = b"a" * 65536
ENDLESS = {
    "body": (BEGIN + b"\r\n", BLOCK),
    "content-length": (BEGIN + b"Content-Length: 99999999999999\r\n\r\n", BLOCK),
    "chunks": (BEGIN + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + BLOCK + b"\r\n"),
    "a negative chunk": (BEGIN + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", BLOCK),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_an_answer_without_an_end_is_read_up_to_a_limit(what: str):
    with raw_server(*ENDLESS[what]) as url, pytest.raises(typer.BadParameter, match=r"got .* more than "):
        look_at(url, seconds=60)


def test_an_answer_that_is_shorter_than_it_says_is_refused():
    with raw_server(BEGIN + b"Content-Length: 99999999999999\r\n\r\n{}") as url:
        assert "ends 99999999999997 bytes too early" in invoke("doctor", "--engine", url, code=2).stderr


ODD = {
    "NaN": DECODE.replace("8.0", "NaN"),
    "+Inf": DECODE.replace("8.0", "+Inf"),
    "1e400": DECODE.replace("8.0", "1e400"),
    "abc": DECODE.replace("8.0", "abc"),
    "0x10": DECODE.replace("8.0", "0x10"),
    "-1": DECODE.replace("8.0", "-1"),
    "0.5": DECODE.replace("8.0", "0.5"),
    "cut in the value": DECODE.replace("8.0", "8e"),
    "cut before the value": DECODE.partition("}")[0] + "}",
    "cut in a label": DECODE[:60],
    "no label": "mla_portable_serves{} 8.0",
}


@pytest.mark.parametrize("what", ODD)
def test_samples_that_count_nothing(what: str):
    with server(vllm(GAUGE + ODD[what])) as url:
        answer = document("doctor", "--engine", url, code=1)["engine"]
        assert "is unknown" in invoke("doctor", "--engine", url, code=1).stdout
    assert answer["serves"] is None and "that cannot be read: 1" in answer["why"][0]
    with server(vllm(GAUGE + PREFILL + ODD[what])) as url:
        answer = document("doctor", "--engine", url)["engine"]
    assert [each["primitive"] for each in answer["served"]] == ["sparse_prefill"]
    assert "that cannot be read: 1" in answer["why"][0]


NESTED = "[" * 50_000
NEST = json.loads("[" * 900 + "]" * 900)
ANSWERS = {
    "nested": {"/version": NESTED, "/v1/models": NESTED, "/metrics": COUNTED},
    "nested in a field": {"/version": json.dumps({"version": NEST}), "/v1/models": "{}", "/metrics": COUNTED},
    "surrogates": {"/version": r'{"version": "\ud800"}', "/v1/models": card("vllm").replace('"m"', r'"\udfff"')},
    "long": {"/version": json.dumps({"version": "x" * 10**6}), "/v1/models": card("v" * 10**6), "/metrics": COUNTED},
    "labels": vllm("mla_portable_serves{" + "a" * 10**6 + "} 1.0"),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_answers_that_no_engine_gives(what: str):
    with server(ANSWERS[what]) as url:
        assert document("doctor", "--engine", url, code=1)["engine"]["serves"] is not True
        done = in_a_process("doctor", "--engine", url, code=1)
    assert "Traceback" not in done.stderr and len(done.stdout) < 5000


STEERS = "\x1b]0;title\x07\x1b[31m"


def test_no_text_of_a_server_or_a_log_steers_the_terminal(tmp_path: Path):
    pages = vllm(GAUGE + DECODE.replace("NVIDIA", f"NVIDIA{STEERS}"))
    pages["/version"] = json.dumps({"version": f"1{STEERS}"})
    pages["/v1/models"] = card(f"vllm{STEERS}").replace('"m"', json.dumps(f"m{STEERS}\ud800"))
    log = tmp_path / "serve.log"
    log.write_text(f"{NOT_SERVING[0]}{STEERS}\n{VLLM_LOG.replace('NVIDIA', 'NVIDIA' + STEERS)}")
    with server(pages) as url:
        shown = {url: 4, str(log): 1}
        for where, times in shown.items():
            text = invoke("doctor", "--engine", where).stdout.replace("\n", "")
            assert "\x1b" not in text and "\x07" not in text and text.count(r"\x1b]0;title\x07") >= times
    with raw_server(f"{STEERS}\r\n\r\n".encode()) as url:
        stderr = invoke("doctor", "--engine", url, code=2).stderr
    assert "\x1b" not in stderr and r"\x1b]0;title\x07" in stderr


@pytest.mark.parametrize("kind", ["a pipe that nobody writes to", "an endless device"])
def test_a_log_without_an_end_is_given_up(kind: str, tmp_path: Path):
    where = tmp_path / "pipe" if "pipe" in kind else Path("/dev/zero")
    if "pipe" in kind:
        os.mkfifo(where)
    with pytest.raises(typer.BadParameter, match=r"no end within 0\.3 s"):
        look_at(str(where), seconds=0.3)


def test_a_pipe_is_read_as_a_log(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text(VLLM_LOG), daemon=True)
    writer.start()
    assert look_at(str(tmp_path / "pipe")).served == served_in(VLLM_LOG)


def test_a_nul_in_the_path_is_refused():
    assert "the file of its log" in invoke("doctor", "--engine", "a\0b", code=2).stderr


def test_a_line_of_users_text_is_read_in_bounded_time(tmp_path: Path):
    """In a process, so that one that takes for ever fails."""
    log = tmp_path / "serve.log"
    log.write_text("mla_portable serves " + "on " * 300_000 + "\n" + "x" * 5_000_000 + "\n" + VLLM_LOG)
    command = [sys.executable, "-m", "mla_portable", "doctor", "--engine", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "mla_portable serves there." in done.stdout


def test_of_many_refusals_the_first_are_shown_and_the_others_counted(tmp_path: Path):
    log = tmp_path / "serve.log"
    log.write_text("".join(f"{n} {NOT_SERVING[0]}: reason {n}{'x' * 2000}\n" for n in range(50_000)))
    why = document("doctor", "--engine", str(log), code=1)["engine"]["why"]
    assert [line.partition(" ")[0] for line in why[:-1]] == [str(n) for n in range(10)]
    assert why[-1] == "and 49990 further lines of this kind" and max(map(len, why)) < 1100
