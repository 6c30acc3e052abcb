"""Papers: their index, their venues, and their texts as TEI and PDF."""
