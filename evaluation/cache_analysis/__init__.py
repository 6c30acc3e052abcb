"""`job=measure benchmark=cache_analysis`: what a compressed cache does to attention, layer by layer.

| module | what it holds |
|---|---|
| `job` | the job: settings, text, model, results |
| `selections` | which tokens keep 16 bits at each measured query, for a reserved length |
| `heads` | the attention of one key head and of the query heads that read it |
| `coverage` | attention on the reserved tokens, and by distance |
| `distortion` | the L1 error of the attention distribution, and errors of keys, values, scores and outputs |
| `values` | what was measured in each head of each layer and sequence, and its means |
| `report`, `pictures` | means with standard errors, paired comparisons, the tables and the figure |

Queries, keys and values are those of an ordinary forward pass over a sequence of text. The attention of its last
`benchmark.queries` tokens is computed again, with what each cache would hold at that token: each measured query is the
newest token, and all before it have come one by one. All else is as without a cache, so errors do not add up over
layers.
"""
