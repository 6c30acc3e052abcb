"""`job=evaluate benchmark=gsm8k`: school mathematics with five examples, as lm-eval's task, under each cache.

| module | what it holds |
|---|---|
| `job` | the job: settings, task, answers, results |
| `task` | lm-eval's task on a local copy of the data, and the scores of given answers |
"""
