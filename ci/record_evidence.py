# SPDX-License-Identifier: Apache-2.0
"""Run something, keep the whole report in capability/reports, and write the records that follow from it.

    python ci/record_evidence.py compiled [--all] [PLUGIN ...]      every plugin that compiles ahead of time
    python ci/record_evidence.py conform BACKEND [--device D] [--level L] [--jobs N] [--all]
    python ci/record_evidence.py bench TIMES                       what `mla-portable bench kernels --out TIMES` timed
    python ci/record_evidence.py add FILE                          reports that were made on another machine
    python ci/record_evidence.py fold                              drop reports that later ones supersede
    python ci/record_evidence.py hashes                            of this tree's sources, as JSON; for the gate `commits`

`--out FILE` writes the report to a file instead, on a machine without these commits. `add` then compares every file of code
with the commits before the run, binds it to the one that holds exactly what ran, and refuses other sources than this
tree's. `--sign KEY` signs what is added with a key of ssh whose public half capability/signers lists. A benchmark counts
beside a passed conformance run of the same sources only.

What is already proven for today's sources is not run again, unless --all says so. Nothing is recorded from a tree whose code
has uncommitted changes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mla_portable.registry import get_registry
from mla_portable.registry.facts import resolve_device
from mla_portable.tools.bench.kernel_machine import MachineState, machine_state
from mla_portable.tools.matrix.claims import COMPILER, Claim
from mla_portable.tools.matrix.derive import baselines_of, records_of, unfit
from mla_portable.tools.matrix.fold import superfluous
from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.profiles import profile_of
from mla_portable.tools.matrix.record import benchmark_report, compiled_report, conformance_report, mode_of
from mla_portable.tools.matrix.records import Records, hashes_of, index_of, read_records
from mla_portable.tools.matrix.reports import digest, parse_report, report_path, report_text, sign, unpacked, write_report
from mla_portable.tools.provenance import Provenance, provenance_of, settled

ROOT = Path(__file__).parents[1]
CAPABILITY = ROOT / "capability"
CPU = torch.device("cpu")


def read() -> Records:
    return read_records(CAPABILITY, get_registry())


def unproven(records: Records, claims: list[Claim], level: str) -> set[tuple[str, str]]:
    """(primitive, device) of claims of one backend that today's sources have no good proof of a level for."""
    good = {
        (cell.implementation, cell.primitive, cell.device)
        for cell in records.cells()
        if any(proof.level == level and proof.status == "ok" for proof in cell.proofs)
    }
    return {
        (claim.primitive, slug)
        for claim in claims
        for slug in records.profiles
        if not claim.devices[slug] and (claim.implementation, claim.primitive, slug) not in good
    }


def refuse_if_changed(records: Records) -> None:
    """Sources that change while they run are proven in neither state. Raises: SystemExit."""
    if hashes_of(records.declarations, [profile.arch for profile in records.profiles.values()]) != records.hashes:
        raise SystemExit("sources changed while they ran; nothing is recorded, run this again")


def compile_lines(module: str, targets: list[str]) -> list[dict[str, Any]]:
    """What a plugin's compiler says of some targets. It exits with 1 when something did not fit: the lines say what."""
    command = [sys.executable, "-m", f"{module}.{COMPILER}", "--json", *targets]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0"}, stdout=subprocess.PIPE, text=True, check=False
    )
    if run.returncode not in (0, 1):
        raise SystemExit(f"{shlex.join(command)}: exit status {run.returncode}")
    return [json.loads(line) for line in run.stdout.splitlines()]


def compiled(options: argparse.Namespace) -> int:
    refuse_if_dirty()
    records, failed = read(), 0
    by_module: dict[str, list[Claim]] = {}
    for claim in records.declarations.claims:
        if claim.targets and claim.plugin in (options.plugin or [claim.plugin]):
            by_module.setdefault(claim.module, []).append(claim)
    for module, claims in by_module.items():
        archs = {records.profiles[slug].arch for _, slug in unproven(records, claims, "compiled")}
        targets = tuple(dict.fromkeys(target for claim in claims for target in claim.targets))
        missing = [target for target in targets if options.all or target in archs]
        if not missing:
            print(f"{claims[0].plugin}: compiled for {', '.join(targets)} already, from these sources")
            continue
        halves = [half for half in (missing[::2], missing[1::2]) if half]  # no target at all would mean every target
        with ThreadPoolExecutor(2) as pool:
            lines = [line for part in pool.map(partial(compile_lines, module), halves) for line in part]
        run = provenance_of(ROOT, f"python -m {module}.{COMPILER} --json {' '.join(missing)}", CPU)
        refuse_if_changed(records)
        made = keep([compiled_report(lines, module, records.declarations, records.profiles, run)], records)
        failed += sum(record["cases"]["failed"] for record in made)
        print(f"{claims[0].plugin}: {len(lines)} variants compiled for {', '.join(missing)}; {len(made)} records")
    return int(failed > 0)


