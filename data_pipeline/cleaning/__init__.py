"""Cleaning steps: each takes datatrove `Document`s and gives fewer, shorter or masked ones.

| module | step | what it removes |
|---|---|---|
| `language` | `Language` | documents whose prose is in another language |
| `sites` | `Sites` | documents by host and path of their url |
| `quality` | `Quality` | documents that fail Gopher, C4 and FineWeb rules, prose and code judged apart |
| `duplicates` | `exact_documents`, `near_duplicates` | all but one of equal and of nearly equal documents |
| `spans` | `exact_spans` | spans of text that an earlier document has already |
| `masks` | `Masks` | mail and IP addresses, keys, tokens and passwords, by placeholders |
| `decontamination` | `Decontamination` | documents that hold parts of evaluation sets |
| `record` | `Recorded`, `merge_records` | nothing: writes down what a step removed, and why |

The filters and `Masks` are datatrove `PipelineStep`s for one pipeline. `exact_documents`, `near_duplicates` and
`exact_spans` need several, one after the other: they return them as `Stage`s, in order. `prose`, `words` and `windows`
are what the steps share.
"""
