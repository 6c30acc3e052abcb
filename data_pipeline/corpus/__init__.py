"""`job=corpus`: raw sources, read, cleaned and deduplicated, as Parquet by category, with a card.

| module | content |
|---|---|
| `job` | the job: runs a recipe's phases with an executor |
| `recipe` | the checked settings |
| `plan` | the phases of a recipe |
| `reading` | steps that prepare and read the sources |
| `storing` | steps that store documents between phases, and write the corpus |
| `finish` | the last step: record, card, manifest |
"""

from data_pipeline.corpus.job import run

__all__ = ["run"]
