# SPDX-License-Identifier: Apache-2.0
"""A device type that the core has never heard of, brought by a plugin: torch's privateuse1 as "acme" (see another_device).

In a process of its own, because torch renames privateuse1 once. The device's tensors are pretended (CPU memory); what is shown
is that no step from the arguments to the kernel, and no command, needs the type to be known to the core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes no backend in Python",
)

BEFORE = """
import sys
from types import SimpleNamespace

import numpy as np
import torch
import another_device as acme
import mla_portable as mp
from mla_portable import reference
from mla_portable.primitives import MERGE_STATES, QUANTIZE_PER_TENSOR
from mla_portable.accelerator import accelerator, add_error_words, default_device, is_device_error
from mla_portable.dispatch import serving
from mla_portable.contracts import Batch, DecodeSchedule, InvalidArgument, Request, ScheduleKind
from mla_portable.choose import Registry

registry = Registry(plugins=[("reference", reference), ("acme", acme)], environ={})
"""


def run(body: str, *words: str, **variables: str) -> str:
    """stdout of a process that runs `body` after BEFORE with `words` as arguments, and environment variables in addition."""
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + body, *words],
        cwd=HERE,
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_facts_and_the_default_device_and_a_device_that_is_not_there():
    run("""
assert registry.facts("acme") == registry.facts("acme:0") == acme.FACTS
assert registry.default_device() == torch.device("acme:0"), registry.default_device()
assert registry.device_types()[-1] == "cpu" and "acme" in registry.device_types()
where = accelerator(torch.device("acme", 0))
assert not where.is_host and not where.is_capturing()
empty, torch.empty = torch.empty, lambda *sizes, pin_memory, **options: empty(*sizes, **options)
assert not where.can_pin(), "memory could be pinned, but no event tells when a copy is done"
torch.empty = empty
for ask in (registry.facts, lambda name: mp.SparseMLAAttention(spec, device=name, registry=registry)):
    spec = mp.AttentionSpec(num_heads=2, kv_layout="bf16", block_size=16, topk=32, softmax_scale=0.1, max_num_tokens=8,
                            max_num_reqs=4, max_model_len=64, graph=False)
    try:
        ask("acme:7")
    except InvalidArgument as error:
        assert "acme:7" in str(error)
    else:
        raise AssertionError("acme:7 was accepted")
assert is_device_error(RuntimeError("ACME error: lost"), "acme") and not is_device_error(RuntimeError("a lost bus"), "acme")
assert not is_device_error(RuntimeError("CPU error: lost"), "cpu"), "its text is no sign"
add_error_words("acme", "a lost bus")
assert is_device_error(RuntimeError("a lost bus"), "acme") and is_device_error(RuntimeError("ACME error: lost"), "acme")
""")


def test_convenience_calls_reach_the_vendor_and_the_reference():
    run("""
outs, lses = torch.randn(2, 3, 4), torch.randn(2, 3)
want, _ = MERGE_STATES.reference(outs, lses)
with serving(registry):
    there = outs.to("acme"), lses.to("acme")
    for backend, number in (("acme", 1), (None, 2)):
        out, lse = mp.merge_states(*there, backend=backend)
        assert out.device == lse.device == torch.device("acme:0")
        torch.testing.assert_close(out.cpu(), want)
    assert set(acme.served) == {("acme:0", 0)}, acme.served  # the probe's calls as well
    guards = len(acme.guards)
    acme.current[0] = 1  # pretend that another device is the current one
    torch.testing.assert_close(mp.merge_states(*there)[0].cpu(), want)
    assert acme.guards[guards:] and set(acme.guards[guards:]) == {0} and acme.current == [1]
    assert acme.served[-1] == ("acme:0", 0), "a kernel is launched on the current device"
    acme.current[0] = 0
    values = torch.randn(3, 4).bfloat16()
    fp8, scale = mp.quantize_per_tensor(values.to("acme"))
    expected, expected_scale = QUANTIZE_PER_TENSOR.reference(values)
    assert fp8.device.type == scale.device.type == "acme" and torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(fp8.cpu().view(torch.uint8), expected.view(torch.uint8))
    decision = mp.explain("merge_states")
    assert decision.chosen == "acme.merge" and decision.request.device == acme.FACTS
    shapes = dict(num_heads=16, topk=64, block_size=16, kv_layout="bf16", query_len=1)
    assert mp.explain("sparse_decode", **shapes).chosen == "reference.torch"