def conform(options: argparse.Namespace) -> int:
    from mla_portable.contracts import Primitive
    from mla_portable.tools.conformance import run_suite

    if options.out is None:
        refuse_if_dirty()
    records = read()
    device = resolve_device(options.device or get_registry().default_device())
    facts = get_registry().facts(device)
    profile = profile_of(facts.name, records.profiles)
    claims = [c for c in records.declarations.claims if options.backend in (c.implementation, c.backend)]
    if not claims:
        raise SystemExit(f"{options.backend}: no such backend; there is {', '.join(get_registry().backends)}")
    native = any(mode_of(claim, device.type, os.environ) == "native" for claim in claims)
    missing = unproven(records, claims, "verified" if native else "interpreted")
    included = dict.fromkeys(claim.primitive for claim in claims if not claim.devices[profile.slug])
    todo = [primitive for primitive in included if options.all or (primitive, profile.slug) in missing]
    if not todo:
        print(f"{options.backend}: proven on {profile.slug} already, from these sources")
        return 0
    report = run_suite(
        get_registry(),
        options.backend,
        device=device,
        level=options.level,
        primitives=[Primitive.named(each) for each in todo],
        jobs=options.jobs,
    )
    for bad in (result for result in report.results if result.status != "passed"):
        print(f"{bad.status} {bad.case.id}: {bad.message}")
    for each in report.unavailable:
        print(f"not run: {each.implementation} / {each.primitive}: {'; '.join(map(str, each.reasons))}")
    refuse_if_changed(records)
    run = provenance_of(ROOT, shlex.join(["python", "ci/record_evidence.py", *sys.argv[1:]]), device)
    state = state_of(device)
    made = conformance_report(report, records.declarations, run, driver=state.driver, clocks=state.clocks)
    if options.out is not None:
        write_line(options.out, made)
    else:
        keep([made], records)
    print(f"{options.backend} on {profile.slug}: {report.passed} passed, {report.failed} failed")
    return int(not report.ok)


def state_of(device: torch.device) -> MachineState:
    """Driver, clocks and versions. Raises: SystemExit if no tool reports the driver of a device other than a CPU."""
    state = machine_state(device, get_registry().facts(device))
    if state.driver is None and device.type != "cpu":
        raise SystemExit("the driver's version is needed for evidence, and neither nvidia-smi, amdgpu nor ixsmi reports it")
    return state


def write_line(path: Path, document: Mapping[str, Any]) -> None:
    """Append a report to a file for `add`: a compressed line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(gzip.compress(f"{report_text(document)}\n".encode(), 9, mtime=0))


def bench(options: argparse.Namespace) -> int:
    from mla_portable.tools.bench.kernel_records import read_runs

    refuse_if_dirty()
    records = read()
    documents = [benchmark_report(run, lines, records.declarations) for run, lines in read_runs(options.times)]
    for document in documents:
        baselines = baselines_of(document["lines"])
        for line in document["lines"]:
            if line["role"] != "baseline" and (why := unfit(line, baselines)):
                print(f"left out: {line['name']} / {line['primitive']}, {line['shape']}: {why}")
    made = keep([settle(each, records) for each in documents], records, options.sign)
    print(f"{len(made)} records added")
    return 0


def add(options: argparse.Namespace) -> int:
    refuse_if_dirty()
    records = read()
    documents = [json.loads(line) for line in unpacked(options.file).splitlines()]
    print(f"{len(keep([settle(each, records) for each in documents], records, options.sign))} records added")
    return 0


def settle(document: dict[str, Any], records: Records) -> dict[str, Any]:
    """Bind a run to the commit that holds the files that ran; its sources must be this tree's. Raises: SystemExit."""
    if "files" not in document and not document.get("changed"):
        return document
    for claim in document["claims"]:
        name = claim["implementation"], claim["primitive"], claim["arch"]
        today = records.hashes.sources.get(name), records.hashes.suite.get(claim["primitive"])
        for what, ran, here in (
            ("sources", claim["source_hash"], today[0]),
            ("code of the suite", claim.get("suite_hash"), today[1]),
        ):
            if ran not in (here, None):
                raise SystemExit(f"{' / '.join(name[:2])}: other {what} ran than this tree's; check out the commit that ran")
    known = {field.name for field in fields(Provenance)} & document.keys()
    run = settled(Provenance(**{name: document[name] for name in known}), ROOT)
    rest = {name: value for name, value in document.items() if name != "files"}
    for path in run.changed or {}:
        print(f"it ran with uncommitted changes: {path}")
    return {**rest, "commit": run.commit, "changed": dict(run.changed or {})}


