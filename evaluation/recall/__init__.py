"""`job=evaluate benchmark=recall`: facts that a model is to find again in a long text.

| module | what it holds |
|---|---|
| `questions` | the task: needles in a text and lists of pairs, from a seed and a tokenizer; without models or caches |
| `job` | the job: settings, questions, model, results |
| `report` | shares by depth and length, the table and the heat maps |
"""
