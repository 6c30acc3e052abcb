"""Jobs that measure; each writes a JSON file, a table and a figure, and logs to the wandb run of a run's checkpoint.

| module | what it holds |
|---|---|
| `result_folder` | the folder of a checkpoint's results, and an identity of its weights |
| `loading` | the measured model on its device |
| `caches` | the caches that a measurement compares |
| `answering` | greedy answers to prompts that are read through a cache |
| `scores` | scores by task and cache: means, paired differences, averages of groups |
| `saved_results` | results that a killed measurement leaves for the next |
| `results` | the files of a measurement, and the conditions it was made in |
| `device_timing` | times of work on a GPU, by replays of a captured graph |
| `tables`, `uncertainty` | Markdown tables; means with standard errors, paired differences |
| `run_log` | log values and figures to the wandb run of the checkpoint's training |
| `harness` | lm-eval's tasks, with the suites and the numbers of the Liger and Sigma papers |
| `perplexity_by_position` | what each cache costs, by the number of tokens it holds |
| `recall` | facts that a model is to find again in a long text, at each depth and length |
| `gsm8k` | school mathematics, as lm-eval's task |
| `longbench` | LongBench's 21 sets with their own metrics |
| `cache_analysis` | what compressed caches do to attention, layer by layer |
| `efficiency` | the decoding speed of an architecture against another's |
| `calibration` | `job=calibrate`: rotations and maps of a quantized cache, and what they gain |
| `compare` | `job=compare`: runs and their results side by side |
| `significance` | whether two variants of a training differ by more than their seeds |
"""
