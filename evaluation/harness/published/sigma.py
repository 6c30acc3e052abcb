"""Suites of the Sigma paper (arXiv 2501.13629 v2) and the results of its tables 7, 8 to 13 and 17, in percent.

The paper names tasks and numbers of examples, and neither its harness nor the metrics. Its table 7 has OPT-1.3B at 51.0
on ARC-e, 76.7 on SciQ and 26.9 on LogiQA. lm-eval's own results for that model are 50.93, 76.50 and 27.19 by accuracy
normalized by length, and 57.03, 84.50 and 22.27 by plain accuracy. So the former is used here wherever there is one.
"""

from evaluation.harness.published.suite import Column, PublishedRow, PublishedSuite

PAPER = "arXiv 2501.13629 v2"


def by_length(title: str) -> Column:
    return Column(title, "acc_norm")


COMMON_SENSE_COLUMNS = {
    "hellaswag": by_length("HellaSwag"),
    "openbookqa": by_length("OBQA"),
    "winogrande": Column("WinoGrande", "acc"),
    "arc_easy": by_length("ARC-e"),
    "arc_challenge": by_length("ARC-c"),
    "piqa": by_length("PIQA"),
    "sciq": by_length("SciQ"),
    "boolq": Column("BoolQ", "acc"),
    "logiqa": by_length("LogiQA"),
}
COMMON_SENSE = PublishedSuite(
    columns=COMMON_SENSE_COLUMNS,
    means={"average": ("average", tuple(COMMON_SENSE_COLUMNS))},
    rows=(
        PublishedRow("Pythia-1B", 7, (47.1, 31.4, 53.4, 49.0, 27.1, 69.3, 76.1, 60.8, 29.8), (49.3,)),
        PublishedRow("TinyLlama-1.1B", 7, (61.5, 36.8, 59.5, 55.6, 32.7, 73.6, 84.2, 56.0, 25.8), (54.0,)),
        PublishedRow("Bloom-1.1B", 7, (43.0, 29.4, 55.0, 45.5, 25.6, 67.2, 74.5, 59.1, 18.9), (46.5,)),
        PublishedRow("OLMo-1.2B", 7, (63.0, 36.2, 59.9, 57.3, 30.9, 75.1, 78.7, 61.8, 27.8), (54.5,)),
        PublishedRow("OPT-1.3B", 7, (53.7, 33.2, 59.8, 51.0, 29.5, 72.4, 76.7, 57.7, 26.9), (51.2,)),
        PublishedRow("Cerebras-GPT-1.3B", 7, (38.4, 29.0, 52.1, 45.8, 25.3, 66.8, 73.0, 59.4, 29.2), (46.5,)),
        PublishedRow("Phi1-1.3B", 7, (30.4, 25.0, 49.9, 34.6, 23.5, 56.0, 64.5, 45.2, 27.3), (39.6,)),
        PublishedRow("Pythia-1.4B", 7, (52.0, 33.2, 57.3, 53.9, 28.3, 70.9, 79.3, 63.3, 27.5), (51.7,)),
        PublishedRow("DCLM-1.4B", 7, (71.6, 42.6, 66.2, 71.6, 43.5, 77.7, 90.7, 71.4, 29.8), (62.8,)),
        PublishedRow("StableLM2-1.6B", 7, (69.0, 38.8, 63.6, 68.2, 38.9, 76.6, 95.3, 74.7, 27.2), (61.4,)),
        PublishedRow("SmolLM-1.7B", 7, (65.7, 42.0, 60.8, 73.5, 46.3, 76.1, 89.6, 66.0, 28.7), (61.0,)),
        PublishedRow("Gemma-2B", 7, (71.4, 40.0, 64.6, 72.3, 41.8, 78.2, 91.5, 69.3, 30.4), (62.2,)),
        PublishedRow("Sigma-1.5B", 7, (67.3, 40.4, 67.5, 72.3, 43.9, 77.8, 94.0, 63.0, 28.4), (61.6,)),
    ),
    marked=("TinyLlama-1.1B", "DCLM-1.4B", "StableLM2-1.6B", "Gemma-2B", "Sigma-1.5B"),
    note=f"{PAPER}, table 7, without examples.",
)

