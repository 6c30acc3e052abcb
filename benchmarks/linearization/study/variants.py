"""Variants of the study: each a name and its overrides of `experiment=liger/study`."""

from benchmarks.linearization.study.records import TEACHER, UNTRAINED

TOKENS = 2_621_440  # adaptation tokens in conf/experiment/liger/study.yaml
HALF = TOKENS // 2
QUARTER = TOKENS // 4

GLA = "Liger-GLA"
WINDOW_OF_BEST = "linearization.window=250"  # with 4 sinks the memory of liger/best: memory.py


def alignment(tokens: int, train: str, lr: str) -> list[str]:
    """Return overrides for a first stage of attention transfer."""
    return [
        f"++stages.alignment.train={train}",
        f"++stages.alignment.tokens={tokens}",
        f"++stages.alignment.lr={lr}",
        "++stages.alignment.cross_entropy=0.0",
        "++stages.alignment.attention_transfer=1000.0",
    ]


LOLCATS = [
    "linearization=lolcats",
    *alignment(HALF, "[feature_maps,scalars]", "1e-2"),
    "stages.finetuning.train=[lora,feature_maps,scalars]",
]
KL = ["stages.finetuning.cross_entropy=0.0", "stages.finetuning.kl=1.0"]
COSINE = ["schedule=cosine", "schedule.warmup_tokens=131072"]

UNTRAINED_VARIANTS: dict[str, list[str]] = {
    TEACHER: ["lora=null", "stages.finetuning.train=[projections]"],
    UNTRAINED: ["linearization=sliding_window"],
    "untrained window of 64 and sinks": ["linearization=sliding_window", "linearization.window=64"],
    "untrained window and sinks, most sensitive layer kept": [
        "linearization=sliding_window",
        "softmax_layers={most_sensitive:1}",
    ],
    "untrained window of 250 and sinks": ["linearization=sliding_window", WINDOW_OF_BEST],
    "untrained window of 250 and sinks, most sensitive layer kept": [
        "linearization=sliding_window",
        WINDOW_OF_BEST,
        "softmax_layers={most_sensitive:1}",
    ],
    "joint, untrained": ["linearization=joint"],
    "joint, untrained, most sensitive layer kept": ["linearization=joint", "softmax_layers={most_sensitive:1}"],
    "Liger-GLA, untrained": [],
}
"""Measured right after conversion, without training; for the teacher all layers are first restored."""

PAPER: dict[str, list[str]] = {
    GLA: [],
    "Liger-HGRN2": ["linearization=liger_hgrn2"],
    "Liger-GSA": ["linearization=liger_gsa"],
    "Liger-RWKV6": ["linearization=liger_rwkv6"],
    "Liger-Mamba2": ["linearization=liger_mamba2"],
    "Liger-mLSTM, gated retention": ["linearization=liger_mlstm"],
    "Liger-GLA, hybrid": ["softmax_layers={every:8}"],
    "LoLCATs": LOLCATS,
    "SUPRA": [
        "linearization=supra",
        "lora=null",
        "stages.finetuning.train=[all]",
        "stages.finetuning.lr=1e-3",
        *COSINE,
    ],
    "random gate projection": ["linearization.gate_source=random", "stages.finetuning.train=[lora,gates]"],
    "learned feature map": ["linearization.feature_map=learned", "stages.finetuning.train=[lora,feature_maps]"],
    "no LoRA": ["lora=null", "stages.finetuning.train=[projections]"],
    "no SWA": ["linearization.window=0", "linearization.state_weight=1.0"],
}
"""The structures and the ablations of arXiv 2503.01496, tables 2, 5 and 6, and its scalar gates."""

LORA_QKVO = "lora.targets=[q_proj,k_proj,v_proj,o_proj]"
SCALARS = ["linearization.learned_weights=head", "linearization.learned_gate_shift=true"]

