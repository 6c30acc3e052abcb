"""The suite of the Liger paper (arXiv 2503.01496) and the results of its tables 2, 3, 8 and 9, in percent."""

from evaluation.harness.published.suite import Column, PublishedRow, PublishedSuite

COLUMNS = {
    "piqa": Column("PIQA", "acc"),
    "arc_easy": Column("ARC-e", "acc"),
    "arc_challenge": Column("ARC-c", "acc_norm"),
    "hellaswag": Column("HellaSwag", "acc_norm"),
    "winogrande": Column("WinoGrande", "acc"),
    "mmlu": Column("MMLU", "acc"),
}
ROWS = (
    PublishedRow("Llama-3.2-1B", 8, (74.1, 65.4, 36.4, 63.8, 60.0, 31.0), (55.1, 59.9)),
    PublishedRow("LoLCATs-Llama-3.2-1B", 8, (74.1, 63.7, 36.4, 51.2, 58.2, 23.1), (51.1, 56.7)),
    PublishedRow("Liger-GLA-Llama-3.2-1B", 8, (75.0, 65.4, 35.7, 59.8, 59.1, 22.4), (52.9, 59.0)),
    PublishedRow("Llama-3.2-3B", 8, (76.4, 74.7, 46.0, 73.6, 69.9, 56.2), (66.1, 68.1)),
    PublishedRow("LoLCATs-Llama-3.2-3B", 8, (76.7, 72.0, 42.3, 51.91, 66.9, 23.6), (55.6, 62.0)),
    PublishedRow("Liger-GLA-Llama-3.2-3B", 8, (77.9, 74.0, 43.9, 70.3, 66.3, 32.1), (60.7, 66.5)),
    PublishedRow("Llama-3-8B", 2, (79.4, 80.1, 53.2, 79.2, 72.9, 65.3), (71.7, 73.0)),
    PublishedRow("SUPRA-Llama-3-8B", 2, (78.9, 75.1, 46.5, 71.7, 65.8, 40.9), (63.2, 67.6)),
    PublishedRow("LoLCATs-Llama-3-8B", 2, (80.1, 80.4, 53.5, 63.4, 72.9, 23.0), (62.2, 70.0)),
    PublishedRow("Liger-GLA-Llama-3-8B", 2, (80.0, 78.7, 51.9, 76.6, 71.4, 43.4), (67.0, 71.7)),
    PublishedRow("Liger-GLA-Llama-3-8B-H", 3, (80.4, 80.1, 52.6, 75.8, 71.5, 44.4), (67.5, 72.1)),
    PublishedRow("Liger-HGRN2-Llama-3-8B", 9, (79.2, 76.8, 48.5, 74.4, 68.8, 36.2), (64.0, 69.5)),
    PublishedRow("Liger-GSA-Llama-3-8B", 9, (79.5, 78.5, 49.4, 74.5, 70.5, 41.2), (65.6, 70.5)),
    PublishedRow("Mistral-7B", 2, (80.6, 80.7, 53.9, 81.1, 74.3, 62.6), (72.2, 74.1)),
    PublishedRow("SUPRA-Mistral-7B", 2, (80.4, 75.9, 45.8, 77.1, 70.3, 34.2), (64.0, 69.9)),
    PublishedRow("LoLCATs-Mistral-7B", 2, (79.7, 78.4, 47.4, 58.4, 71.0, 23.7), (59.8, 67.0)),
    PublishedRow("Liger-GLA-Mistral-7B", 2, (80.1, 78.7, 49.3, 76.3, 70.1, 36.3), (65.1, 70.9)),
)
SUITE = PublishedSuite(
    columns=COLUMNS,
    means={
        "average": ("average", tuple(COLUMNS)),
        "average_without_mmlu": ("without MMLU", tuple(task for task in COLUMNS if task != "mmlu")),
    },
    rows=ROWS,
    marked=tuple(row.model for row in ROWS if row.model.startswith("Liger-GLA")),
    note="arXiv 2503.01496, tables 2, 3, 8 and 9, where MMLU is with 5 examples and the others with none.",
)
