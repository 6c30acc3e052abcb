"""LaTeX to Markdown."""