""")


def test_what_is_tried_for_a_device_runs_there_though_another_one_is_equal_to_it():
    """A process that uses one GPU of several opens no context on another; the result holds for all that are equal."""
    run("""
first, second = registry.facts("acme:0"), registry.facts("acme:1")
assert first == second == acme.FACTS
merge = registry.implementations(MERGE_STATES)[0]
assert merge.name == "acme.merge"
request = Request(MERGE_STATES, second)

acme.current[0] = 1  # as a process of a tensor parallel group does
assert registry.select(request)[0] is merge
assert acme.checked == [1] and acme.served and set(acme.served) == {("acme:1", 1)}, (acme.checked, acme.served)
tried = len(acme.served)
acme.current[0] = 0
registry.reload_policy()
assert registry.select(request)[0] is merge
assert (len(acme.served), acme.checked) == (tried, [1]), "equal devices share the result"

def another():
    acme.served.clear()
    acme.checked.clear()
    return Registry(plugins=[("reference", reference), ("acme", acme)], environ={})

registry = another()  # by name: whichever is current and was asked about
registry.facts("acme:0")
assert registry.probe(merge, "acme:1").ok
assert acme.checked == [1] and set(acme.served) == {("acme:1", 1)}, (acme.checked, acme.served)

for asked in ("acme:0", "acme:1"):  # the current one was not asked about: it is not touched
    registry, acme.current[0] = another(), 1 - int(asked[-1])
    assert registry.decide(Request(MERGE_STATES, registry.facts(asked))).chosen == "acme.merge"
    assert set(acme.served) == {(asked, int(asked[-1]))}, acme.served

registry, acme.current[0] = another(), 1  # of facts that nobody asked for here
assert registry.decide(Request(MERGE_STATES, acme.FACTS)).chosen == "acme.merge"
assert set(acme.served) == {("acme:1", 1)}, acme.served

with serving(another()):  # tensors say where
    acme.current[0] = 0
    there = torch.randn(2, 3, 4).to("acme:1"), torch.randn(2, 3).to("acme:1")
    assert mp.merge_states(*there)[0].device == torch.device("acme:1")
    assert acme.checked == [1] and set(acme.served) == {("acme:1", 1)}, (acme.checked, acme.served)
""")


def test_a_layer_decodes_on_it():
    run("""
spec = mp.AttentionSpec(num_heads=2, kv_layout="bf16", block_size=16, topk=32, softmax_scale=0.1, max_num_tokens=8,
                        max_num_reqs=4, max_model_len=64, graph=False, need_lse=True)
tokens = np.arange(4, dtype=np.int32)
table = torch.arange(3, dtype=torch.int32).view(3, 1)
torch.manual_seed(1)
cache, q = torch.randn(3, 16, 576).bfloat16(), torch.randn(3, 2, 576).bfloat16()
latent, rope, slots = torch.randn(2, 512).bfloat16(), torch.randn(2, 64).bfloat16(), torch.tensor([16, 33])
topk = torch.zeros(3, 32, dtype=torch.int32)


def step(device):
    layer = mp.SparseMLAAttention(spec, device=device, registry=registry)
    assert {part.decision.chosen for part in layer.route_decision.verdict.parts} == {"reference.torch"}
    kv = cache.clone().to(device)
    layer.cache_write(latent.to(device), rope.to(device), kv, slots.to(device))
    batch = Batch(query_start_loc=tokens, seq_lens=tokens[1:], block_table=table.to(device))
    plan = mp.Planner(layer.planner_config()).plan(batch)
    assert plan.req_id_per_token.device.type == torch.device(device).type
    out, lse = layer.forward(q.to(device), kv, topk.to(device), plan)
    assert out.device.type == lse.device.type == torch.device(device).type
    return out.cpu(), lse.cpu()


