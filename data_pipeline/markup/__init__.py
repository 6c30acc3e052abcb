"""Markup turned into text: LaTeX, HTML and roff."""
