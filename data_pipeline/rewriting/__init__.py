"""Rewriting: a language model rewrites a corpus in YAML styles; answers are screened, and each is paid for once."""

from data_pipeline.rewriting.job import run

__all__ = ["run"]
