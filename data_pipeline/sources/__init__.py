"""Readers of raw text, one per kind of source.

A source is a `parts.SourceInParts`. `data.source` in pretraining needs only two of its methods: `identity(by)`, and
`documents(problems, processes)`, whose order does not depend on `processes`.
"""
