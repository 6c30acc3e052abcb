"""Documentation written in Markdown: pages and what they include."""
