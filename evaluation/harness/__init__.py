"""`job=evaluate benchmark=harness`: evaluate a checkpoint on lm-eval's tasks.

| module | what it holds |
|---|---|
| `job` | the job: settings, tasks, model, results |
| `tasks` | the requested tasks, with their documents |
| `copies` | data sets from a local folder, for use without a network |
| `model` | a loaded checkpoint with lm-eval's interface |
| `scoring` | one task at a time, each saved when done; groups and averages |
| `report` | the table and the figure |
| `generated_code` | permission for tasks that execute what the model writes |
| `published` | the suites of the Liger and Sigma papers and the numbers of their tables |
"""
