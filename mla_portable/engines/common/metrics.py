# SPDX-License-Identifier: Apache-2.0
"""What serves in a process of an engine, as a metric of Prometheus and as a line in the engine's log.

    mla_portable_serves{primitive="sparse_decode",implementation="nvidia.native",device="NVIDIA H200"} 8

is the number of processes in which that implementation was bound for layers of a model. The gauge is set when layers are
bound, so a call costs nothing. It is one of the process's own metrics, through `prometheus_client` where that is installed.

Layers run in worker processes. A server shows their metrics where PROMETHEUS_MULTIPROC_DIR names a folder that all of its
processes write to (https://prometheus.github.io/client_python/multiprocess). SGLang sets it with --enable-metrics. vLLM sets it
where it has several API servers; with one, `/metrics` shows only what that process itself counts, unless the user has set the
variable.

`doctor --engine` reads both again, and imports no torch with what is here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from logging import Logger
from typing import Any, Final

METRIC: Final = "mla_portable_serves"
LOG_LINE: Final = "mla_portable serves "
"""The beginning of the line in which a process says what serves its layers."""
NOT_SERVING: Final = (
    "mla_portable is NOT in use",
    "mla_portable cannot serve this model",
    "neither SGLang nor mla_portable serves this model",
    "serves this model, mla_portable does not",
    "kernels serve this model, mla_portable does not",
    "vLLM's own layer around attention runs",
)
"""In the lines in which it says that it does not serve."""

_HELP: Final = "Processes in which an implementation of mla_portable was bound for layers of a model."
LABELS: Final = ("primitive", "implementation", "device")


def publish(device: str, served: Iterable[tuple[str, str]], logger: Logger) -> None:
    """Set this process's gauge for what was bound; a log line instead of an error where that is not possible.

    Args:
        device: its name. served: (primitive, implementation).
    """
    try:
        gauge = _gauge()
        if gauge is not None:
            for primitive, implementation in served:
                gauge.labels(primitive, implementation, device).set(1)
    except (OSError, ValueError) as error:  # no folder for the metrics of several processes, a name that is taken
        logger.warning("mla_portable's metric %s is missing: %s", METRIC, error)


@functools.cache
def _gauge() -> Any | None:
    """One for the process; None without prometheus_client. Summed over the processes that live."""
    try:
        from prometheus_client import Gauge  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ModuleNotFoundError:
        return None
    return Gauge(METRIC, _HELP, LABELS, multiprocess_mode="livesum")  # pyright: ignore[reportUnknownVariableType]