PROBLEM_SOLVING_COLUMNS = {
    "mmlu": Column("MMLU", "acc"),
    "mmlu_pro": Column("MMLU-Pro", "exact_match,custom-extract"),
    "bbh": Column("BBH", "exact_match,get-answer"),
    "humaneval": Column("HumanEval", "pass@1,create_test"),
    "mbpp": Column("MBPP", "pass_at_1"),
    "hendrycks_math": Column("MATH", "exact_match"),
    "gsm8k": Column("GSM8K", "exact_match,strict-match"),
}
PROBLEM_SOLVING = PublishedSuite(
    columns=PROBLEM_SOLVING_COLUMNS,
    means={"average": ("average", tuple(PROBLEM_SOLVING_COLUMNS))},
    rows=(
        PublishedRow("Pythia-1B", 17, (26.1, 11.1, 24.6, 5.5, 4.0, 2.1, 1.9), (10.76,)),
        PublishedRow("TinyLlama-1.1B", 17, (26.7, 11.3, 25.4, None, 10.8, 1.9, 1.8), (11.13,)),
        PublishedRow("Bloom-1.1B", 17, (26.5, 2.1, 6.5, None, None, 0.1, 1.2), (5.20,)),
        PublishedRow("OLMo-1.2B", 17, (26.2, 10.8, 25.8, 5.5, 0.3, 2.3, 2.8), (10.53,)),
        PublishedRow("OPT-1.3B", 17, (24.7, 10.8, 22.8, None, None, 1.7, 2.7), (8.95,)),
        PublishedRow("Cerebras-GPT-1.3B", 17, (26.6, 11.2, 24.5, 1.8, 0.8, 1.0, 1.8), (9.67,)),
        PublishedRow("Phi1-1.3B", 17, (24.9, 11.0, 22.9, 48.2, 27.2, 2.0, 2.5), (19.81,)),
        PublishedRow("Pythia-1.4B", 17, (25.7, 10.9, 24.8, 4.9, 4.9, 2.1, 1.7), (10.73,)),
        PublishedRow("DCLM-1.4B", 17, (47.7, 16.3, 29.9, 9.1, 13.2, 2.5, 6.8), (17.92,)),
        PublishedRow("StableLM2-1.6B", 17, (38.1, 8.7, 26.8, 7.3, 17.7, 5.2, 21.3), (17.88,)),
        PublishedRow("SmolLM-1.7B", 17, (29.9, 11.7, 28.9, 1.2, 41.0, 4.2, 6.4), (17.60,)),
        PublishedRow("Gemma-2B", 17, (41.2, 14.7, 36.0, 25.0, 41.5, 10.9, 16.8), (26.58,)),
        PublishedRow("Sigma-1.5B", 17, (47.0, 17.6, 32.7, 21.3, 30.7, 12.7, 27.8), (27.10,)),
    ),
    marked=("Phi1-1.3B", "DCLM-1.4B", "StableLM2-1.6B", "Gemma-2B", "Sigma-1.5B"),
    note=(
        f"{PAPER}, table 17: 5 examples for MMLU, MMLU-Pro, MATH and GSM8K, 3 for BBH, none for HumanEval. For MBPP "
        "it names no number. Its averages count a missing value as 0."
    ),
)

