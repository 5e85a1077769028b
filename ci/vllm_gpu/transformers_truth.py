# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint generates by Hugging Face transformers: the truth that engines are held against, or our function.

In float32 with transformers' own attention ("eager"), sums alone are rounded. Where an engine keeps FP8, the same numbers can
be rounded on their way: queries and keys of the indexer, and latents in front of `kv_b_proj`. transformers' code is unchanged.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from checkpoint import INDEX_DIM, prompts
from jobs import Job
from torch import Tensor
from torch.overrides import TorchFunctionMode

E4M3_MAX: Final = 448.0
LATENT_GROUP: Final = 128
"""Numbers of a cached latent with a scale of their own."""
_CHUNK: Final = 512
"""Tokens of a prompt at a time: transformers holds the indexer's scores of all its heads."""
_BEST: Final = 20


def through_e4m3(x: Tensor, dim: int, *, least: float, pow2: bool) -> Tensor:
    """x as its e4m3 codes and one scale along `dim` say. least: of the largest magnitude, for which a scale is made."""
    scale = x.float().abs().amax(dim, keepdim=True).clamp(min=least) / E4M3_MAX
    if pow2:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


class _Fp8Scores(TorchFunctionMode):
    """Inside of an indexer's forward: q [B, S, I, 128] and k [B, 1, 128, T] of its product go through e4m3."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.matmul and args[1].dim() == 4 and args[1].shape[1:3] == (1, INDEX_DIM):
            q, k = args
            args = through_e4m3(q, -1, least=1e-10, pow2=True), through_e4m3(k, -2, least=1e-4, pow2=True)
        return func(*args, **(kwargs or {}))


def round_scores(model: Any) -> int:
    """The indexers' products are of FP8 numbers from now on. Returns: how many indexers there are."""
    several = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    for module in several:
        module.forward = _in_fp8(module.forward)
    return len(several)


def _in_fp8(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*given: Any, **named: Any) -> Tensor:
        with _Fp8Scores():
            return forward(*given, **named)

    return call


def round_latents(model: Any, *, pow2: bool) -> int:
    """Latents are expanded as an FP8 cache has them, from now on. Returns: how many layers there are."""
    several = [module for module in model.modules() if hasattr(module, "expand_kv")]
    for module in several:
        module.expand_kv = _of_fp8(module.expand_kv, pow2)
    return len(several)


def _of_fp8(expand: Callable[..., Any], pow2: bool) -> Callable[..., Any]:
    least = 1e-4 * E4M3_MAX if pow2 else 2.0**-126 * E4M3_MAX

    def call(kv_nope: Tensor, k_rot: Tensor) -> Any:
        groups = kv_nope.unflatten(-1, (-1, LATENT_GROUP))
        return expand(through_e4m3(groups, -1, least=least, pow2=pow2).flatten(-2), k_rot)

    return call


def load(folder: Path, options: dict[str, Any]) -> Any:
    """The model, on the GPU where there is one. Raises: RuntimeError where the checkpoint and the class differ."""
    import transformers

    if options["attention"] == "mla_portable":
        from mla_portable.transformers import register

        register()
    torch.backends.cuda.matmul.allow_tf32 = False
    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in options.get("overrides", {}).items():
        setattr(config, name, value)
    given = {"dtype": getattr(torch, options["dtype"]), "attn_implementation": options["attention"]}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, output_loading_info=True, **given)
    wrong = {name: sorted(value) for name, value in info.items() if value and name != "error_msgs"}
    if wrong:
        raise RuntimeError(f"the checkpoint does not fit {type(model).__name__}: {wrong}")
    rounded = (options["fp8"], round_scores, {}), (options["fp8"], round_latents, {"pow2": options["fp8"] == "pow2"})
    for asked, change, more in rounded:
        if asked and not change(model, **more):
            raise RuntimeError(f"{change.__name__}: {type(model).__name__} has nothing to change")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def generate(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """Each prompt alone, greedily, as `engine.generate` describes it: the truth of a job's options.

    attention: of transformers. dtype: of weights and arithmetic. fp8: "pow2" or "amax", how the scales of latents are made that
    go through e4m3, "" for exact ones. overrides: of the configuration.
    """
    import transformers

    options = job.options
    model = load(checkpoints / job.model, options)
    parameters = inspect.signature(type(model).forward).parameters
    cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed after 5.19
    run: list[dict[str, Any]] = []
    for prompt in prompts(list(options["lengths"])):
        ids = prompt["prompt_token_ids"]
        cache = transformers.DynamicCache(config=model.config)

        def logits(tokens: list[int], cache: Any = cache) -> Tensor:
            given = {cache_name: cache, "use_cache": True, "logits_to_keep": 1}
            return model(torch.tensor([tokens], device=model.device), **given).logits[0, -1].float()

        with torch.inference_mode():
            for begin in range(0, len(ids), _CHUNK):
                last = logits(ids[begin : begin + _CHUNK])
            tokens, likeliest = list[int](), list[dict[str, float]]()
            while len(tokens) < options["tokens"]:
                last = logits(tokens[-1:]) if tokens else last
                best = torch.log_softmax(last, -1).topk(_BEST)
                listed = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                likeliest.append({str(token): round(value, 5) for token, value in listed})
                tokens.append(int(best.indices[0]))
        run.append({"length": len(ids), "tokens": tokens, "logprobs": likeliest, "cached": None})
    return {"runs": [run], "by": f"transformers {transformers.__version__}, {options['dtype']}, {json.dumps(options['fp8'])}"}