for there, here in zip(step("acme"), step("cpu"), strict=True):
    assert torch.equal(there, here)
spec_of_one = mp.SparseMLAAttention(spec, device="acme", registry=registry)
acme.guards.clear()
kv = cache.clone().to("acme")
spec_of_one.cache_write(latent.to("acme"), rope.to("acme"), kv, slots.to("acme"))
assert acme.guards == [], "the device is the current one already"
acme.current[0] = 1
step("acme:0")
assert set(acme.guards) == {0}
""")


@pytest.mark.parametrize("what", ["a layer", "slots", "a decision on slots", "prompts"])
def test_what_a_layer_takes_is_chosen_and_bound_on_its_device_whichever_is_current(what: str):
    """Where several devices are equal, what is tried for a request runs on the current one."""
    run(
        """
import sys

from mla_portable.attention import HeadDims, PromptAttention, SlotAttention
from mla_portable.contracts import Implementation, Primitive, Support, hookimpl
from mla_portable.engines.common.routing import decide_route

seen = []  # (what, the device that is current there)


class Attention:
    @hookimpl
    def mla_portable_register(self, registrar):
        for primitive in Primitive.all():
            support = Support(source="this test", device_types=("acme",), vendors=("acme",), graph=False, kv_layouts=("bf16",),
                              selection=True, lengths=True)
            registrar.add(Implementation("vendor.all", primitive, support, bind, preference=1.0, check=check))


def check(facts):
    seen.append(("check", acme.current[0]))
    return ()


def bind(request):
    seen.append(("bind", acme.current[0]))

    def call(*args, **named):
        seen.append(("call", acme.current[0]))
        assert args[0].device.index == acme.current[0]
        return request.primitive.reference(*args, **named)

    return call


registry = Registry(plugins=[("reference", reference), ("vendor", Attention()), ("acme", acme)], environ={})
spec = mp.AttentionSpec(num_heads=2, kv_layout="bf16", block_size=16, topk=32, softmax_scale=0.1, max_num_tokens=8,
                        max_num_reqs=4, max_model_len=64, graph=False, need_lse=False)
makes = {
    "a layer": lambda: mp.SparseMLAAttention(spec, device="acme:0", registry=registry).route_decision,
    "slots": lambda: SlotAttention(spec, device="acme:0", registry=registry).route_decision,
    "a decision on slots": lambda: decide_route(spec, torch.device("acme:0"), registry=registry, clean_slots=False),
    "prompts": lambda: PromptAttention(spec, HeadDims(), device="acme:0", registry=registry).decisions,
}
registry.facts("acme:0"), registry.facts("acme:1")
acme.current[0] = 1
made = makes[sys.argv[1]]()
decisions = made.values() if sys.argv[1] == "prompts" else [part.decision for part in made.verdict.parts]
chosen = {decision.chosen for decision in decisions}
assert chosen == {"vendor.all"}, (chosen, registry.plugin_reports)
assert {what for what, _ in seen} == {"check", "bind", "call"}, seen  # binds of probes, too
assert {index for _, index in seen} == {0} and acme.current == [1], seen
""",
        what,
    )


def test_slots_are_attended_to_on_it_whichever_device_is_current():
    run("""
from mla_portable.attention import SlotAttention

made = []


class Schedules:
    def __init__(self, limits):
        made.append(("planner", acme.current[0]))

    def get(self, batch, query_len):
        made.append(("schedule", acme.current[0]))
        return None

    def invalidate(self):
        pass


