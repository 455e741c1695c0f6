"""Times of the layer and of its stages on a GPU, beside baselines in plain torch and the limits of the hardware.

One run interleaves everything that it compares: ours, the baselines, and the two measured ceilings, a large dense
product and a device copy, whose rates give each row its roofline. docs/performance.md says how to read the rows.
"""

from moeblaze_ref.core.on_demand import import_on_demand

LEAGUE_PRESETS = ("conf3", "conf4", "conf1", "qwen3", "mixtral", "fine-grained")
LAYER_PRESETS = (*LEAGUE_PRESETS, "llama4-like", "olmoe", "deepseek-v2-lite", "odd")
KINDS = {
    "layer": "forward and backward of the whole layer",
    "stage": "each stage of a step alone",
    "dispatch": "building the index structures, beside a sort by torch",
    "gating": "probabilities, choice and gates, beside torch",
    "combine": "each token's rows, gathered and summed, beside torch",
    "ladder": "the up-projection on every version, and on the last one idea by idea",
    "host": "how long a step keeps the host busy, in units of one torch.add; with it launched and first_step",
    "launched": "small layers' steps as launched, with launch plans and without, beside CUDA graphs",
    "first_step": "the first step of a fresh process, with empty and with warm caches on the disk",
    "layouts": "experts without a router, by the layout of their weights, beside the layer's own",
    "growth": "a step against L, E, h, k and the skew of its routing, beside torch.compile's and the roofline",
    "counters": "what the hardware counts in each step of the series, and in each product of a training step",
}

import_on_demand(__name__)
