"""Readers of raw text, one per kind of source.

A source has two methods. `identity(by)` returns a JSON-able description of its settings and inputs, cheap to compute,
that changes whenever its documents might. `documents(problems, processes)` yields `Document`s in an order that does not
depend on `processes`, and reports what it skips to `problems`.
"""
