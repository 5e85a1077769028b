# SPDX-License-Identifier: Apache-2.0
"""The constants of an H200 by which a step's prompts take one of two ways: `mla_portable.times.prompts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mla_portable.times.prompts import PromptTimes

if TYPE_CHECKING:
    from mla_portable.attention.prompts import PromptAttention

TIMES: Final = {
    (True, True): {
        8: PromptTimes(22.3, 39.47, 148.9, 25.34, 7.834, 15.73, 0, 17.92, 13.97, 118.7, 0),
        16: PromptTimes(23.02, 54.03, 149.2, 23.68, 17.42, 27.03, 0, 25.33, 30.17, 71.06, 7.201),
        32: PromptTimes(25.23, 105.1, 196.1, 23.87, 41.02, 46.58, 67.83, 32.39, 63.84, 0, 37.59),
        64: PromptTimes(30.03, 159.2, 195, 23.6, 82.65, 90.12, 159.4, 54.43, 126.9, 0, 71.16),
        128: PromptTimes(42.55, 294.2, 398.8, 25.83, 165, 182.8, 656.2, 71.71, 258.8, 0, 267.4),
    },
    (True, False): {
        8: PromptTimes(22.64, 37.33, 149.1, 21.64, 5.069, 8.683, 0, 13.17, 6.806, 45.13, 2.361),
        16: PromptTimes(21.81, 51.07, 150.1, 21.01, 11.95, 14.17, 12.11, 18.3, 14.28, 0, 14.83),
        32: PromptTimes(24, 100.7, 193, 21.09, 25.33, 26.41, 65.5, 22.13, 30.77, 0, 33.54),
        64: PromptTimes(27.24, 148.8, 198.1, 21.24, 52.77, 49.16, 73.17, 36.28, 64.58, 0, 70.72),
        128: PromptTimes(36.09, 275.4, 391.2, 23.1, 105, 97.43, 245.5, 53.82, 129.6, 0, 175.4),
    },
    (False, True): {
        8: PromptTimes(24.12, 49.92, 281, 27.79, 7.807, 89.56, 0, 19.66, 94.15, 380.5, 0),
        16: PromptTimes(23.39, 84.08, 280.7, 25.07, 26.12, 169.6, 0, 11.66, 199.7, 62.63, 56.13),
        32: PromptTimes(27.71, 151.3, 389.8, 21.06, 61.27, 322, 0, 4.402, 398.8, 244.8, 126.1),
        64: PromptTimes(26.89, 289.3, 633.3, 17.57, 128.5, 637.2, 0, 15.78, 793.6, 344.4, 225.7),
        128: PromptTimes(32.43, 560.6, 1260, 19.38, 255.7, 1277, 0, 48.54, 1577, 400.1, 452.8),
    },
    (False, False): {
        8: PromptTimes(23.15, 48.42, 279.8, 25.54, 2.037, 31.96, 0, 18.37, 21.55, 179, 0),
        16: PromptTimes(22.79, 80.13, 280.8, 22.95, 12.65, 52.16, 0, 26.22, 48.05, 104.2, 0),
        32: PromptTimes(25.8, 142.8, 390.7, 20.22, 33.42, 94.62, 101.1, 22.33, 102.1, 0, 32.95),
        64: PromptTimes(22.39, 277.8, 632.6, 18.22, 69.23, 182.9, 305.7, 29.2, 197.8, 0, 90.03),
        128: PromptTimes(26.03, 529.6, 1270, 16.08, 145.7, 357.2, 693.8, 51.77, 397.4, 0, 159),
    },
}
"""(masked prompts by the native kernel, heads wider than V3.2's) -> query heads of a rank -> times on an H200, FP8 cache.

The rows of other kernels are times of Triton's, and of `nvidia.native_sm80` over latent rows, in SM80's code."""

_NATIVE: Final = "nvidia.native"
_V32_WIDTHS: Final = 192 + 128


def prompt_times(attention: PromptAttention) -> PromptTimes:
    """The times for a layer: those of its kernels and widths at the next head count that was measured.

    Other GPUs than an H200 are decided by the same numbers: what counts is their ratio, and that is mostly one of products.
    """
    spec, dims = attention.spec, attention.head_dims
    native = attention.decisions["masked"].chosen == _NATIVE
    wide = dims.query + dims.value > _V32_WIDTHS
    by_heads = TIMES[native, wide]
    return by_heads[min((heads for heads in by_heads if heads >= spec.num_heads), default=max(by_heads))]