def keep(documents: Iterable[Mapping[str, Any]], records: Records, key: Path | None = None) -> list[dict[str, Any]]:
    """Keep the reports that have records and write the index; the others are named.

    Returns: the records. Raises: RecordError where no report has one; nothing is written then.
    """
    found: list[tuple[Mapping[str, Any], list[dict[str, Any]]]] = []
    empty: list[str] = []
    for document in documents:
        text = report_text(document)
        made = records_of(parse_report(json.loads(text), "new report"), digest(text), records.profiles)
        if made:
            found.append((document, list(made)))
        else:
            empty.append(document["command"])
    why = "nothing in it is evidence; a time counts beside a baseline of the same run"
    if not found:
        raise RecordError("; ".join(empty) or "no report", why)
    for command in empty:
        print(f"left out: {command}: {why}")
    for document, _ in found:
        path = write_report(CAPABILITY, document)
        if key is not None:
            sign(path, key)
    write_index(records)
    return [each for _, made in found for each in made]


def write_index(records: Records) -> None:
    """Write every file of evidence."""
    for path, text in index_of(CAPABILITY, records.profiles).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def fold_all(_: argparse.Namespace) -> int:
    """Drop reports that later ones supersede."""
    write_index(read())
    records = read()
    dropped = superfluous(records.evidence, lambda each: not records.hashes.changed(each))
    for sha in dropped:
        report_path(CAPABILITY, sha).unlink()
        report_path(CAPABILITY, sha).with_suffix(".sig").unlink(missing_ok=True)
    write_index(records)
    print(f"{len(dropped)} reports dropped")
    return 0


def hashes(_: argparse.Namespace) -> int:
    found = read().hashes
    document = {"sources": {"/".join(name): sha for name, sha in found.sources.items()}, "suite": dict(found.suite)}
    print(json.dumps(document))
    return 0


def refuse_if_dirty() -> None:
    """Raises: SystemExit where the code differs from a commit, or there is none."""
    run = provenance_of(ROOT, "", CPU)
    if run.commit is None or run.changed:
        what = (
            f"uncommitted changes: {', '.join(run.changed)}" if run.changed else "no git here; use --out, and `add` elsewhere"
        )
        raise SystemExit(f"nothing is recorded: {what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    tasks = {"compiled": compiled, "conform": conform, "bench": bench, "fold": fold_all, "add": add, "hashes": hashes}
    command = {name: commands.add_parser(name) for name in tasks}
    for name, run in tasks.items():
        command[name].set_defaults(run=run)
    command["compiled"].add_argument("plugin", nargs="*")
    command["conform"].add_argument("backend")
    command["conform"].add_argument("--device")
    command["conform"].add_argument("--level", default="quick", choices=("quick", "full"))
    command["conform"].add_argument("--jobs", type=int, default=1)
    command["conform"].add_argument("--out", type=Path)
    command["bench"].add_argument("times", type=Path)
    command["add"].add_argument("file", type=Path)
    for name in ("compiled", "conform"):
        command[name].add_argument("--all", action="store_true")
    for name in ("add", "bench"):
        command[name].add_argument("--sign", type=Path, metavar="KEY")
    options = parser.parse_args()
    try:
        return options.run(options)
    except RecordError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
