"""Conversion of markup to text: LaTeX, HTML and roff."""