ABLATIONS_COLUMNS = {
    "hellaswag": by_length("HellaSwag"),
    "openbookqa": by_length("OBQA"),
    "winogrande": Column("WinoGrande", "acc"),
    "arc_challenge": by_length("ARC-c"),
    "piqa": by_length("PIQA"),
    "sciq": by_length("SciQ"),
    "boolq": Column("BoolQ", "acc"),
    "logiqa": by_length("LogiQA"),
    "lambada_openai": Column("LAMBADA", "acc"),
}
MHA, GQA16, GQA4 = "K 32, V 32", "K 16, V 16", "K 4, V 4"
ABLATIONS = PublishedSuite(
    columns=ABLATIONS_COLUMNS,
    means={"average": ("average", tuple(ABLATIONS_COLUMNS))},
    rows=(
        PublishedRow(MHA, 9, (55.6, 37.6, 57.6, 36.0, 73.9, 85.5, 59.6, 28.9, 36.8), (52.40,)),
        PublishedRow("K 32, V 16", 9, (55.5, 39.6, 55.0, 35.9, 71.6, 85.9, 56.9, 28.3, 37.0), (51.74,)),
        PublishedRow("K 16, V 32", 9, (55.1, 38.8, 56.4, 35.8, 71.9, 85.2, 63.6, 29.0, 39.7), (52.83,)),
        PublishedRow(GQA16, 9, (55.1, 39.6, 56.3, 35.4, 71.9, 85.0, 61.4, 27.8, 36.8), (52.14,)),
        PublishedRow("K 16, V 4", 9, (54.0, 38.2, 55.6, 34.8, 72.7, 85.0, 60.3, 29.9, 35.3), (51.76,)),
        PublishedRow("K 4, V 16", 9, (54.6, 37.8, 57.1, 35.1, 72.3, 84.1, 62.5, 28.3, 36.0), (51.97,)),
        PublishedRow(GQA4, 9, (54.0, 38.0, 56.0, 37.5, 72.3, 82.0, 61.3, 28.6, 35.4), (51.66,)),
        PublishedRow("K 4, V 1", 9, (53.5, 38.4, 57.0, 35.1, 72.1, 82.6, 56.9, 28.4, 35.1), (51.03,)),
        PublishedRow("K 1, V 4", 9, (53.9, 36.2, 58.6, 36.9, 71.1, 83.5, 60.7, 28.7, 35.5), (51.67,)),
        PublishedRow(f"{MHA}, top 100 V", 8, (55.6, 37.6, 57.6, 36.0, 74.0, 84.8, 59.3, 27.0, 36.9), (52.10,)),
        PublishedRow(f"{GQA16}, top 100 V", 8, (55.2, 39.6, 56.3, 35.4, 71.8, 84.4, 61.6, 27.8, 36.7), (52.08,)),
        PublishedRow(f"{GQA4}, top 100 V", 8, (54.0, 38.2, 55.9, 37.5, 72.2, 82.0, 61.2, 28.6, 35.4), (51.67,)),
        PublishedRow(f"{MHA}, half K", 10, (55.2, 39.4, 56.9, 36.9, 72.7, 84.1, 63.3, 27.8, 36.8), (52.56,)),
        PublishedRow(f"{GQA16}, half K", 10, (54.3, 39.8, 56.9, 36.7, 72.0, 83.9, 59.5, 29.2, 36.2), (52.06,)),
        PublishedRow(f"{GQA4}, half K", 10, (53.4, 39.2, 56.6, 35.6, 72.5, 84.0, 62.3, 28.9, 34.8), (51.92,)),
        PublishedRow(f"{MHA}, Q 5632", 11, (57.4, 38.0, 57.9, 39.4, 72.9, 85.9, 60.1, 27.3, 38.3), (53.03,)),
        PublishedRow(f"{GQA16}, Q 3072", 11, (56.6, 40.2, 56.1, 40.0, 73.2, 87.3, 61.0, 28.3, 37.7), (53.38,)),
        PublishedRow(f"{GQA16}, Q 4096", 11, (56.7, 40.8, 56.9, 37.1, 73.6, 83.5, 61.7, 28.0, 38.1), (52.93,)),
        PublishedRow(f"{GQA16}, Q 5632", 11, (57.3, 39.8, 57.3, 36.4, 74.2, 83.6, 61.4, 28.7, 39.0), (53.07,)),
        PublishedRow(f"{GQA4}, Q 5632", 11, (56.5, 40.8, 58.2, 37.6, 73.6, 84.7, 61.2, 27.5, 37.9), (53.13,)),
        PublishedRow(f"{GQA16}, F +3072", 12, (57.6, 39.6, 57.3, 38.5, 73.2, 87.3, 59.0, 27.6, 39.2), (53.26,)),
        PublishedRow(f"{GQA16}, F +6144", 12, (59.3, 40.0, 57.0, 38.3, 73.9, 85.2, 59.8, 24.9, 40.1), (53.16,)),
        PublishedRow(f"{GQA16}, F +9216", 12, (60.5, 42.4, 59.8, 39.8, 74.7, 87.3, 59.9, 27.0, 39.2), (54.50,)),
        PublishedRow(f"{GQA16}, F +15360", 12, (62.4, 41.4, 57.3, 41.3, 75.3, 88.3, 60.6, 26.6, 42.5), (55.08,)),
        PublishedRow(f"{GQA16}, F +3072, Q 3072", 12, (58.8, 41.8, 57.5, 39.7, 74.4, 86.9, 62.4, 28.1, 41.5), (54.55,)),
        PublishedRow(f"{GQA16}, F +6144, Q 3072", 12, (60.5, 41.6, 57.4, 39.9, 74.7, 87.3, 59.6, 27.3, 43.8), (54.67,)),
        PublishedRow(f"{GQA16}, F +9216, Q 3072", 12, (61.6, 39.8, 61.0, 40.5, 75.1, 88.7, 59.6, 28.3, 41.2), (55.09,)),
        PublishedRow("K 4, V 16, Q 3072", 13, (56.0, 38.4, 57.7, 37.0, 72.5, 83.8, 62.5, 30.1, 38.8), (52.97,)),
        PublishedRow(f"{GQA16}, half K, Q 3072", 13, (55.9, 39.4, 59.1, 37.5, 73.1, 84.3, 60.6, 27.0, 37.4), (52.72,)),
        PublishedRow("K 4, V 16, half K", 13, (54.3, 37.4, 57.5, 36.3, 72.9, 85.5, 60.5, 26.3, 35.1), (51.74,)),
        PublishedRow("K 4, V 16, half K, Q 3072", 13, (55.8, 40.2, 54.9, 38.5, 74.0, 84.6, 61.1, 26.9, 37.6), (52.61,)),
    ),
    marked=(MHA, GQA16, "K 4, V 16", GQA4, "K 4, V 16, Q 3072"),
    note=(
        f"{PAPER}, tables 8 to 13: models of about 1B with 32 query heads, and K and V key and value heads, after 100B "
        "tokens. `half K`: key heads of half the width; `Q`: model.augmented_query_dim; `F`: what is added to "
        "model.intermediate_size; `top 100 V`: only the values of the 100 largest scores are read."
    ),
)