BEYOND: dict[str, list[str]] = {
    "learning rate 3e-3": ["optimizer.lr=3e-3"],
    "learning rate 1e-2": ["optimizer.lr=1e-2"],
    "cosine": [*COSINE, "optimizer.lr=3e-3"],
    "KL": KL,
    "KL and cross-entropy": ["stages.finetuning.cross_entropy=0.5", "stages.finetuning.kl=0.5"],
    "alignment, then cross-entropy": alignment(QUARTER, "[lora]", "0.001"),
    "alignment, then KL": [*alignment(QUARTER, "[lora]", "0.001"), *KL],
    "sinks": ["linearization.sinks=4"],
    "window 128": ["linearization.window=128"],
    "learned weights of heads": [
        "linearization.learned_weights=head",
        "stages.finetuning.train=[lora,scalars]",
    ],
    "learned weights and gate shifts": [*SCALARS, "stages.finetuning.train=[lora,scalars]"],
    "calibrated gates and weights": [
        *SCALARS,
        *alignment(TOKENS // 8, "[scalars]", "0.03"),
        "stages.finetuning.train=[lora,scalars]",
    ],
    "delayed state": ["linearization.delayed=true"],
    "LoRA on q, k, v, o": [LORA_QKVO],
    "LoRA of rank 32": ["lora.rank=32", "lora.alpha=32"],
    "hybrid, most sensitive layer": ["softmax_layers={most_sensitive:1}"],
    "slow gates (temperature 64)": ["linearization.temperature=64"],
    "fast gates (temperature 4)": ["linearization.temperature=4"],
}
"""Changes that may lower the gap at equal tokens, one change of Liger-GLA at a time."""

WINDOW_ALONE = ["linearization.state_weight=0.0", "linearization.window_weight=1.0", "linearization.sinks=4"]
FROM_WINDOW = [*WINDOW_ALONE, "linearization.learned_weights=head"]
WITH_SCALARS = ["stages.finetuning.train=[lora,scalars]"]
SHAPED = [*COSINE, "optimizer.lr=3e-3"]
ALIGNED = [*alignment(QUARTER, "[lora,scalars]", "0.003"), *KL]
WIDE = [LORA_QKVO, "lora.rank=32", "lora.alpha=32"]
RECIPE = [*FROM_WINDOW, "linearization.delayed=true", *WITH_SCALARS, *SHAPED, *ALIGNED, *WIDE]

ONE_KEPT = ["softmax_layers={most_sensitive:1}"]
WINDOW_RECIPE = [*WINDOW_ALONE, *SHAPED, *alignment(QUARTER, "[lora]", "0.003"), *KL, *WIDE]
JOINT = ["linearization=joint"]
JOINT_RECIPE = [
    *JOINT,
    *SHAPED,
    *alignment(QUARTER, "[feature_maps,scalars]", "0.01"),
    *KL,
    *WIDE,
    "stages.finetuning.train=[lora,feature_maps,scalars]",
]

RECIPES: dict[str, list[str]] = {
    "window of 64 and sinks, LoRA": WINDOW_ALONE,
    "window of 124 and sinks, LoRA": [*WINDOW_ALONE, "linearization.window=124"],
    "window of 64 and sinks, LoRA, all of the recipe": WINDOW_RECIPE,
    "from the window": [*FROM_WINDOW, *WITH_SCALARS],
    "from the window, delayed": [*FROM_WINDOW, "linearization.delayed=true", *WITH_SCALARS],
    "from the window, delayed, cosine": [*FROM_WINDOW, "linearization.delayed=true", *WITH_SCALARS, *SHAPED],
    "from the window, delayed, cosine, KL": [*FROM_WINDOW, "linearization.delayed=true", *WITH_SCALARS, *SHAPED, *KL],
    "from the window, delayed, cosine, alignment, KL": [
        *FROM_WINDOW,
        "linearization.delayed=true",
        *WITH_SCALARS,
        *SHAPED,
        *ALIGNED,
    ],
    "recipe": RECIPE,
    "recipe, not delayed": [*RECIPE, "linearization.delayed=false"],
    "recipe, state weight 0.1": [*RECIPE, "linearization.state_weight=0.1"],
    "recipe, most sensitive layer kept": [*RECIPE, *ONE_KEPT],
    "recipe, window of 124": [*RECIPE, "linearization.window=124"],
    "recipe, window of 124, most sensitive layer kept": [*RECIPE, "linearization.window=124", *ONE_KEPT],
    "joint": [*JOINT, "stages.finetuning.train=[lora,feature_maps,scalars]"],
    "joint recipe": JOINT_RECIPE,
    "joint recipe, cross-entropy": [*JOINT_RECIPE, "stages.finetuning.cross_entropy=1.0", "stages.finetuning.kl=0.0"],
    "joint recipe, no alignment": [*JOINT_RECIPE, "stages.alignment=null"],
    "joint recipe, LoRA of rank 8": [*JOINT_RECIPE, "lora.rank=8", "lora.alpha=8"],
    "joint recipe, 128 clusters": [*JOINT_RECIPE, "linearization.num_slots=128"],
    "joint recipe, learned map": [
        *JOINT_RECIPE,
        "linearization.feature_map=learned",
        "linearization.learned_weights=head",
        "linearization.state_weight=1.0",
    ],
    "joint recipe, gates of heads": [
        *JOINT_RECIPE,
        "linearization.gate=mlstm",
        "linearization.temperature=256",
        "linearization.learned_gate_shift=true",
    ],
    "joint recipe, most sensitive layer kept": [*JOINT_RECIPE, *ONE_KEPT],
    "window of 124 and sinks, all of the recipe": [*WINDOW_RECIPE, "linearization.window=124"],
    "window of 124 and sinks, all of the recipe, most sensitive layer kept": [
        *WINDOW_RECIPE,
        "linearization.window=124",
        *ONE_KEPT,
    ],
    "window of 250 and sinks, all of the recipe": [*WINDOW_RECIPE, WINDOW_OF_BEST],
    "window of 250 and sinks, all of the recipe, most sensitive layer kept": [
        *WINDOW_RECIPE,
        WINDOW_OF_BEST,
        *ONE_KEPT,
    ],
    "LoLCATs, cosine, KL, LoRA as in the recipe": [*LOLCATS, *COSINE, *KL, *WIDE, "optimizer.lr=3e-3"],
    "random gate projection, frozen": ["linearization.gate_source=random"],
    "learned feature map, drawn": ["linearization.feature_map=learned", "stages.finetuning.train=[lora,feature_maps]"],
}
"""Combined changes that start as a sliding window with sinks and learn how much of the state to add; and the ablations
that isolate each part."""

DRAWN = "learned feature map, drawn"  # the map starts at random, as in the paper's code, instead of at the identity
