"""Models that somebody measured on their own GPUs, as linear step times. Pure data.

Fit: `python -m bench.timing_measured`, 2026-11-30; its table has the errors. KV is bf16 in all of them.
- h200: calibration/dynamo_h200 (ai-dynamo 1.6.1, Apache-2.0); median error 2 % of prompts, 3 % of decodes
- llama-2-70b, bloom-176b: calibration/splitwise/perf_model.csv (Mutinifni/splitwise-sim @8f99e7d, MIT); 3-17 %, 1-2 %.
  Llama 2 on 2 GPUs is left out: its weights leave so little memory that a line misses by 27 %
- opt: calibration/distserve_a100/profiler-a100-80g.distserve.json (LLMServe/DistServe @82831f1, Apache-2.0), which is a fit
  with its own coefficients of decodes from 95 sequences on
Splitwise and DistServe ran engines of 2023, whose host overheads today's do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.timing.fitted import Fitted

MEASURED: Mapping[tuple[str, str, int, str], Fitted] = MappingProxyType(  # by GPU, model, number of GPUs, weight type
    {
        ("h200", "llama-3.1-8b", 1, "fp8"): Fitted((0.01855, 1.411e-05, 4.919e-10), (0.004452, 2.224e-05, 3.16e-08)),
        ("a100", "llama-2-70b", 4, "bf16"): Fitted((0.01416, 0.0002369, 1.448e-09), (0.04352, 0.0002079, 3.176e-07)),
        ("h100", "llama-2-70b", 4, "bf16"): Fitted((0.01902, 8.848e-05, 3.04e-09), (0.02889, 0.0002721, 7.86e-08)),
        ("a100", "llama-2-70b", 8, "bf16"): Fitted((0.02153, 0.0001502, 1.968e-09), (0.04416, 0.0002, 3.1e-07)),
        ("h100", "llama-2-70b", 8, "bf16"): Fitted((0.0227, 6.488e-05, 3.522e-09), (0.0298, 0.0002016, 1.778e-07)),
        ("a100", "bloom-176b", 8, "bf16"): Fitted((0.03006, 0.0002769, 1.365e-08), (0.04803, 0.000444, 4.025e-07)),
        ("h100", "bloom-176b", 8, "bf16"): Fitted((0.01729, 0.0001192, 7.617e-09), (0.03557, 0.0003083, 1.572e-07)),
        ("a100", "opt-13b", 1, "bf16"): Fitted(
            (0.0181, 0.0001019, 7.122e-09), (0.01993, 3.851e-05, 6.269e-07), (0.007166, 0.0001583, 5.798e-07), 95
        ),
        ("a100", "opt-13b", 2, "bf16"): Fitted(
            (0.01474, 6.858e-05, 2.45e-09), (0.01329, 6.296e-05, 3.411e-07), (0.01064, 8.563e-05, 3.118e-07), 95
        ),
        ("a100", "opt-13b", 4, "bf16"): Fitted(
            (0.01206, 3.808e-05, 5.226e-10), (0.01026, 3.269e-05, 1.879e-07), (0.01048, 4.567e-05, 1.712e-07), 95
        ),
        ("a100", "opt-66b", 2, "bf16"): Fitted(
            (0.04306, 0.0002742, 2.248e-08), (0.04829, 0.0001276, 9.424e-07), (0.02873, 0.0002962, 4.745e-07), 95
        ),
        ("a100", "opt-66b", 3, "bf16"): Fitted(
            (0.033, 0.0001957, 1.221e-08), (0.0358, 9.527e-05, 5.845e-07), (0.02265, 0.0002085, 5.358e-07), 95
        ),
        ("a100", "opt-66b", 4, "bf16"): Fitted(
            (0.02944, 0.0001514, 8.317e-09), (0.03076, 6.328e-05, 4.519e-07), (0.02747, 0.0001248, 4.047e-07), 95
        ),
        ("a100", "opt-66b", 8, "bf16"): Fitted(
            (0.02549, 0.0001066, 3.391e-09), (0.02316, 4.801e-05, 2.269e-07), (0.02172, 8.979e-05, 3.758e-07), 95
        ),
    }
)
