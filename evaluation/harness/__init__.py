"""`job=evaluate benchmark=harness`: evaluate a checkpoint on lm-eval's tasks.

| module | what it holds |
|---|---|
| `job` | the job: settings, tasks, model, results |
| `tasks` | the requested tasks, with their documents |
| `copies` | data sets from a local folder, for use without a network |
| `model` | a loaded checkpoint with lm-eval's interface |
| `scoring` | one task at a time, each saved when done; groups and averages |
| `report` | the table and the figure |
| `published` | the suite of the Liger paper and the numbers of its tables |
"""
