"""Rewriting: a corpus written anew by a language model, in YAML styles, screened, and paid for once."""

from data_pipeline.rewriting.job import run

__all__ = ["run"]