spec = mp.AttentionSpec(num_heads=2, kv_layout="bf16", block_size=16, topk=32, softmax_scale=0.1, max_num_tokens=8,
                        max_num_reqs=4, max_model_len=64, need_lse=False)
torch.manual_seed(1)
kv, q = torch.randn(48, 576).bfloat16(), torch.randn(3, 2, 576).bfloat16()
slots = torch.randint(48, (3, 32), dtype=torch.int32)
there, here = (SlotAttention(spec, device=device, registry=registry) for device in ("acme", "cpu"))
for decodes in (True, False):
    for current in (0, 1):
        acme.guards.clear()
        acme.current[0] = current
        out = there.forward(q.to("acme"), kv.to("acme"), slots.to("acme"), softmax_scale=0.1, decodes=decodes)
        assert torch.equal(out.cpu(), here.forward(q, kv, slots, softmax_scale=0.1, decodes=decodes))
        assert (set(acme.guards), acme.current) == ({0} if current else set(), [current]), (acme.guards, acme.current)
kind = ScheduleKind("of acme", DecodeSchedule, Schedules)
there._kind = kind
there.prepare(2)
assert made == [("planner", 0), ("schedule", 0)] and acme.current == [1], made
""")


def test_a_triton_without_a_driver_for_it_leaves_it_to_plain_torch_and_says_why():
    run(
        """
import logging
import mla_portable_triton

logging.basicConfig(format="%(message)s", stream=sys.stdout)
registry = Registry(
    plugins=[("reference", reference), ("triton", mla_portable_triton), ("acme", acme)], environ={}
)
outs, lses = torch.randn(2, 3, 4).to("acme"), torch.randn(2, 3).to("acme")
values = torch.randn(3, 4).bfloat16()
with serving(registry):
    fp8, scale = mp.quantize_per_tensor(values.to("acme"))
    assert torch.equal(scale.cpu(), QUANTIZE_PER_TENSOR.reference(values)[1])
    mp.merge_states(outs, lses)
    assert set(acme.served) == {("acme:0", 0)}
    decision = mp.explain("quantize_per_tensor", device="acme")
    assert decision.chosen == "reference.torch"
    try:
        mp.quantize_per_tensor(values.to("acme"), backend="triton")
    except mp.UnsupportedRequest as error:
        print(error)
    else:
        raise AssertionError("there is no driver of Triton's for acme")
""",
        TRITON_INTERPRET="0",
    )


def test_a_kernel_of_triton_is_launched_by_triton_on_the_device_of_its_tensors():
    """What Triton tells calls apart by is known of its own drivers alone, so nothing is kept for later launches."""
    run("""
from mla_portable.kit.triton_launcher import TritonLauncher, why_through_triton

class Kernel:
    params = [SimpleNamespace(name="x_ptr", num=0, is_constexpr=False, do_not_specialize=False)]
    launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **named: self.launches.append((grid, acme.current[0])) or object()

launch, x = TritonLauncher(Kernel()), torch.zeros(4).to("acme:1")
for _ in range(4):
    with accelerator(x.device).guard():
        launch((2,), x)
assert Kernel.launches == [((2,), 1)] * 4, Kernel.launches
assert launch._known is None, "kept by a key that was not compared with what Triton's driver for acme does"
assert why_through_triton("acme") == "by what Triton distinguishes calls on device type acme is not known"
""")


@pytest.mark.parametrize(
    "words",
    [
        "doctor --device acme",
        "explain merge_states --device acme",
        "explain route --device acme:0",
        "explain route",
        "conform acme --device acme --level smoke",
    ],
)
def test_the_commands_take_it(words, tmp_path):
    folder = tmp_path / "acme-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[mla_portable.backends]\nacme = another_device\n")
    done = subprocess.run(
        [sys.executable, "-m", "mla_portable", *words.split(), "--json"],
        env={
            **os.environ,
            "TRITON_INTERPRET": "0",
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(HERE), *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert document["ok"]
    if "merge_states" in words:
        assert "acme.merge" in done.stdout
