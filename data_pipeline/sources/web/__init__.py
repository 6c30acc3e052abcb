"""Web pages from WARC files."""
