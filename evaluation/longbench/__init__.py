"""`job=evaluate benchmark=longbench`: LongBench's 21 sets (arXiv 2308.14508) under each cache.

| module | what it holds |
|---|---|
| `job` | the job: settings, documents, answers, results |
| `documents` | the sets' local copies, and their prompts as tokens |
| `metrics` | LongBench's metrics |
| `report` | the tables and the picture |

Prompts and lengths are data in conf/benchmark/_longbench_sets.yaml.
"""
