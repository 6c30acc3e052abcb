"""HTML to Markdown: fragments and whole pages."""
