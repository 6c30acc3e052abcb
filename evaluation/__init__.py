"""Jobs that measure a checkpoint: each writes a JSON, a table and a picture, and logs to the run's wandb run.

| module | what it holds |
|---|---|
| `places` | where a checkpoint's results go, and what tells one state of its weights from another |
| `run_log` | values and pictures to the wandb run that a checkpoint's training made |
| `harness` | lm-eval's tasks, with the suite and the numbers of the Liger paper |
"""
