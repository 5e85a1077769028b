# SPDX-License-Identifier: Apache-2.0
"""The words of the matrix: levels, states and trust, with what each means and how it is drawn."""

from __future__ import annotations

from typing import Final

LEVELS: Final = ("declared", "compiled", "interpreted", "compiled+run", "verified", "measured")
"""In rising order. "compiled+run": the code for this architecture ran on a newer device, which its driver recompiled it for."""
STATES: Final[dict[str, str]] = {
    "measured": "verified, and benchmarked beside a roofline bound and a baseline in the same run",
    "verified": "the conformance suite passed on that device at level quick or full, nothing skipped",
    "compiled+run": "the code compiled for the architecture passed the conformance suite on a newer device, named in the note",
    "interpreted": "the numerics hold on a CPU, in an interpreter with the configuration for unknown devices or against a "
    "strict stand-in of the vendor's library; what compiles ahead of time is compiled too",
    "compiled": "every configuration compiles for the architecture and fits its shared memory",
    "declared": "claimed by the plugin with a source; never run",
    "failing": "the newest evidence has a failure",
    "stale": "there was more evidence, but the sources changed since",
    "partial": "there is more evidence, but it does not cover all that is claimed",
    "unknown": "a hardware fact that decides is not published",
    "never": "the declarations exclude this device, or nothing claims it",
}
"""State -> what it means, best first."""
LETTERS: Final = dict(zip(STATES, "MVRICD!SP?-", strict=True))

SELF_REPORTED: Final = "self-reported"
SIGNED: Final = "signed"
REPRODUCED: Final = "reproduced"
SPREAD: Final = 1.10
"""Two medians of one thing lie no further apart than this factor."""
TRUST: Final[dict[str, str]] = {
    REPRODUCED: f"runs on two machines or days agree: all cases pass, times lie within {SPREAD - 1:.0%}",
    SIGNED: "one run, signed by a runner of this project",
    SELF_REPORTED: "one run, which its report alone shows",
}
"""How far the evidence of a device is to be believed -> what that means."""


def family(state: str) -> str:
    """How a state is coloured: "ran" on this very device, "other" evidence that never ran on it, "bad" or "none"."""
    if state in ("measured", "verified"):
        return "ran"
    if state in LEVELS:
        return "other"
    return "none" if state in ("unknown", "never") else "bad"


def rank(state: str, level: str) -> int:
    """Higher is better known; -1 for what cannot be said to work."""
    return -1 if state in ("never", "unknown", "failing") else LEVELS.index(level)
