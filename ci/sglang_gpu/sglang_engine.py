# SPDX-License-Identifier: Apache-2.0
"""SGLang's offline engine on a small DeepSeek-V3.2 or GLM-5 model: greedy tokens with log-probabilities (a `Run`
of ci/vllm_gpu/judge.py), and tokens a second.

    sglang_engine.py MODE CACHE MODEL      MODE is that of MLA_PORTABLE_SGLANG, CACHE of --kv-cache-dtype, MODEL a key of MODELS

FlashAttention 3 is not needed: dense prompts and BF16 decodes take FlashMLA's methods here.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm_gpu"))

from process import trying

MODELS = {"v32": "heads16", "glm5": "shares16"}
"""Name -> checkpoint of ci/vllm_gpu/named_models.py; the second has a layer that attends to another's selection."""
LENGTHS = (17, 300, 1000, 1900, 2500, 3500, 5000, 6000)
NEW, LIKELIEST = 48, 20


def main() -> None:
    import checkpoint
    import named_models
    import sglang

    _, mode, cache, model = sys.argv
    checkpoints, name = Path(os.environ.get("MLA_GPU_SGLANG_MODELS", "/tmp/mla-portable-sglang")), MODELS[model]
    if not (checkpoints / name / "model.safetensors").exists():
        named_models.write_model(checkpoints, name)
    impl = "flashmla_kv" if cache == "fp8_e4m3" else "flashmla_sparse"
    inputs = [each["prompt_token_ids"] for each in checkpoint.prompts(list(LENGTHS))]
    many = [each["prompt_token_ids"] for each in checkpoint.prompts([1024] * 16)]
    greedy = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    found: dict[str, Any] = {}
    with trying(f"engine {model} {mode} {cache}", found):
        engine = sglang.Engine(
            model_path=str(checkpoints / name),
            skip_tokenizer_init=True,
            trust_remote_code=False,
            dtype="bfloat16",
            kv_cache_dtype=cache,
            dsa_prefill_backend=impl,
            dsa_decode_backend=impl,
            page_size=64,
            context_length=8192,
            mem_fraction_static=0.3,
            max_running_requests=16,
            cuda_graph_max_bs_decode=16,
            disable_radix_cache=True,
            sampling_backend="pytorch",
            grammar_backend="none",
            random_seed=0,
            log_level="info",
        )
        try:
            answers = engine.generate(input_ids=inputs, sampling_params=greedy, return_logprob=True, top_logprobs_num=LIKELIEST)
            found["run"] = [
                {
                    "length": len(prompt),
                    "tokens": answer["output_ids"],
                    "logprobs": [
                        {str(token): round(log, 5) for log, token, _ in at} for at in answer["meta_info"]["output_top_logprobs"]
                    ],
                }
                for prompt, answer in zip(inputs, answers, strict=True)
            ]
            engine.generate(input_ids=many, sampling_params=greedy)
            begin = time.monotonic()
            engine.generate(input_ids=many, sampling_params=greedy)
            found["tokens_per_second"] = round(16 * NEW / (time.monotonic() - begin), 1)
        finally:
            engine.shutdown()


if __name__ == "__main__":  # SGLang's processes are spawned, and import this file
    main()
