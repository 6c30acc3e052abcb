"""`job=evaluate benchmark=perplexity_by_position`: what each cache costs, by the number of tokens it holds.

| module | what it holds |
|---|---|
| `job` | the job: settings, text, model, results |
| `scoring` | losses of sequences that pass through a cache a few tokens at a time |
| `report` | perplexities, paired differences, the table and the picture |
"""
