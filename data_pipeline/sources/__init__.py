"""Readers of raw text, one kind each.

A source has two methods. `identity(by)` returns a JSON-able description of its settings and inputs, cheap to compute,
that changes whenever its documents might. `documents(problems, processes)` yields `Document`s in an order that does not
depend on `processes`, and tells `problems` what it had to leave out.
"""
