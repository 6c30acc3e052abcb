"""Pages of the web, from WARC files."""
