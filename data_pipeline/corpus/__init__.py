"""`job=corpus`: raw sources, read, cleaned and deduplicated, as Parquet by category, with a card.

| module | what it holds |
|---|---|
| `job` | the job: a recipe's phases, run by an executor |
| `recipe` | the settings, checked |
| `plan` | which phases a recipe makes |
| `reading` | steps that prepare and read the sources |
| `storing` | steps that keep documents between phases, and write the corpus |
| `finish` | the last step: record, card, manifest |
"""

from data_pipeline.corpus.job import run

__all__ = ["run"]
