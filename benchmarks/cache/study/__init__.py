"""The study of caches: which tokens keep 16 bits, and what becomes of the others, at equal bytes.

| module | what it holds |
|---|---|
| `cases` | what is measured: policies, treatments, bits, equal bytes, and the order of importance |
| `records` | a line for each result, and the file that a killed run goes on with |
| `measuring` | losses, answers, coverage and L1 errors of a model under one cache |
| `runs` | the command that measures models |
| `recall_text` | documents with facts and questions, to train models that can be asked |
| `train.sh` | the command that trains four models for it |
| `report` | the page |
| `pictures` | the plots |
"""
