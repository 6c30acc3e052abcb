"""`job=evaluate benchmark=harness`: a checkpoint on lm-eval's tasks.

| module | what it holds |
|---|---|
| `job` | the job: settings, tasks, model, results |
| `tasks` | the tasks asked for, with their documents |
| `copies` | data sets from a folder, where there is no network |
| `model` | a loaded checkpoint as lm-eval calls it |
| `scoring` | one task at a time, each kept when it is done; groups and averages |
| `report` | the table and the picture |
| `published` | the suite of the Liger paper and the numbers in its tables |
"""
